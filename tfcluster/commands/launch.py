"""The commands ``launch``, ``submit``, ``plan`` and ``rerun``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tfcluster import config, schedulers
from tfcluster.base.errors import ConfigError, Problem
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.state_folder import state_path
from tfcluster.config import Loaded
from tfcluster.config.files import folder_problem
from tfcluster.console.display import DEFAULT, Display, style_of
from tfcluster.console.output import put, say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.views.plan import plan as plan_view
from tfcluster.launcher.detach import detached
from tfcluster.launcher.launch import Begun, check, prepare
from tfcluster.launcher.preflight import command_warnings, idle_hosts, shared_files
from tfcluster.plan.document import plan_lines, task_parts
from tfcluster.plan.model import Description
from tfcluster.record.launched import launched
from tfcluster.record.paths import RunPaths, find, state_dir, valid_name
from tfcluster.schedulers.base import BatchScheduler, asker


def described(loaded: Loaded) -> Description:
    """What was loaded, once the user has seen the warnings."""
    for problem in loaded.warnings:
        say(sanitise(str(problem)))
    return loaded.description


def load_file(
    path: str,
    environ: Mapping[str, str],
    *,
    overrides: Sequence[str],
    passed: Sequence[str],
    name: str | None = None,
    arguments: Sequence[str] = (),
) -> Description:
    return described(
        config.load(
            path,
            overrides=overrides,
            name=name,
            arguments=arguments,
            environ=environ,
            passed=passed,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    verb: str = "launch"
    overrides: tuple[str, ...] = ()
    trace: bool = False
    passed: tuple[str, ...] = ()
    name: str | None = None
    detach: bool = False
    dry_run: bool = False
    count: int | None = None
    ps: int = 0
    gpus: int | None = None
    hosts: str | None = None
    behind: int = 0
    """The number of words that follow ``--``."""
    display: Display = DEFAULT
    submitted: str | None = None
    """The folder of the run, if this launch is inside a job submitted for it."""


def launch(
    words: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> int:
    """Run what the words describe; returns the exit code. Raises TfclusterError."""
    if options.submitted is not None:
        # Here and below: most launches submit nothing.
        from tfcluster.submit.job_entry import run_submitted

        return run_submitted(Path(options.submitted), environ)
    description = _load(words, options, environ)
    if options.dry_run:
        return _show_plan(description, environ, options.display, as_json=False)
    return launch_described(
        description, environ, options.display, detach=options.detach
    )


def launch_described(
    description: Description,
    environ: Mapping[str, str],
    display: Display = DEFAULT,
    *,
    detach: bool,
    begun: Begun = lambda paths: None,
) -> int:
    """Run what a Description says; returns the exit code. Raises TfclusterError."""
    if scheduler := submits_to(description, environ):
        return _launch_as_job(
            description, scheduler, environ, display, begun, detach=detach
        )
    ready = check(description, environ)
    if not detach:
        return ready.run(begun, environ, display)
    run = detached(lambda begun: ready.run(begun, environ))
    put(f"{run}\n")
    _say(f"detached; see `tfcluster status {run}`, `logs -f` and `stop`")
    return 0


def submits_to(
    description: Description, environ: Mapping[str, str]
) -> BatchScheduler | None:
    scheduler = schedulers.batch_scheduler(description.backend)
    return None if scheduler is None or scheduler.is_inside(environ) else scheduler


def submit(
    path: str,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    *,
    passed: Sequence[str] = (),
    name: str | None = None,
    dry_run: bool,
) -> int:
    """Queue a job for the file and print its id, or only print the script."""
    description = load_file(
        path, environ, overrides=overrides, passed=passed, name=name
    )
    from tfcluster.schedulers.script import job_script
    from tfcluster.submit.job import launcher_at
    from tfcluster.submit.job import submit as submit_job

    scheduler = schedulers.batch_scheduler(description.backend)
    if scheduler is None:
        where = description.origins.get("backend", description.source)
        problem = f"backend {description.backend} cannot submit jobs"
        hint = "`tfcluster launch` starts the run; --set backend=slurm submits a job"
        raise ConfigError([Problem(where, problem, hint)])
    if dry_run:
        paths = _provisional_paths(description, environ)
        put(job_script(scheduler, description, launcher_at(paths)))
        return 0
    job = submit_job(description, scheduler, asker(environ), environ)
    put(f"{job.id}\n")
    _say(f"run {job.paths.run}")
    _say(f"submitted; see `tfcluster status {job.paths.run}`, `logs -f` and `stop`")
    return 0


def _launch_as_job(
    description: Description,
    scheduler: BatchScheduler,
    environ: Mapping[str, str],
    display: Display,
    begun: Begun,
    *,
    detach: bool,
) -> int:
    """Submit a job that launches the run, and follow it; for use outside of a job."""
    from tfcluster.submit.follow import follow
    from tfcluster.submit.job import submit as submit_job

    job = submit_job(description, scheduler, asker(environ), environ)
    begun(job.paths)
    if not detach:
        return follow(job, environ, display)
    run = job.paths.run
    put(f"{run}\n")
    _say(f"submitted as job {job.id}; see `tfcluster status {run}`, `logs -f`, `stop`")
    return 0


def plan(
    words: Sequence[str],
    options: LaunchOptions,
    environ: Mapping[str, str],
    *,
    as_json: bool,
) -> int:
    """Print the plan of what the words describe. Raises TfclusterError."""
    description = _load(words, options, environ)
    return _show_plan(description, environ, options.display, as_json=as_json)


def _load(
    words: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> Description:
    if not words:
        command = f"tfcluster {options.verb}"
        hint = f"`{command} cluster.yaml`, or `{command} -n 4 -- python train.py`"
        problem = Problem(options.verb, f"nothing to {options.verb}", hint)
        raise ConfigError([problem])
    overrides = options.overrides
    if options.trace:
        overrides = ("runtime.trace=true", *overrides)
    if options.count is None:
        _refuse_without_count(words, options)
        return load_file(
            words[0],
            environ,
            overrides=overrides,
            passed=options.passed,
            name=options.name,
            arguments=words[1:],
        )
    path = Path(words[0])
    if path.suffix in (".yaml", ".yml") and path.is_file():
        message = "is a cluster.yaml, but -n is for a command"
        count = f"--set tasks.worker={options.count}"
        hint = f"tfcluster {options.verb} {shlex.quote(words[0])} {count}"
        raise ConfigError([Problem(words[0], message, hint)])
    return described(
        config.from_command(
            words,
            count=options.count,
            ps=options.ps,
            gpus=options.gpus,
            hosts=options.hosts,
            overrides=overrides,
            name=options.name,
            environ=environ,
            cwd=Path.cwd(),
            passed=options.passed,
        )
    )


def _refuse_without_count(words: Sequence[str], options: LaunchOptions) -> None:
    before = words[: len(words) - options.behind] if options.behind else words
    looks_like_command = words[0].endswith(".py") or words[0].startswith("python")
    command = f"tfcluster {options.verb}"
    instead = (
        ("--ps", options.ps or None, "`ps: N` under 'tasks', or --set tasks.ps=N"),
        (
            "--gpus",
            options.gpus,
            "`gpus: N` under 'tasks', or --set tasks.worker.gpus=N",
        ),
        ("--hosts", options.hosts, "'hosts:' in the file"),
    )
    problems = [
        Problem(flag, "is for -n N with a command, not for a file", f"write {hint}")
        for flag, value, hint in instead
        if value is not None
    ]
    if before[1:] and not looks_like_command:
        rest = shlex.join([*before[1:], *words[len(before) :]])
        hint = (
            "put arguments for the command after `--`: "
            f"{command} {shlex.quote(words[0])} -- {rest}"
        )
        problems.append(Problem(before[1], f"does not belong to {words[0]}", hint))
    if looks_like_command and Path(words[0]).suffix not in (".yaml", ".yml"):
        python = "" if words[0].startswith("python") else "python "
        hint = f"{command} -n 2 -- {python}{' '.join(words)}"
        problems.append(Problem(words[0], "is a command, not a cluster.yaml", hint))
    if problems:
        raise ConfigError(problems)


def _say(text: str) -> None:
    say(sanitise(text))


def _show_plan(
    description: Description,
    environ: Mapping[str, str],
    display: Display,
    *,
    as_json: bool,
) -> int:
    scheduler = schedulers.get(description.backend)
    inside = isinstance(scheduler, BatchScheduler) and scheduler.is_inside(environ)
    if inside or scheduler.here:
        hosts = scheduler.allocate(description, environ)
    else:
        hosts = scheduler.expected(description)
    prepared = prepare(description, hosts)
    here = scheduler.here and not description.prepares_hosts
    for warning in (
        *command_warnings(prepared.specs, environ, programs=here),
        *idle_hosts(description, hosts, prepared.specs),
        *shared_files(description, prepared.specs),
    ):
        _say(warning)
    if display.quiet and not as_json:
        return 0
    run = _provisional_paths(description, environ)
    style = style_of(sys.stdout, environ, colours=display.colours)
    document = prepared.document(str(run.logs))
    if as_json:
        tasks = [spec.task for spec in prepared.specs]
        pieces = plan_lines(document, prepared.cluster, tasks)
    else:
        parts = task_parts(document, prepared.cluster)
        lines = plan_view(parts, description.origins, style, full=display.everything)
        pieces = (f"{line}\n" for line in lines)
    for piece in pieces:
        put(piece)
    return 0


def _provisional_paths(
    description: Description, environ: Mapping[str, str]
) -> RunPaths:
    return RunPaths(state_path(environ) / "runs" / f"{description.name}-<time>")


def rerun(
    run: str | None,
    environ: Mapping[str, str],
    display: Display = DEFAULT,
    *,
    name: str | None,
    detach: bool,
) -> int:
    """Launch again what a run was launched with; returns the exit code."""
    paths = find(state_dir(environ), run)
    description = launched(paths)
    if name is not None:
        if not valid_name(name) or name.startswith((".", "-")):
            hint = "at most 64 letters, digits, '.', '_' and '-'"
            raise ConfigError([Problem("--name", f"{name!r} is not a name", hint)])
        description = replace(description, name=name, named=True)
    local = schedulers.get(description.backend).here
    here = local or description.sync is not None
    if here and (problem := folder_problem(description.workdir)):
        hint = f"{paths.run} ran there"
        raise ConfigError([Problem("workdir", problem, hint)])
    say(sanitise(f"launching {paths.run} again"))
    return launch_described(description, environ, display, detach=detach)
