"""``step``: the start and the life of one host, as the launcher sees them. Pure.

An agent is started on the host, and greets us. It then holds ports for the host's tasks
and, at the same time, receives files, runs the set-up lines and imports TensorFlow, in
this order. The host is ready when all of this is done. Messages of the agent that need
no interpretation are events themselves, and what the lifecycle must know is an action.
"""

from __future__ import annotations

from enum import Enum

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass, replace
from tfcluster.launcher.agent_connection import Closed
from tfcluster.lifecycle.events import (
    HostClosed,
    HostEvent,
    HostFailed,
    HostLost,
    HostReady,
)
from tfcluster.protocol.messages import Bye, Making, Prepared, Synced, Warmed


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
    needs: Needs


@dataclass(frozen=True, slots=True)
class Preparing:
    needs: Needs
    stage: StartStage = StartStage.AGENT
    ports: tuple[int, ...] | None = None
    importing: frozenset[str] | None = None
    """The keys of the warm interpreters that import now; None: not begun."""
    warm: frozenset[str] = frozenset()
    """The keys of all warm interpreters, including those that import."""


@dataclass(frozen=True, slots=True)
class ReadyHost:
    ports: tuple[int, ...]
    warm: frozenset[str] = frozenset()
    wanted: int = 0
    """How many ports the tasks of the planned job need."""
    shortage: str | None = None
    """Why the host cannot hold as many."""


@dataclass(frozen=True, slots=True)
class FailedHost:
    """The host cannot be prepared; its agent is still there."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The agent was asked to end."""


@dataclass(frozen=True, slots=True)
class Gone:
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


@dataclass(frozen=True, slots=True)
class Connected:
    """The agent was started."""


@dataclass(frozen=True, slots=True)
class NotConnected:
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
class ImportsBegun:
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Unable:
    """The agent cannot prepare the host."""

    cause: str
    tail: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotImported:
    """There is no such warm interpreter (any more); ``unable``: the host fails."""

    key: str
    unable: Unable | None = None


@dataclass(frozen=True, slots=True)
class PortsWanted:
    count: int


@dataclass(frozen=True, slots=True)
class EndWanted:
    grace_s: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The run goes on, or ends, without the host."""


Event = (
    Connected
    | NotConnected
    | Greeted
    | PortsHeld
    | Synced
    | Making
    | Prepared
    | ImportsBegun
    | Unable
    | Warmed
    | NotImported
    | PortsWanted
    | EndWanted
    | Bye
    | Closed
    | GivenUp
)


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a stage: send the files, run the set-up lines, or import."""

    stage: StartStage


@dataclass(frozen=True, slots=True)
class HoldPorts:
    """Have the agent hold this number of further ports."""

    count: int


@dataclass(frozen=True, slots=True)
class EndAgent:
    """Have the agent stop what is left, sweep and exit."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the connection now; ``sweep``: a new agent ends what the old one left."""

    sweep: bool


Action = Begin | HoldPorts | EndAgent | Disconnect | HostEvent
Result = tuple[State, list[Action]]


def is_gone(state: State) -> bool:
    """Whether we have no contact with the host, and expect none."""
    return isinstance(state, Gone | Unreached)


def is_awaited(state: State) -> bool:
    """Whether the host may still answer for the first time."""
    return isinstance(state, Connecting | Greeting)


def is_heard(state: State) -> bool:
    """Whether the agent says something at least with every heartbeat."""
    return isinstance(state, Preparing | ReadyHost | Ending)


def ports_of(state: State) -> tuple[int, ...]:
    """The ports that are, or were, held for the host's tasks."""
    if isinstance(state, Preparing | ReadyHost | Gone):
        return state.ports or ()
    return ()


def warm_of(state: State) -> frozenset[str]:
    return state.warm if isinstance(state, Preparing | ReadyHost) else frozenset()


def step(host: str, state: State, event: Event) -> Result:
    """The state after ``event``, if it means anything in this state, and actions."""
    match state:
        case Connecting():
            return _while_connecting(host, state, event)
        case Unreached() | Gone():
            return state, _when_over(host, state, event)
    match event:
        case Bye():
            return Gone(ports_of(state)), [HostClosed(host)]
        case Closed(_, cause):
            actions: list[Action] = []
            if isinstance(state, Greeting | Preparing):
                actions = [HostFailed(host, cause)]
            elif isinstance(state, ReadyHost | Ending):
                actions = [HostLost(host, f"contact lost: {cause}")]
            return Gone(ports_of(state)), actions
        case GivenUp():
            return Gone(ports_of(state)), [Disconnect(sweep=True)]
        case EndWanted(grace_s):
            return Ending(), [EndAgent(grace_s)]
    match state:
        case Greeting():
            return _while_greeting(host, state, event)
        case Preparing():
            return _while_preparing(host, state, event)
        case ReadyHost():
            return _while_ready(state, event)
    return state, []


def _while_connecting(host: str, state: Connecting, event: Event) -> Result:
    match event:
        case Connected():
            return Greeting(state.needs), [HoldPorts(state.needs.ports)]
        case NotConnected(cause, exit_code):
            return Unreached(), [HostFailed(host, cause, exit_code)]
        case EndWanted():
            return Unreached(), [HostClosed(host)]
        case GivenUp():
            return Unreached(), []
    return state, []


def _when_over(host: str, state: Unreached | Gone, event: Event) -> list[Action]:
    match event:
        case EndWanted():
            return [HostClosed(host)]
        case GivenUp() if isinstance(state, Gone):
            return [Disconnect(sweep=True)]
        case Connected():
            return [Disconnect(sweep=False)]
    return []


def _while_greeting(host: str, state: Greeting, event: Event) -> Result:
    match event:
        case Greeted(None):
            preparing = Preparing(state.needs)
            if state.needs.files:
                return _begin(preparing, StartStage.COPY)
            return _set_up(preparing)
        case Greeted(str(cause)) | Unable(cause):
            return _fail(host, cause)
    return state, []


def _while_preparing(host: str, state: Preparing, event: Event) -> Result:
    stage, importing = state.stage, state.importing
    match event:
        case PortsHeld(ports, shortage):
            if len(ports) < state.needs.ports:
                return _fail(host, shortage)
            return _advance(host, replace(state, ports=ports))
        case Synced() if stage is StartStage.COPY:
            return _set_up(state)
        case Making(str()) if stage is StartStage.SET_UP:
            return _begin(state, StartStage.ENVIRONMENT)
        case Prepared() if stage in (StartStage.SET_UP, StartStage.ENVIRONMENT):
            return _begin(state, StartStage.IMPORT)
        case ImportsBegun(keys):
            return _advance(host, replace(state, importing=keys, warm=keys))
        case Warmed(key) if importing is not None:
            return _advance(host, replace(state, importing=importing - {key}))
        case NotImported(key, None) if importing is not None:
            warm, importing = state.warm - {key}, importing - {key}
            return _advance(host, replace(state, importing=importing, warm=warm))
        case NotImported(_, Unable(cause, tail)) | Unable(cause, tail):
            return _fail(host, cause, tail)
    return state, []


def _fail(host: str, cause: str, tail: tuple[str, ...] = ()) -> Result:
    return FailedHost(), [HostFailed(host, cause, tail=tail)]


def _begin(state: Preparing, stage: StartStage) -> Result:
    return replace(state, stage=stage), [Begin(stage)]


def _set_up(state: Preparing) -> Result:
    needed = state.needs.set_up
    return _begin(state, StartStage.SET_UP if needed else StartStage.IMPORT)


def _advance(host: str, state: Preparing) -> Result:
    if state.ports is None or state.importing is None or state.importing:
        return state, []
    ready = ReadyHost(state.ports, state.warm, wanted=len(state.ports))
    return ready, [HostReady(host)]


def _while_ready(state: ReadyHost, event: Event) -> Result:
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
