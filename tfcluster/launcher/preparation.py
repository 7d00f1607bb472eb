"""What a host does before anything is imported there: the request and its answers.

Pure. ``doctor`` asks hosts for the same.
"""

from __future__ import annotations

from tfcluster.errors import ExitCode
from tfcluster.lifecycle.types import HostFailed
from tfcluster.model import Description, Host
from tfcluster.wire import Frame, entries


def prepare_frame(description: Description, *, cwd: str, log: str) -> Frame:
    """The request; ``cwd`` is the working directory on the host."""
    setup = description.setup
    return {
        "type": "prepare",
        "setup": None if setup is None else setup.text,
        "env": dict(description.env),
        "cwd": cwd,
        "log": log,
    }


def changed_python(description: Description, host: Host, frame: Frame) -> str | None:
    """The interpreter that a leading ``python`` stands for from now on; None: as is.

    A configured interpreter takes precedence over what the lines put on the PATH.
    """
    if "python" in description.origins or host.python is not None:
        return None
    python = frame.get("python")
    return python if isinstance(python, str) else None


def unprepared_cause(description: Description, frame: Frame) -> str:
    """One sentence: what has failed."""
    line, cause = frame.get("line"), str(frame.get("cause"))
    setup = description.setup
    if setup is None:
        return cause
    return setup.failed(line if isinstance(line, int) else None, cause)


def unprepared(description: Description, host: str, frame: Frame) -> HostFailed:
    """The host cannot run tasks; the last lines of the output tell more.

    Raises WireError if they are no list.
    """
    tail = tuple(str(line) for line in entries(frame, "tail"))
    return HostFailed(host, unprepared_cause(description, frame), ExitCode.START, tail)
