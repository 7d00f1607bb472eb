"""What the launcher knows of one host, what happens there, and what is then done.

The states, events and actions of ``host_start.step``.
"""

from __future__ import annotations

from enum import Enum

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass


class StartStage(Enum):
    """The stages of a host's start, as recorded.

    A stage lasts until the next one begins, or until the host is ready or has failed.
    """

    CONNECT = "connect"
    RESOLVE = "resolve the name"
    AGENT = "start the agent"
    COPY = "copy files"
    SET_UP = "set-up lines"
    ENVIRONMENT = "make the environment"
    IMPORT = "import TensorFlow"


# --- states -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Needs:
    """What the tasks of a host need before they can start."""

    ports: int = 0
    files: bool = False
    """Whether the workdir is copied to hosts that do not share it."""
    set_up: bool = False
    """Whether there are set-up lines or requirements."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """The agent is being started, which may take long."""

    needs: Needs


@dataclass(frozen=True, slots=True)
class Greeting:
    """The agent was started, but has not said anything yet."""

    needs: Needs


@dataclass(frozen=True, slots=True)
class Preparing:
    """The agent prepares the host."""

    needs: Needs
    stage: StartStage
    ports: tuple[int, ...] | None = None
    importing: frozenset[str] | None = None
    """The keys of the warm interpreters that import now; None: not begun."""
    warm: frozenset[str] = frozenset()
    """The keys of all warm interpreters, including those that import."""


@dataclass(frozen=True, slots=True)
class ReadyHost:
    """Tasks can run there."""

    ports: tuple[int, ...]
    warm: frozenset[str] = frozenset()
    wanted: int = 0
    """How many ports the tasks of the planned job need."""
    shortage: str | None = None
    """Why the host cannot hold as many."""
    dead_guard: int | None = None
    """The pid of the agent's guard process if it has died."""


@dataclass(frozen=True, slots=True)
class FailedHost:
    """The host cannot be prepared; its agent is still there."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The agent was asked to end."""

    dead_guard: int | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """The agent has ended, or contact with it has."""

    ports: tuple[int, ...] = ()
    """The ports of its tasks, whose addresses other tasks may still have."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """No agent was started, or none that we still want."""


State = (
    Connecting
    | Greeting
    | Preparing
    | ReadyHost
    | FailedHost
    | Ending
    | Gone
    | Unreached
)


# --- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """The agent was started."""


@dataclass(frozen=True, slots=True)
class NotConnected:
    """The agent could not be started."""

    cause: str
    exit_code: ExitCode = ExitCode.START


@dataclass(frozen=True, slots=True)
class Greeted:
    """The agent has said hello; ``problem``: why the host is of no use."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PortsHeld:
    """The agent holds these further ports; ``shortage``: why, if they are too few."""

    ports: tuple[int, ...]
    shortage: str = ""


@dataclass(frozen=True, slots=True)
class FilesCopied:
    """The host has all files."""


@dataclass(frozen=True, slots=True)
class EnvironmentBegun:
    """The host makes its environment, which it did not find."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """The set-up lines have run, and the environment exists."""


@dataclass(frozen=True, slots=True)
class ImportsBegun:
    """The answer to ``Import``: these warm interpreters import now."""

    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unable:
    """The agent cannot prepare the host."""

    cause: str
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """A warm interpreter is ready."""

    key: str


@dataclass(frozen=True, slots=True)
class NotImported:
    """There is no such warm interpreter (any more).

    Its tasks can start without it, unless this says that the host is ``unable``.
    """

    key: str
    unable: Unable | None = None


@dataclass(frozen=True, slots=True)
class PortsWanted:
    """The tasks of the planned job need this number of ports."""

    count: int


@dataclass(frozen=True, slots=True)
class GuardDied:
    """The guard process of the agent has died; the agent follows it."""

    pid: int


@dataclass(frozen=True, slots=True)
class EndWanted:
    """The host is no longer needed; its tasks get ``grace_s``."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The agent has stopped everything and says goodbye."""


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The connection to the agent has ended."""

    cause: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The run goes on, or ends, without the host."""


Event = (
    Connected
    | NotConnected
    | Greeted
    | PortsHeld
    | FilesCopied
    | EnvironmentBegun
    | SetUp
    | ImportsBegun
    | Unable
    | Imported
    | NotImported
    | PortsWanted
    | GuardDied
    | EndWanted
    | AgentEnded
    | ConnectionEnded
    | GivenUp
)


# --- actions ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NoteStage:
    """A stage begins; for the record."""

    stage: StartStage


@dataclass(frozen=True, slots=True)
class HoldPorts:
    """Have the agent hold this number of further ports."""

    count: int


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Begin to send the files."""


@dataclass(frozen=True, slots=True)
class RunSetUp:
    """Have the agent run the set-up lines and find or make the environment."""


@dataclass(frozen=True, slots=True)
class Import:
    """Have the agent start the warm interpreters; answer with ``ImportsBegun``."""


@dataclass(frozen=True, slots=True)
class EndAgent:
    """Have the agent stop what is left, sweep and exit."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the connection now."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Have a new agent end what the old one may have left."""


@dataclass(frozen=True, slots=True)
class ReportReady:
    """Tell the lifecycle that tasks can start there."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the lifecycle that the host cannot be prepared."""

    cause: str
    exit_code: ExitCode = ExitCode.START
    tail: tuple[str, ...] = ()
    together: bool = False
    """Whether to wait until every host has answered: others may fail like this one."""


@dataclass(frozen=True, slots=True)
class ReportLoss:
    """Tell the lifecycle that contact has ended unexpectedly."""

    cause: str


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """Tell the lifecycle that the agent has ended, or never was."""


Action = (
    NoteStage
    | HoldPorts
    | CopyFiles
    | RunSetUp
    | Import
    | EndAgent
    | Disconnect
    | Sweep
    | ReportReady
    | ReportFailure
    | ReportLoss
    | ReportEnd
)
Result = tuple[State, list[Action]]
