"""Checks commands before anything starts, and reads secrets, on this machine."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tfcluster.agent.proc import OPEN_FILES
from tfcluster.base.errors import ConfigError, Problem, ResourceError, StartError
from tfcluster.console.text import plural
from tfcluster.plan.compose import TaskSpec
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Allocation, Description, Secret

_FILES_OF_A_TASK = 5
"""A task's files in its agent: output, events, claims, log, a pidfd for its end."""
_FILES_OF_A_PORT = 2
"""A port is held for IPv4 and IPv6."""
_OTHER_FILES = 40
_USUAL = ("python", "python3", "bash", "sh", "env", "mpirun", "torchrun")


def require_commands(
    specs: Iterable[TaskSpec], environ: Mapping[str, str], *, programs: bool
) -> None:
    """Raise StartError if a script (``programs``: or a program) is missing."""
    for spec in _different(specs):
        _require(spec, environ, program=programs)


def command_warnings(
    specs: Iterable[TaskSpec], environ: Mapping[str, str], *, programs: bool
) -> Iterator[str]:
    """Warnings of scripts (``programs``: and programs) that seem to be missing."""
    for spec in _different(specs):
        if not programs and not Path(spec.cwd).is_dir():
            continue
        try:
            _require(spec, environ, program=programs)
        except StartError as error:
            yield f"warning: {error.sentence}"


def idle_hosts(
    description: Description, allocation: Allocation, specs: Iterable[TaskSpec]
) -> Iterator[str]:
    """A warning if hosts of the allocation get no task."""
    used = {spec.place.host.name for spec in specs}
    idle = [host.name for host in allocation.hosts if host.name not in used]
    if not idle:
        return
    count, tasks = len(allocation.hosts), len(description.task_ids())
    why = f"{plural(tasks, 'task')} fit on {len(used)} of {plural(count, 'host')} "
    why += "(`spread: true` gives each host one task first)"
    if description.spread or tasks < count:
        why = f"there are {count} hosts for {plural(tasks, 'task')}"
    yield f"warning: {fold(idle)} {'gets' if len(idle) == 1 else 'get'} no task: {why}"


def shared_files(description: Description, specs: Iterable[TaskSpec]) -> Iterator[str]:
    """A warning if the ranks are to have files of their own, but cannot have them."""
    hosts = [spec.place.host.name for spec in specs if spec.place.rank is not None]
    if description.runtime.files == "private" and len(set(hosts)) > 1:
        yield (
            f"warning: all ranks write the same files, in spite of 'files: private': "
            f"they are on several hosts ({fold(sorted(set(hosts)))})"
        )


def require_open_files(specs: Iterable[TaskSpec]) -> None:
    """Raise ResourceError if the limit of open files is too low for local tasks."""
    tasks = list(specs)
    needed = _OTHER_FILES + sum(
        _FILES_OF_A_TASK + _FILES_OF_A_PORT * spec.ports for spec in tasks
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return
    limit = max(soft, min(OPEN_FILES, hard))
    if limit < needed:
        raise ResourceError(
            f"{len(tasks)} tasks on this machine need about {needed} open files, but "
            f"the limit is {limit}",
            hint=f"run `ulimit -n {needed}` before the launch, or use fewer tasks",
        )


def require_scripts(specs: Iterable[TaskSpec]) -> None:
    """Raise StartError if a script is missing in the files copied to the hosts."""
    for spec in _different(specs):
        script = _script(spec)
        if script is not None and Path(script).is_absolute():
            raise StartError(
                f"{spec.task}: {script} is outside workdir, so it is not copied",
                hint="use a path relative to workdir",
            )
        _require_script(spec)


def require_keras_backend(
    specs: Iterable[TaskSpec], environ: Mapping[str, str]
) -> None:
    """Raise StartError if tasks would import Keras with a backend but TensorFlow."""
    for spec in specs:
        library = spec.shared_env.get("KERAS_BACKEND", environ.get("KERAS_BACKEND"))
        if spec.trains and library and library != "tensorflow":
            raise StartError(
                f"{spec.task}: KERAS_BACKEND is {library!r} in its environment, but "
                "tfcluster can distribute only Keras's 'tensorflow' backend",
                hint="unset KERAS_BACKEND, or set 'runtime: {strategy: none}', which "
                "leaves the program alone",
            )


def _different(specs: Iterable[TaskSpec]) -> list[TaskSpec]:
    first: dict[tuple[tuple[str, ...], str], TaskSpec] = {}
    for spec in specs:
        first.setdefault((spec.argv, spec.cwd), spec)
    return list(first.values())


def _require(spec: TaskSpec, environ: Mapping[str, str], *, program: bool) -> None:
    if program:
        _require_program(spec, environ)
    _require_script(spec)


def _require_program(spec: TaskSpec, environ: Mapping[str, str]) -> None:
    program, folder = spec.argv[0], Path(spec.cwd)
    path = spec.shared_env.get("PATH", environ.get("PATH", os.defpath))
    there = str(folder / program) if os.sep in program else program
    if shutil.which(there, path=path) is None:
        raise StartError(
            f"{spec.task}: '{program}' is not an executable program on this machine",
            hint=_hint(program, folder),
        )


def _script(spec: TaskSpec) -> str | None:
    arguments = spec.arguments[1:]
    if spec.server or not arguments or arguments[0] in ("-m", "-c"):
        return None
    return arguments[0]


def _require_script(spec: TaskSpec) -> None:
    name, folder = _script(spec), Path(spec.cwd)
    if name is None:
        return
    script = folder / name
    if not script.exists():
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [entry.name for entry in script.parent.iterdir()]
        raise StartError(
            f"{spec.task}: there is no {name} in {folder}",
            hint=_nearest(script.name, names) or "set 'workdir'",
        )


def _hint(program: str, folder: Path) -> str | None:
    if program.endswith(".py") and (folder / program).is_file():
        return f"write `python {program}`"
    return _nearest(program, _USUAL)


def _nearest(name: str, names: Sequence[str]) -> str | None:
    import difflib  # it takes long, and is needed only for messages

    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean '{near[0]}'?" if near else None


MAX_SECRET_BYTES = 65_536


def read_secrets(
    secrets: Mapping[str, Secret],
    origins: Mapping[str, str],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The value of each secret. Raises a ConfigError that lists all unreadable ones."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for name, secret in secrets.items():
        where = origins.get(f"secrets.{name}", f"secrets.{name}")
        try:
            values[name] = _read(secret, environ)
        except (OSError, ValueError, KeyError) as error:
            why = error.strerror if isinstance(error, OSError) else error.args[0]
            problems.append(Problem(where, f"secret {name}: {why}"))
    if problems:
        raise ConfigError(problems)
    return values


def _read(secret: Secret, environ: Mapping[str, str]) -> str:
    if secret.file is not None:
        return _read_file(secret.file)
    if secret.env is None or secret.env not in environ:
        raise KeyError(f"${secret.env} is not set here")
    return environ[secret.env]


def _read_file(path: Path) -> str:
    """The file's text without its final newline. Raises ValueError if unusable."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a file")
        if status.st_mode & 0o077:
            raise ValueError(f"{path} can be read by others; chmod 600 {path}")
        data = file.read(MAX_SECRET_BYTES + 1)
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"{path} is over {MAX_SECRET_BYTES} bytes long")
    text = data.decode("utf-8").removesuffix("\n")
    if "\0" in text:
        raise ValueError(f"{path} holds a NUL byte")
    return text
