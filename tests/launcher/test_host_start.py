"""Histories of one host: what happens there, and what the launcher then does."""

from __future__ import annotations

import pytest

from tfcluster.base.errors import ExitCode
from tfcluster.launcher.host_start import is_gone, ports_of, step, warm_of
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
    GuardDied,
    HoldPorts,
    Import,
    Imported,
    ImportsBegun,
    Needs,
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
    RunSetUp,
    SetUp,
    StartStage,
    State,
    Sweep,
    Unable,
    Unreached,
)

K = frozenset({"k"})
ONE_PORT = Needs(ports=1)


class HostHistory:
    """One host from its beginning; the last actions are in ``actions``."""

    def __init__(self, needs: Needs, *events: Event) -> None:
        self.state: State = Connecting(needs)
        self.actions: list[Action] = []
        self.all: list[Action] = []
        self.after(*events)

    def after(self, *events: Event) -> list[Action]:
        """Let these events happen; returns the actions of the last one."""
        for event in events:
            self.state, self.actions = step(self.state, event)
            self.all += self.actions
        return self.actions

    def stages(self) -> list[StartStage]:
        return [action.stage for action in self.all if isinstance(action, NoteStage)]


def preparing(needs: Needs = ONE_PORT) -> HostHistory:
    """A host whose agent has greeted us."""
    return HostHistory(needs, Connected(), Greeted())


def ready(ports: tuple[int, ...] = (7,)) -> HostHistory:
    """A host with one warm interpreter."""
    host = preparing(Needs(ports=len(ports)))
    host.after(ImportsBegun(K), PortsHeld(ports), Imported("k"))
    assert host.actions == [ReportReady()]
    return host


# --- starts -------------------------------------------------------------------------


def test_a_host_that_only_imports() -> None:
    host = HostHistory(Needs(ports=2))
    assert host.after(Connected()) == [HoldPorts(2)]
    assert host.after(Greeted()) == [Import()]
    assert host.after(ImportsBegun(K)) == [NoteStage(StartStage.IMPORT)]
    assert host.after(PortsHeld((7, 8))) == []
    assert host.after(Imported("k")) == [ReportReady()]
    assert ports_of(host.state) == (7, 8)
    assert warm_of(host.state) == K


def test_a_host_without_anything_to_import_waits_for_its_ports() -> None:
    host = preparing(Needs(ports=1))
    assert host.after(ImportsBegun(frozenset())) == []
    assert host.after(PortsHeld((7,))) == [ReportReady()]
    assert host.stages() == []


def test_a_host_without_ports_is_ready_once_the_agent_says_so() -> None:
    host = preparing(Needs())
    assert host.after(ImportsBegun(frozenset())) == [], "none were held yet"
    assert host.after(PortsHeld(())) == [ReportReady()]


def test_files_then_lines_then_imports() -> None:
    host = HostHistory(Needs(ports=1, files=True, set_up=True), Connected())
    assert host.after(Greeted()) == [NoteStage(StartStage.COPY), CopyFiles()]
    assert host.after(PortsHeld((7,))) == []
    assert host.after(FilesCopied()) == [NoteStage(StartStage.SET_UP), RunSetUp()]
    assert host.after(EnvironmentBegun()) == [NoteStage(StartStage.ENVIRONMENT)]
    assert host.after(EnvironmentBegun()) == [], "each line of its output tells so"
    assert host.after(SetUp()) == [Import()]
    host.after(ImportsBegun(K), Imported("k"))
    assert host.actions == [ReportReady()]
    assert host.stages() == [
        StartStage.COPY,
        StartStage.SET_UP,
        StartStage.ENVIRONMENT,
        StartStage.IMPORT,
    ]


def test_ports_may_come_last() -> None:
    host = preparing(Needs(ports=1, set_up=True))
    host.after(SetUp(), ImportsBegun(K), Imported("k"))
    assert isinstance(host.state, Preparing)
    assert host.after(PortsHeld((7,))) == [ReportReady()]


def test_all_interpreters_must_import() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(frozenset({"a", "b"})))
    assert host.after(Imported("a")) == []
    assert host.after(Imported("b")) == [ReportReady()]


def test_tasks_start_cold_without_an_interpreter_that_cannot_fork() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(K))
    assert host.after(NotImported("k")) == [ReportReady()]
    assert warm_of(host.state) == frozenset()


# --- failures -----------------------------------------------------------------------


def test_a_host_that_cannot_be_reached() -> None:
    host = HostHistory(Needs())
    failure = ReportFailure("unknown host", ExitCode.USAGE, together=True)
    assert host.after(NotConnected("unknown host", ExitCode.USAGE)) == [failure]
    assert host.state == Unreached()


def test_a_host_without_an_address() -> None:
    host = HostHistory(Needs(), Connected(), Greeted("no address"))
    assert host.actions == [ReportFailure("no address", together=True)]
    assert host.state == FailedHost()


def test_a_host_without_packages() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(K))
    unable = Unable("Python cannot import TensorFlow", ("ImportError",))
    failure = ReportFailure(unable.cause, tail=("ImportError",))
    assert host.after(NotImported("k", unable)) == [failure]
    assert host.after(AgentEnded()) == [ReportEnd()]


@pytest.mark.parametrize("said", [(), (FilesCopied(),), (FilesCopied(), SetUp())])
def test_a_host_that_cannot_be_prepared(said: tuple[Event, ...]) -> None:
    host = preparing(Needs(ports=1, files=True, set_up=True))
    host.after(*said)
    failure = ReportFailure("line 2 failed", tail=("no such module",))
    assert host.after(Unable("line 2 failed", ("no such module",))) == [failure]
    assert host.after(SetUp(), PortsHeld((7,)), Imported("k")) == []
    assert host.after(ConnectionEnded("its agent ended")) == [], "it is known to fail"


def test_too_few_ports() -> None:
    host = preparing(Needs(ports=2))
    failure = ReportFailure("only one is free", together=True)
    assert host.after(PortsHeld((7,), "only one is free")) == [failure]
    assert host.after(ImportsBegun(frozenset())) == []


@pytest.mark.parametrize("greeted", [False, True])
def test_a_connection_that_ends_during_the_start(greeted: bool) -> None:
    host = HostHistory(Needs(), Connected(), *([Greeted()] if greeted else []))
    assert host.after(ConnectionEnded("its agent ended")) == [
        ReportFailure("its agent ended", together=True)
    ]
    assert is_gone(host.state)
    assert host.after(ImportsBegun(K), Imported("k")) == []


def test_a_new_attempt_after_a_failed_one_knows_nothing_of_it() -> None:
    failed = HostHistory(Needs(ports=1), NotConnected("refused"))
    assert is_gone(failed.state), "so the host may be added anew"
    host = HostHistory(Needs(ports=1), Connected(), Greeted())
    host.after(PortsHeld((8,)), ImportsBegun(frozenset()))
    assert host.actions == [ReportReady()]


# --- the life of a ready host -------------------------------------------------------


def test_a_ready_host_is_lost() -> None:
    host = ready()
    loss = ReportLoss("contact lost: its agent ended")
    assert host.after(ConnectionEnded("its agent ended")) == [loss]
    assert host.state == Gone((7,)), "other tasks may still have the address"
    assert host.after(GivenUp()) == [Disconnect(), Sweep()]


def test_the_death_of_the_guard_explains_the_loss() -> None:
    host = ready()
    host.after(GuardDied(44), ConnectionEnded("its agent ended"))
    (loss,) = host.actions
    assert isinstance(loss, ReportLoss)
    assert "guard process of its agent (pid 44) died" in loss.cause


def test_a_silent_host_is_given_up() -> None:
    host = ready()
    assert host.after(GivenUp()) == [Disconnect(), Sweep()]
    assert host.after(ConnectionEnded("killed")) == [], "we did that ourselves"


def test_an_interpreter_may_die_later() -> None:
    host = ready()
    assert host.after(NotImported("k", Unable("killed"))) == []
    assert warm_of(host.state) == frozenset()
    assert isinstance(host.state, ReadyHost)


def test_a_fault_of_the_agent_matters_only_during_the_start() -> None:
    assert ready().after(Unable("cannot write")) == []
    failure = ReportFailure("cannot write")
    assert preparing().after(Unable("cannot write")) == [failure]


def test_an_agent_that_was_asked_to_end_by_somebody_else() -> None:
    assert ready().after(AgentEnded()) == [ReportEnd()]


# --- resizes ------------------------------------------------------------------------


def test_a_resize_that_needs_more_ports() -> None:
    host = ready(ports=(7,))
    assert host.after(PortsWanted(3)) == [HoldPorts(2)]
    assert host.after(PortsHeld((8, 9))) == []
    assert host.state == ReadyHost((7, 8, 9), K, wanted=3)


def test_a_resize_that_needs_no_more_ports() -> None:
    host = ready(ports=(7, 8))
    assert host.after(PortsWanted(1)) == []
    assert ports_of(host.state) == (7, 8)


def test_a_resize_for_which_ports_are_missing() -> None:
    host = ready(ports=(7,))
    host.after(PortsWanted(2), PortsHeld((), "all are taken"))
    assert host.state == ReadyHost((7,), K, wanted=2, shortage="all are taken")
    host.after(PortsWanted(1))
    assert host.state == ReadyHost((7,), K, wanted=1), "the next resize needs fewer"


def test_a_new_host_that_is_no_longer_needed() -> None:
    connecting = HostHistory(Needs(ports=1))
    assert connecting.after(GivenUp()) == [], "nothing can have been left there"
    assert connecting.after(Connected()) == [Disconnect()]
    assert preparing().after(GivenUp()) == [Disconnect(), Sweep()]


# --- ends ---------------------------------------------------------------------------


def test_an_orderly_end() -> None:
    host = ready()
    assert host.after(EndWanted(10.0)) == [EndAgent(10.0)]
    assert host.after(AgentEnded()) == [ReportEnd()]
    assert host.after(ConnectionEnded("its agent ended")) == []


def test_a_stop_while_connecting_does_not_wait_for_the_connection() -> None:
    host = HostHistory(Needs(ports=1))
    assert host.after(EndWanted(10.0)) == [ReportEnd()]
    assert host.after(NotConnected("timed out")) == []
    assert host.after(Connected()) == [Disconnect()]


@pytest.mark.parametrize("greeted", [False, True])
def test_a_stop_during_the_preparation(greeted: bool) -> None:
    needs = Needs(ports=1, set_up=True)
    host = HostHistory(needs, Connected(), *([Greeted()] if greeted else []))
    assert host.after(EndWanted(10.0)) == [EndAgent(10.0)]
    assert host.after(Greeted(), SetUp(), Unable("the lines were killed")) == []
    assert host.after(AgentEnded()) == [ReportEnd()]


def test_a_stop_of_a_host_that_has_failed() -> None:
    unreached = HostHistory(Needs(), NotConnected("refused"))
    assert unreached.after(EndWanted(10.0)) == [ReportEnd()], "or all would wait"
    failed = HostHistory(Needs(), Connected(), Greeted("no address"))
    assert failed.after(EndWanted(10.0)) == [EndAgent(10.0)]


def test_a_connection_that_ends_during_the_end() -> None:
    host = ready()
    host.after(EndWanted(10.0))
    assert host.after(EndWanted(0.0)) == [EndAgent(0.0)]
    loss = ReportLoss("contact lost: its agent ended")
    assert host.after(ConnectionEnded("its agent ended")) == [loss]


def test_the_guard_may_die_during_the_end() -> None:
    host = ready()
    host.after(GuardDied(44), EndWanted(10.0))
    assert host.state == Ending(dead_guard=44)
