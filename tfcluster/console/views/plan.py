"""Shows a plan: what tasks have in common, then what differs between them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfcluster.console.display import PLAIN, Style
from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.text import plural, table
from tfcluster.plan.host_patterns import fold

Json = Mapping[str, Any]

_SHOWN_ELSEWHERE = ("TF_CONFIG", "TFCLUSTER_TASK", "TFCLUSTER_RANK")
_NAMED = 8


_OWN_START = ("TFCLUSTER_", "TF_GRPC_REUSE_PORT", "PYTHONUNBUFFERED", "PYTHONHASHSEED")
"""Variables that tfcluster sets for its own use, shown only with ``full``."""


def plan(
    document: Json,
    origins: Mapping[str, str] | None = None,
    style: Style = PLAIN,
    *,
    full: bool = False,
) -> list[str]:
    """Hosts, tasks and where values came from; ``full``: with all variables.

    ``document`` is that of ``plan --json``, but with ``cluster`` once instead of
    ``tf_config`` in every task. ``origins`` maps dotted keys to places.
    """
    tasks: list[Json] = list(document.get("tasks", ()))
    hosts: list[Json] = list(document.get("hosts", ()))
    name, backend = document.get("name", ""), document.get("backend", "")
    lines = [
        style.bold(f"{_word(name)} on {_word(backend)}")
        + f": {plural(len(tasks), 'task')}, {plural(len(hosts), 'host')}"
    ]
    lines += _section("hosts", _hosts(hosts), style)
    if sync := document.get("sync"):
        text = f"copied to {_word(sync)} on each host that does not share them"
        lines += _section("files", [text], style)
    if setup := document.get("setup"):
        title = "setup, by bash on each host"
        lines += _section(title, list(map(_word, setup)), style)
    if requirements := document.get("requirements"):
        title = f"environment of {_word(requirements.get('file'))}, made on each host "
        title += "that lacks it; its Python runs the tasks"
        lines += _section(title, _packages(requirements), style)
    if transport := _transport(document.get("transport") or {}):
        lines += _section("transport between ranks", [transport], style)
    for kind, group in _groups(tasks).items():
        title = f"{_word(kind)}: {plural(len(group), 'task')}"
        lines += _section(title, _group(group if full else _plain(group)), style)
    cluster = document.get("cluster", {}).items()
    rows = [(_word(kind), _addresses(addresses)) for kind, addresses in cluster]
    lines += _section("cluster in TF_CONFIG", table(rows), style)
    if origins:
        rows = [(_word(key), _word(place)) for key, place in origins.items()]
        lines += _section("where values came from", table(rows), style)
    return lines


def _packages(requirements: Json) -> list[str]:
    packages = [line for line in requirements.get("lines") or () if line.strip()]
    lines = list(map(_word, packages[:_NAMED]))
    if len(packages) > _NAMED:
        lines.append(f"and {plural(len(packages) - _NAMED, 'more line')}")
    if requirements.get("system_site_packages"):
        lines.append("and the packages of the Python below")
    return lines


def _section(title: str, lines: Sequence[str], style: Style) -> list[str]:
    return ["", style.bold(title), *(f"  {line}" for line in lines)] if lines else []


def _transport(choice: Json) -> str:
    """The transport that ``auto`` stands for; empty if not known yet."""
    if choice.get("name", "auto") == "auto":
        return ""
    return f"{_word(choice.get('name'))}: {_word(choice.get('reason'))}"


def _hosts(hosts: Sequence[Json]) -> list[str]:
    alike: list[tuple[tuple[str, str], list[str]]] = []
    for host in hosts:
        kind = (_count(host, "slots", "slot"), _count(host, "gpus", "GPU"))
        if not alike or alike[-1][0] != kind:
            alike.append((kind, []))
        alike[-1][1].append(str(host.get("host")))
    rows = [
        (
            _word(fold(names)),
            f"{len(names)} hosts{', each' * any(kind)}" if len(names) > 1 else "",
            *kind,
        )
        for kind, names in alike
    ]
    return table(rows)


def _plain(tasks: Sequence[Json]) -> list[Json]:
    """The tasks without the variables that only tfcluster uses."""

    def kept(env: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in env.items() if not k.startswith(_OWN_START)}

    return [{**task, "env": kept(task.get("env") or {})} for task in tasks]


def _count(host: Json, key: str, noun: str) -> str:
    count = host.get(key)
    return plural(count, noun) if isinstance(count, int) else ""


def _groups(tasks: Sequence[Json]) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for task in tasks:
        groups.setdefault(str(task.get("task")).partition(":")[0], []).append(task)
    return groups


def _group(tasks: Sequence[Json]) -> list[str]:
    """What the tasks of a type have in common, then a few lines per task."""
    same_env = _shared([task.get("env") or {} for task in tasks])
    folders = {str(task.get("log") or "").rpartition("/")[0] for task in tasks}
    same_argv = _all_equal([task.get("argv") for task in tasks])
    same_cwd = _all_equal([task.get("cwd") for task in tasks])
    same_folder = len(folders) == 1
    facts = []
    if same_argv:
        facts.append(("command", _command(tasks[0])))
    how = str(tasks[0].get("start") or "").partition(", ")[2]
    if how.startswith("runtime"):
        facts.append(("", _word(how)))
    if same_cwd:
        facts.append(("in", _word(tasks[0].get("cwd"))))
    facts += [
        ("env" if i == 0 else "", text) for i, text in enumerate(_assignments(same_env))
    ]
    if same_folder:
        facts.append(("logs in", _word(*folders)))
    lines = table([fact for fact in facts if fact[1]])
    rows = table([_task_row(task, whole_log=not same_folder) for task in tasks])
    shared = frozenset(same_env)
    for task, row in zip(tasks, rows, strict=True):
        lines.append(row)
        if not same_argv:
            lines.append(f"    command  {_command(task)}")
        if not same_cwd:
            lines.append(f"    in  {_word(task.get('cwd'))}")
        lines += [f"    {line}" for line in _own(task, shared)]
    return lines


def _task_row(task: Json, *, whole_log: bool) -> tuple[str, ...]:
    rank, log = task.get("rank"), str(task.get("log") or "")
    return (
        _word(task.get("task")),
        "" if rank is None else f"rank {rank}",
        _word(task.get("host") or ""),
        _word(task.get("address") or "no port"),
        _word(log if whole_log else log.rpartition("/")[2]),
    )


def _own(task: Json, shared: frozenset[str]) -> Iterator[str]:
    env = task.get("env") or {}
    own = {key: value for key, value in env.items() if key not in shared}
    if assignments := _assignments(own):
        yield "env  " + " ".join(assignments)
    if filters := task.get("device_filters"):
        yield "sees only  " + " ".join(map(_word, filters))


def _assignments(env: Mapping[str, Any]) -> list[str]:
    return [
        f"unset {_word(key)}" if value is None else f"{_word(key)}={_value(value)}"
        for key, value in env.items()
        if key not in _SHOWN_ELSEWHERE
    ]


def _value(value: object) -> str:
    text = str(value)
    return _word(text if text.startswith("<secret ") else shlex.quote(text))


def _command(task: Json) -> str:
    return _word(shlex.join(map(str, task.get("argv") or ())))


def _addresses(addresses: Sequence[str]) -> str:
    shown = ", ".join(map(_word, addresses[:_NAMED]))
    more = len(addresses) - _NAMED
    return f"{shown}, and {more:,} more, one for each task" if more > 0 else shown


def _shared(envs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = envs
    return {
        key: value
        for key, value in first.items()
        if all(key in env and env[key] == value for env in others)
    }


def _all_equal(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def _word(value: object) -> str:
    return sanitise_word(str(value))
