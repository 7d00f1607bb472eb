"""What a host does before anything is imported there: the request and its answers.

Pure. ``doctor`` asks hosts to do the same.
"""

from __future__ import annotations

from tfcluster.errors import ExitCode
from tfcluster.lifecycle.types import HostFailed
from tfcluster.model import Description, Host, Interpreter
from tfcluster.protocol.wire import Frame, entries


def prepare_frame(
    description: Description, host: Host, *, cwd: str, log: str, digest: str | None
) -> Frame:
    """The request; ``cwd`` is the working directory on the host.

    ``digest`` identifies the requirements, see ``requirements_digest``; None: there are
    none.
    """
    setup = description.setup
    return {
        "type": "prepare",
        "setup": None if setup is None else setup.text,
        "env": dict(description.env),
        "cwd": cwd,
        "log": log,
        "environment": _environment(description, host, digest),
    }


def _environment(
    description: Description, host: Host, digest: str | None
) -> dict[str, object] | None:
    requirements = description.requirements
    if requirements is None:
        return None
    return {
        "file": requirements.file,
        "files": [list(file) for file in requirements.files],
        "digest": digest,
        "python": list(host.python or description.python),
        "configured": _is_configured(description, host),
        "system_site_packages": requirements.system_site_packages,
    }


def _is_configured(description: Description, host: Host) -> bool:
    return "python" in description.origins or host.python is not None


def changed_python(
    description: Description, host: Host, frame: Frame
) -> Interpreter | None:
    """The interpreter that a leading ``python`` means from now on; None: the same.

    A configured interpreter takes precedence over one that the lines put on the PATH.
    An environment replaces either; the wrapper that starts its base starts it, too.
    """
    configured = _is_configured(description, host)
    made, found = frame.get("environment"), frame.get("python")
    if isinstance(made, str):
        base = host.python or description.python if configured else ()
        return (*base[:-1], made)
    if configured:
        return None
    return (found,) if isinstance(found, str) else None


def unprepared_cause(description: Description, frame: Frame) -> str:
    """One sentence that says what has failed."""
    line, cause = frame.get("line"), str(frame.get("cause"))
    setup = description.setup
    if setup is None or frame.get("of") == "environment":
        return cause
    return setup.failed(line if isinstance(line, int) else None, cause)


def unprepared(description: Description, host: str, frame: Frame) -> HostFailed:
    """The event that the host cannot run tasks, with the last lines of the output.

    Raises WireError if these are not a list.
    """
    tail = tuple(str(line) for line in entries(frame, "tail"))
    return HostFailed(host, unprepared_cause(description, frame), ExitCode.START, tail)
