"""``step``: the start and the life of one host, as the launcher sees them. Pure.

An agent is started on the host, and greets us. It then holds ports for the host's tasks
and, at the same time, receives files, runs the set-up lines and imports TensorFlow, in
this order. The host is ready when all of this is done.
"""

from __future__ import annotations

from enum import Enum

from tfcluster.errors import ExitCode
from tfcluster.light_dataclasses import dataclass, replace


class Stage(Enum):
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
    stage: Stage
    ports: tuple[int, ...] | None = None
    importing: frozenset[str] | None = None
    """The keys of the warm interpreters that import now; None: not begun."""
    warm: frozenset[str] = frozenset()
    """The keys of all warm interpreters, including those that import."""


@dataclass(frozen=True, slots=True)
class Ready:
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
class Failed:
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


State = Connecting | Greeting | Preparing | Ready | Failed | Ending | Gone | Unreached


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

    stage: Stage


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


# --- step ---------------------------------------------------------------------------


def is_gone(state: State) -> bool:
    """Whether we have no contact with the host, and expect none."""
    return isinstance(state, Gone | Unreached)


def is_awaited(state: State) -> bool:
    """Whether the host may still answer for the first time."""
    return isinstance(state, Connecting | Greeting)


def is_heard(state: State) -> bool:
    """Whether the agent says something at least with every heartbeat."""
    return isinstance(state, Preparing | Ready | Ending)


def ports_of(state: State) -> tuple[int, ...]:
    """The ports that are, or were, held for the host's tasks."""
    if isinstance(state, Preparing | Ready | Gone):
        return state.ports or ()
    return ()


def warm_of(state: State) -> frozenset[str]:
    """The keys of the host's warm interpreters."""
    return state.warm if isinstance(state, Preparing | Ready) else frozenset()


def step(state: State, event: Event) -> Result:
    """The state after ``event``, and the actions to perform, in order.

    An event that has no meaning in the state changes nothing: it may have been on its
    way when the state changed.
    """
    match state:
        case Connecting():
            return _while_connecting(state, event)
        case Unreached():
            return _while_unreached(state, event)
        case Gone():
            return _while_gone(state, event)
    match event:
        case AgentEnded():
            return Gone(ports_of(state)), [ReportEnd()]
        case ConnectionEnded(cause):
            return Gone(ports_of(state)), _of_connection_end(state, cause)
        case GivenUp():
            return Gone(ports_of(state)), [Disconnect(), Sweep()]
        case EndWanted(grace_s):
            guard = state.dead_guard if isinstance(state, Ready | Ending) else None
            return Ending(guard), [EndAgent(grace_s)]
        case GuardDied(pid) if isinstance(state, Ready | Ending):
            return replace(state, dead_guard=pid), []
        case Unable(cause, tail) if isinstance(state, Greeting | Preparing):
            return Failed(), [ReportFailure(cause, tail=tail)]
    match state:
        case Greeting():
            return _while_greeting(state, event)
        case Preparing():
            return _while_preparing(state, event)
        case Ready():
            return _while_ready(state, event)
    return state, []


def _while_connecting(state: Connecting, event: Event) -> Result:
    match event:
        case Connected():
            return Greeting(state.needs), [HoldPorts(state.needs.ports)]
        case NotConnected(cause, exit_code):
            return Unreached(), [ReportFailure(cause, exit_code, together=True)]
        case EndWanted():
            return Unreached(), [ReportEnd()]
        case GivenUp():
            return Unreached(), []
    return state, []


def _while_unreached(state: Unreached, event: Event) -> Result:
    match event:
        case Connected():
            return state, [Disconnect()]
        case EndWanted():
            return state, [ReportEnd()]
    return state, []


def _while_gone(state: Gone, event: Event) -> Result:
    match event:
        case EndWanted():
            return state, [ReportEnd()]
        case GivenUp():
            return state, [Disconnect(), Sweep()]
    return state, []


def _of_connection_end(state: State, cause: str) -> list[Action]:
    match state:
        case Greeting() | Preparing():
            return [ReportFailure(cause, together=True)]
        case Ready(dead_guard=int(pid)) | Ending(dead_guard=int(pid)):
            cause = (
                f"the guard process of its agent (pid {pid}) died, and the connection "
                "ended with it; the agent has stopped all tasks there"
            )
            return [ReportLoss(f"contact lost: {cause}")]
        case Ready() | Ending():
            return [ReportLoss(f"contact lost: {cause}")]
    return []


def _while_greeting(state: Greeting, event: Event) -> Result:
    if not isinstance(event, Greeted):
        return state, []
    if event.problem is not None:
        return Failed(), [ReportFailure(event.problem, together=True)]
    if state.needs.files:
        copying = Preparing(state.needs, Stage.COPY)
        return copying, [NoteStage(Stage.COPY), CopyFiles()]
    return _set_up(Preparing(state.needs, Stage.AGENT))


def _while_preparing(state: Preparing, event: Event) -> Result:
    stage, importing = state.stage, state.importing
    match event:
        case PortsHeld(ports, shortage):
            if len(ports) < state.needs.ports:
                return Failed(), [ReportFailure(shortage, together=True)]
            return _advance(replace(state, ports=ports))
        case FilesCopied() if stage is Stage.COPY:
            return _set_up(state)
        case EnvironmentBegun() if stage is Stage.SET_UP:
            making = replace(state, stage=Stage.ENVIRONMENT)
            return making, [NoteStage(Stage.ENVIRONMENT)]
        case SetUp() if stage in (Stage.SET_UP, Stage.ENVIRONMENT):
            return replace(state, stage=Stage.IMPORT), [Import()]
        case ImportsBegun(keys):
            after, actions = _advance(replace(state, importing=keys, warm=keys))
            return after, [NoteStage(Stage.IMPORT), *actions] if keys else actions
        case Imported(key) if importing is not None:
            return _advance(replace(state, importing=importing - {key}))
        case NotImported(key, None) if importing is not None:
            warm = state.warm - {key}
            return _advance(replace(state, importing=importing - {key}, warm=warm))
        case NotImported(_, Unable(cause, tail)):
            return Failed(), [ReportFailure(cause, tail=tail)]
    return state, []


def _set_up(state: Preparing) -> Result:
    if not state.needs.set_up:
        return replace(state, stage=Stage.IMPORT), [Import()]
    state = replace(state, stage=Stage.SET_UP)
    return state, [NoteStage(Stage.SET_UP), RunSetUp()]


def _advance(state: Preparing) -> Result:
    """The host is ready if it has its ports and nothing imports any more."""
    if state.ports is None or state.importing is None or state.importing:
        return state, []
    ready = Ready(state.ports, state.warm, wanted=len(state.ports))
    return ready, [ReportReady()]


def _while_ready(state: Ready, event: Event) -> Result:
    match event:
        case NotImported(key):
            return replace(state, warm=state.warm - {key}), []
        case PortsWanted(count):
            state = replace(state, wanted=count, shortage=None)
            missing = count - len(state.ports)
            return state, [HoldPorts(missing)] if missing > 0 else []
        case PortsHeld(ports, shortage):
            ports = (*state.ports, *ports)
            short = shortage if len(ports) < state.wanted else None
            return replace(state, ports=ports, shortage=short), []
    return state, []
