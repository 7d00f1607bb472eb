"""The command ``warm``: keep interpreters on hosts, list them, or end them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tfcluster import config, schedulers
from tfcluster.commands.doctor import preparing
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.style import style_of
from tfcluster.console.text import duration, plural
from tfcluster.console.views.kept_interpreters import Row, kept_json, kept_table
from tfcluster.durations import parse_duration
from tfcluster.errors import (
    ConfigError,
    ExitCode,
    Problem,
    ResourceError,
    TfclusterError,
)
from tfcluster.launcher.job import Job
from tfcluster.launcher.kept_interpreters import keep_requests, libraries_text
from tfcluster.launcher.launch import prepare
from tfcluster.launcher.preparation import changed_python, unprepared_cause
from tfcluster.launcher.warm_hosts import Answer, ask_hosts
from tfcluster.model import Description, Host
from tfcluster.record import warm_hosts
from tfcluster.record.paths import ELSEWHERE, state_dir
from tfcluster.record.warm_hosts import WarmHosts
from tfcluster.schedulers.base import Remembering
from tfcluster.schedulers.local import LocalScheduler
from tfcluster.schedulers.starting import Starter
from tfcluster.vocabulary import FORMAT_VERSION
from tfcluster.wire import Frame

_MAX_KEEP_S = 7 * 86_400.0
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of ``warm``."""

    keep: str
    overrides: tuple[str, ...]
    passed: tuple[str, ...]
    listing: bool
    stop: bool
    as_json: bool


def warm(path: str | None, options: Options, environ: Mapping[str, str]) -> int:
    """Keep, list or end interpreters; returns an exit code. Raises TfclusterError."""
    if options.listing and options.stop:
        raise _usage("--stop", "cannot be combined with --list", "give one of them")
    if options.as_json and not options.listing:
        raise _usage("--json", "goes only with --list", "tfcluster warm --list --json")
    if options.listing:
        return _list(path, environ, as_json=options.as_json)
    if options.stop:
        return _stop(path, environ)
    if path is None:
        hint = "`tfcluster warm cluster.yaml`, or --list, or --stop"
        raise _usage("warm", "which cluster.yaml?", hint)
    return _keep(path, options, environ)


# --- keep ----------------------------------------------------------------------------


def _keep(path: str, options: Options, environ: Mapping[str, str]) -> int:
    keep_s = parse_duration(options.keep)
    if keep_s is None or not 0 < keep_s <= _MAX_KEEP_S:
        problem = f"{options.keep!r} is not a duration of at most 7d"
        raise _usage("--keep", problem, "write a number with a unit: 30m, 2h, 1d")
    loaded = config.load(
        path, overrides=options.overrides, environ=environ, passed=options.passed
    )
    for warning in loaded.warnings:
        say(sanitise(str(warning)))
    description = loaded.description
    _refuse_scheduler(description)
    job = _job(description, environ)
    starter = schedulers.of_launcher(description).starter(description, environ)
    purpose = _purpose(path)
    # Remember the hosts first: --stop must find them even if this command is killed.
    _remember(description, purpose, environ)
    answers = ask_hosts(
        job.used_hosts(),
        starter,
        lambda answer: _requests(job, answer, keep_s, purpose),
        patience_s=description.start_timeout_s,
        prepare=preparing(description),
        unprepared=partial(unprepared_cause, description),
        say=lambda text: say(sanitise(text)),
    )
    for answer in answers:
        _tell_kept(answer, keep_s, environ)
    return _code(answers)


def _refuse_scheduler(description: Description) -> None:
    if description.backend in ("local", "ssh"):
        return
    raise _usage(
        description.origins.get("backend", description.source),
        f"interpreters cannot be kept on hosts of backend {description.backend}: they "
        "belong to a job, and everything ends with it",
        "inside a job, --set backend=local keeps one on the host where you are",
    )


def _job(description: Description, environ: Mapping[str, str]) -> Job:
    """The job that a launch would run. Raises ConfigError if nothing would be warm."""
    backend = schedulers.get(description.backend)
    prepared = prepare(description, backend.allocate(description, environ))
    if all(spec.warm is None for spec in prepared.specs):
        raise _usage(
            description.source,
            "no task of it would be forked from a warm interpreter",
            "its command must run a Python script that imports TensorFlow, and "
            "runtime.warm_start must be true",
        )
    if any(spec.warm and len(spec.python or ()) > 1 for spec in prepared.specs):
        raise _usage(
            description.origins.get("python", description.source),
            "interpreters that a command starts, as in a container, cannot be kept",
            "launches start their own",
        )
    return Job(
        run="",
        description=description,
        allocation=prepared.allocation,
        specs={spec.task: spec for spec in prepared.specs},
        secrets={},
        token="",
        logs=Path(),
    )


def _requests(job: Job, answer: Answer, keep_s: float, purpose: str) -> list[Frame]:
    host = answer.host
    if answer.prepared is not None:
        python = changed_python(job.description, host, answer.prepared)
        if python is not None:
            job = job.with_python(host.name, python)
    package = answer.package or ""
    return keep_requests(job, host, package, keep_s=keep_s, purpose=purpose)


def _tell_kept(answer: Answer, keep_s: float, environ: Mapping[str, str]) -> None:
    style = style_of(sys.stderr, environ)
    for frame in answer.frames:
        if frame["type"] == "kept":
            libraries = frame.get("libraries")
            words = libraries_text(libraries if isinstance(libraries, dict) else {})
            verb = "still keeps" if frame.get("renewed") is True else "keeps"
            text = f"{answer.host.name}: pid {frame.get('pid')} {verb} {words}"
            put(sanitise(f"{text}, until {duration(keep_s)} after its last use") + "\n")
        else:
            _fail(answer, str(frame.get("cause")), frame.get("tail"))
    if answer.error is not None:
        lines = [f"{answer.host.name}: error: {answer.error}"]
        lines += [f"    {line}" for line in answer.tail]
        for line in lines:
            say(style.red(sanitise(line)))


def _fail(answer: Answer, cause: str, tail: object) -> None:
    answer.error, answer.code = cause, ExitCode.START
    answer.tail = tuple(map(str, tail)) if isinstance(tail, list) else ()


def _remember(
    description: Description, purpose: str, environ: Mapping[str, str]
) -> None:
    backend = schedulers.get(description.backend)
    if not isinstance(backend, Remembering):
        return  # this machine is always asked
    state = state_dir(environ)
    hosts = backend.remember(description)
    try:
        warm_hosts.save(state, WarmHosts(purpose, description.backend, hosts))
    except OSError as error:
        raise ResourceError(
            f"cannot write to {state}: {error.strerror}", hint=ELSEWHERE
        ) from error


# --- list and stop -------------------------------------------------------------------


def _list(path: str | None, environ: Mapping[str, str], *, as_json: bool) -> int:
    rows: dict[tuple[str, object], Row] = {}
    failed: list[Answer] = []
    for _, answers in _asked(path, environ, {"type": "list_kept"}):
        failed += [answer for answer in answers if answer.error is not None]
        for host, kept in _listed(answers):
            if path is None or kept.get("purpose") == _purpose(path):
                # A host may be known under several descriptions.
                rows[host, kept.get("pid")] = (host, kept)
    if as_json:
        put(json.dumps(_document(rows.values(), failed), indent=1) + "\n")
    else:
        put("".join(f"{line}\n" for line in kept_table(list(rows.values()))))
        if not rows and not failed:
            say("nothing is kept: `tfcluster warm cluster.yaml` does that")
    return _tell_failed(failed, environ)


def _document(rows: Iterable[Row], failed: Sequence[Answer]) -> dict[str, object]:
    return {
        "schema": FORMAT_VERSION,
        "interpreters": [kept_json(*row) for row in rows],
        "errors": [{"host": each.host.name, "error": each.error} for each in failed],
    }


def _listed(answers: Sequence[Answer]) -> Iterator[Row]:
    for answer in answers:
        for frame in answer.frames:
            found = frame.get("interpreters")
            for kept in found if isinstance(found, list) else []:
                if isinstance(kept, dict):
                    yield answer.host.name, kept


def _stop(path: str | None, environ: Mapping[str, str]) -> int:
    purpose = None if path is None else _purpose(path)
    request: Frame = {"type": "end_kept", "purpose": purpose}
    failed: list[Answer] = []
    count = 0
    for known, answers in _asked(path, environ, request):
        wrong = [answer for answer in answers if answer.error is not None]
        failed += wrong
        for answer in answers:
            for pid in _ended_pids(answer):
                put(sanitise(f"{answer.host.name}: pid {pid} ends") + "\n")
                count += 1
        # Hosts that could not be asked must be found again.
        if known is not None and not wrong:
            warm_hosts.forget(state_dir(environ), known.purpose)
    if not count and not failed:
        say("nothing was kept" if path is None else f"nothing was kept for {path}")
    return _tell_failed(failed, environ)


def _ended_pids(answer: Answer) -> Iterator[object]:
    for frame in answer.frames:
        pids = frame.get("pids")
        yield from pids if isinstance(pids, list) else []


def _asked(
    path: str | None, environ: Mapping[str, str], request: Frame
) -> Iterator[tuple[WarmHosts | None, list[Answer]]]:
    """The answers of this machine and of all hosts that were asked to keep something.

    With a path, only the hosts of that description are asked besides this machine.
    """

    def ask(hosts: Sequence[Host], starter: Starter) -> list[Answer]:
        return ask_hosts(hosts, starter, lambda _: [request], patience_s=_ANSWER_S)

    yield None, ask((Host(name="localhost", address="127.0.0.1"),), LocalScheduler())
    for known in warm_hosts.load(state_dir(environ)):
        backend = schedulers.get(known.backend)
        if path is not None and known.purpose != _purpose(path):
            continue
        if isinstance(backend, Remembering):
            try:
                hosts, starter = backend.return_to(known.hosts, environ)
            except TfclusterError as error:
                say(sanitise(f"{known.purpose}: {error.message}"))
            else:
                yield known, ask(hosts, starter)


def _tell_failed(failed: Sequence[Answer], environ: Mapping[str, str]) -> int:
    """Name the hosts that could not be asked; returns the exit code."""
    style = style_of(sys.stderr, environ)
    for answer in failed:
        say(style.red(sanitise(f"{answer.host.name}: error: {answer.error}")))
    if failed:
        hosts = plural(len(failed), "host")
        say(f"{hosts} could not be asked; what is kept there ends in time")
    return _code(failed)


def _code(answers: Sequence[Answer]) -> int:
    codes = {answer.code for answer in answers if answer.error is not None}
    if ExitCode.HOST in codes:
        return ExitCode.HOST
    return max(codes, default=ExitCode.OK)


def _purpose(path: str) -> str:
    return str(Path(path).resolve())


def _usage(where: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where, what, hint)])
