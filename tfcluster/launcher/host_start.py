"""``step``: the start and the life of one host, as the launcher sees them. Pure.

An agent is started on the host, and greets us. It then holds ports for the host's tasks
and, at the same time, receives files, runs the set-up lines and imports TensorFlow, in
this order. The host is ready when all of this is done.
"""

from __future__ import annotations

from tfcluster.base.light_dataclasses import replace
from tfcluster.launcher.host_types import (
    Action,
    AgentEnded,
    Connected,
    Connecting,
    ConnectionEnded,
    CopyFiles,
    Disconnect,
    EndAgent,
    Ending,
    EndWanted,
    EnvironmentBegun,
    Event,
    FailedHost,
    FilesCopied,
    GivenUp,
    Gone,
    Greeted,
    Greeting,
    GuardDied,
    HoldPorts,
    Import,
    Imported,
    ImportsBegun,
    NotConnected,
    NoteStage,
    NotImported,
    PortsHeld,
    PortsWanted,
    Preparing,
    ReadyHost,
    ReportEnd,
    ReportFailure,
    ReportLoss,
    ReportReady,
    Result,
    RunSetUp,
    SetUp,
    StartStage,
    State,
    Sweep,
    Unable,
    Unreached,
)


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
    """The keys of the host's warm interpreters."""
    return state.warm if isinstance(state, Preparing | ReadyHost) else frozenset()


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
            guard = state.dead_guard if isinstance(state, ReadyHost | Ending) else None
            return Ending(guard), [EndAgent(grace_s)]
        case GuardDied(pid) if isinstance(state, ReadyHost | Ending):
            return replace(state, dead_guard=pid), []
        case Unable(cause, tail) if isinstance(state, Greeting | Preparing):
            return FailedHost(), [ReportFailure(cause, tail=tail)]
    match state:
        case Greeting():
            return _while_greeting(state, event)
        case Preparing():
            return _while_preparing(state, event)
        case ReadyHost():
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
        case ReadyHost(dead_guard=int(pid)) | Ending(dead_guard=int(pid)):
            cause = (
                f"the guard process of its agent (pid {pid}) died, and the connection "
                "ended with it; the agent has stopped all tasks there"
            )
            return [ReportLoss(f"contact lost: {cause}")]
        case ReadyHost() | Ending():
            return [ReportLoss(f"contact lost: {cause}")]
    return []


def _while_greeting(state: Greeting, event: Event) -> Result:
    if not isinstance(event, Greeted):
        return state, []
    if event.problem is not None:
        return FailedHost(), [ReportFailure(event.problem, together=True)]
    if state.needs.files:
        copying = Preparing(state.needs, StartStage.COPY)
        return copying, [NoteStage(StartStage.COPY), CopyFiles()]
    return _set_up(Preparing(state.needs, StartStage.AGENT))


def _while_preparing(state: Preparing, event: Event) -> Result:
    stage, importing = state.stage, state.importing
    match event:
        case PortsHeld(ports, shortage):
            if len(ports) < state.needs.ports:
                return FailedHost(), [ReportFailure(shortage, together=True)]
            return _advance(replace(state, ports=ports))
        case FilesCopied() if stage is StartStage.COPY:
            return _set_up(state)
        case EnvironmentBegun() if stage is StartStage.SET_UP:
            making = replace(state, stage=StartStage.ENVIRONMENT)
            return making, [NoteStage(StartStage.ENVIRONMENT)]
        case SetUp() if stage in (StartStage.SET_UP, StartStage.ENVIRONMENT):
            return replace(state, stage=StartStage.IMPORT), [Import()]
        case ImportsBegun(keys):
            after, actions = _advance(replace(state, importing=keys, warm=keys))
            return after, [NoteStage(StartStage.IMPORT), *actions] if keys else actions
        case Imported(key) if importing is not None:
            return _advance(replace(state, importing=importing - {key}))
        case NotImported(key, None) if importing is not None:
            warm = state.warm - {key}
            return _advance(replace(state, importing=importing - {key}, warm=warm))
        case NotImported(_, Unable(cause, tail)):
            return FailedHost(), [ReportFailure(cause, tail=tail)]
    return state, []


def _set_up(state: Preparing) -> Result:
    if not state.needs.set_up:
        return replace(state, stage=StartStage.IMPORT), [Import()]
    state = replace(state, stage=StartStage.SET_UP)
    return state, [NoteStage(StartStage.SET_UP), RunSetUp()]


def _advance(state: Preparing) -> Result:
    """The host is ready if it has its ports and nothing imports any more."""
    if state.ports is None or state.importing is None or state.importing:
        return state, []
    ready = ReadyHost(state.ports, state.warm, wanted=len(state.ports))
    return ready, [ReportReady()]


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
