"""What a host does before tasks start there: the requests and what answers mean.

It runs the set-up lines, finds or makes the environment, and starts warm interpreters.
``doctor`` asks hosts to do the same.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfcluster.base.isolated_import import module_argv
from tfcluster.launcher.host_start import Unable
from tfcluster.launcher.job import Job, search_paths, warm_env
from tfcluster.plan.compose import WARM, warm_specs
from tfcluster.plan.model import Description, Host, Interpreter, Requirements, Strategy
from tfcluster.protocol.messages import Cold, Prepared, Unprepared
from tfcluster.protocol.requests import EnvironmentSpec, Prepare, Warm
from tfcluster.protocol.wire import UNFORKABLE, UNUSABLE

if TYPE_CHECKING:
    import hashlib

_SOURCES = (
    *(".py", ".pyi", ".pyx", ".toml", ".cfg", ".in", ".txt"),
    *(".c", ".cc", ".cpp", ".cu", ".h"),
)
_ARCHIVES = (".whl", ".zip", ".gz", ".bz2")
_COMPILED = (".pyx", ".c", ".cc", ".cpp", ".cu", ".h")
_SETTINGS = ("pyproject.toml", "setup.py", "setup.cfg")
_SKIPPED = {"__pycache__", "build", "node_modules"}
_LARGE_BYTES = 1 << 20


def prepare_request(
    description: Description, host: Host, *, cwd: str, log: str, digest: str | None
) -> Prepare:
    """The request; ``cwd`` is on the host, ``digest`` that of the requirements."""
    setup = description.setup
    return Prepare(
        setup=None if setup is None else setup.text,
        env=dict(description.env),
        cwd=cwd,
        log=log,
        environment=_environment(description, host, digest),
    )


def _environment(
    description: Description, host: Host, digest: str | None
) -> EnvironmentSpec | None:
    requirements = description.requirements
    if requirements is None or digest is None:
        return None
    return EnvironmentSpec(
        file=requirements.file,
        files=requirements.files,
        digest=digest,
        python=host.python or description.python,
        configured=_is_configured(description, host),
        system_site_packages=requirements.system_site_packages,
    )


def _is_configured(description: Description, host: Host) -> bool:
    return "python" in description.origins or host.python is not None


def changed_python(
    description: Description, host: Host, prepared: Prepared
) -> Interpreter | None:
    """The interpreter for a leading ``python`` from now on; None: the same."""
    configured = _is_configured(description, host)
    if prepared.environment is not None:
        base = host.python or description.python if configured else ()
        return (*base[:-1], prepared.environment)
    if configured or prepared.python is None:
        return None
    return (prepared.python,)


def unprepared_cause(description: Description, failed: Unprepared) -> str:
    setup = description.setup
    if setup is None or failed.of == "environment":
        return failed.cause
    return setup.failed(failed.line, failed.cause)


def warm_requests(
    job: Job, host: Host, package: str, cwd: Callable[[str, str], str]
) -> list[Warm]:
    """The requests to start the warm interpreters that the tasks of a host need."""
    return [
        Warm(
            key=key,
            argv=tuple(module_argv(spec.python, WARM, root=package)),
            env=warm_env(job, spec),
            cwd=cwd(host.name, spec.cwd),
            log=str(job.logs / f"warm-{host.name}-{number}.log"),
            wrapped=len(spec.python) > 1,
            prepend=search_paths(job, package),
        )
        for number, (key, spec) in enumerate(warm_specs(job.on_host(host)).items())
    ]


def why_unable(job: Job, host: Host, cold: Cold) -> Unable | None:
    """Why no task can start without this warm interpreter; None: all can."""
    strategy = job.description.runtime.strategy
    if strategy is Strategy.NONE or cold.wrapper == UNFORKABLE:
        return None
    if cold.wrapper == UNUSABLE and cold.tail:
        return Unable(cold.tail[-1].removeprefix("tfcluster: "))
    pythons = {spec.python for spec in job.on_host(host) if spec.warm == cold.key}
    which = next((f"{shlex.join(python)} " for python in pythons if python), "Python ")
    what = "has" if cold.unfit else "cannot import TensorFlow:"
    cause = f"{which}{what} {cold.cause} ({job.description.remedy})"
    return Unable(cause, cold.tail)


def requirements_digest(requirements: Requirements) -> str:
    """A digest that differs if the files or the local packages they refer to differ.

    In a folder, sources count by content; large ones and archives, by size and time. Of
    an editable package, only the files that its installation reads count: its
    modules are read in place.
    """
    import hashlib  # here and below: it takes long, and few launches need it

    digest = hashlib.sha256()
    for name, text in requirements.files:
        digest.update(f"{name}\0{text}\0".encode(errors="surrogateescape"))
    for path in requirements.local:
        _update(digest, path, _SOURCES)
    for path in requirements.editable:
        _update(digest, path, _COMPILED)
        for name in _SETTINGS:
            _update(digest, path / name, ())
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path, sources: tuple[str, ...]) -> None:
    for part in _contents(path, sources):
        digest.update(part)
        digest.update(b"\0")


def _contents(path: Path, sources: tuple[str, ...]) -> Iterator[bytes]:
    """What we know here about a file or folder; hosts may have files that we lack."""
    import hashlib

    try:
        if path.is_file():
            yield hashlib.sha256(path.read_bytes()).digest()
            return
        for where, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if f[0] != "." and f not in _SKIPPED)
            if "pyvenv.cfg" in names:
                folders.clear()
                continue
            for name in sorted(names):
                if not name.endswith((*_ARCHIVES, *sources)):
                    continue
                file = Path(where, name)
                yield str(file.relative_to(path)).encode(errors="surrogateescape")
                status = file.stat()
                if name.endswith(sources) and status.st_size < _LARGE_BYTES:
                    yield file.read_bytes()
                else:  # data rather than a source
                    yield f"{status.st_size} {status.st_mtime_ns}".encode()
    except OSError:
        return
