"""Histories of one host: what happens there, and what the launcher then does."""

from __future__ import annotations

import pytest

from tfcluster.base.errors import ExitCode
from tfcluster.launcher.agent_connection import Closed
from tfcluster.launcher.host_start import (
    Action,
    Begin,
    Connected,
    Connecting,
    Disconnect,
    EndAgent,
    EndWanted,
    Event,
    FailedHost,
    GivenUp,
    Gone,
    Greeted,
    HoldPorts,
    ImportsBegun,
    Needs,
    NotConnected,
    NotImported,
    PortsHeld,
    PortsWanted,
    Preparing,
    ReadyHost,
    StartStage,
    State,
    Unable,
    Unreached,
    is_gone,
    ports_of,
    step,
    warm_of,
)
from tfcluster.lifecycle.events import HostClosed, HostFailed, HostLost, HostReady
from tfcluster.protocol.messages import Bye, Making, Prepared, Synced, Warmed

SYNCED, PREPARED = Synced("/copy", 1), Prepared(None, None)
MAKING, WARMED = Making("installing"), Warmed("k")
BYE = Bye(0, others=False)
LOST = HostLost("h", "contact lost: its agent ended")
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
            self.state, self.actions = step("h", self.state, event)
            self.all += self.actions
        return self.actions

    def stages(self) -> list[StartStage]:
        return [action.stage for action in self.all if isinstance(action, Begin)]


def preparing(needs: Needs = ONE_PORT) -> HostHistory:
    """A host whose agent has greeted us."""
    return HostHistory(needs, Connected(), Greeted())


def ready(ports: tuple[int, ...] = (7,)) -> HostHistory:
    """A host with one warm interpreter."""
    host = preparing(Needs(ports=len(ports)))
    host.after(ImportsBegun(K), PortsHeld(ports), WARMED)
    assert host.actions == [HostReady("h")]
    return host


# --- starts -------------------------------------------------------------------------


def test_a_host_that_only_imports() -> None:
    host = HostHistory(Needs(ports=2))
    assert host.after(Connected()) == [HoldPorts(2)]
    assert host.after(Greeted()) == [Begin(StartStage.IMPORT)]
    assert host.after(ImportsBegun(K)) == []
    assert host.after(PortsHeld((7, 8))) == []
    assert host.after(WARMED) == [HostReady("h")]
    assert ports_of(host.state) == (7, 8)
    assert warm_of(host.state) == K


def test_a_host_without_anything_to_import_waits_for_its_ports() -> None:
    host = preparing(Needs(ports=1))
    assert host.after(ImportsBegun(frozenset())) == []
    assert host.after(PortsHeld((7,))) == [HostReady("h")]


def test_a_host_without_ports_is_ready_once_the_agent_says_so() -> None:
    host = preparing(Needs())
    assert host.after(ImportsBegun(frozenset())) == [], "none were held yet"
    assert host.after(PortsHeld(())) == [HostReady("h")]


def test_files_then_lines_then_imports() -> None:
    host = HostHistory(Needs(ports=1, files=True, set_up=True), Connected())
    assert host.after(Greeted()) == [Begin(StartStage.COPY)]
    assert host.after(PortsHeld((7,))) == []
    assert host.after(SYNCED) == [Begin(StartStage.SET_UP)]
    assert host.after(MAKING) == [Begin(StartStage.ENVIRONMENT)]
    assert host.after(MAKING) == [], "each line of its output tells so"
    assert host.after(PREPARED) == [Begin(StartStage.IMPORT)]
    host.after(ImportsBegun(K), WARMED)
    assert host.actions == [HostReady("h")]
    assert host.stages() == [
        StartStage.COPY,
        StartStage.SET_UP,
        StartStage.ENVIRONMENT,
        StartStage.IMPORT,
    ]


def test_ports_may_come_last() -> None:
    host = preparing(Needs(ports=1, set_up=True))
    host.after(PREPARED, ImportsBegun(K), WARMED)
    assert isinstance(host.state, Preparing)
    assert host.after(PortsHeld((7,))) == [HostReady("h")]


def test_all_interpreters_must_import() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(frozenset({"a", "b"})))
    assert host.after(Warmed("a")) == []
    assert host.after(Warmed("b")) == [HostReady("h")]


def test_tasks_start_cold_without_an_interpreter_that_cannot_fork() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(K))
    assert host.after(NotImported("k")) == [HostReady("h")]
    assert warm_of(host.state) == frozenset()


# --- failures -----------------------------------------------------------------------


def test_a_host_that_cannot_be_reached() -> None:
    host = HostHistory(Needs())
    failure = HostFailed("h", "unknown host", ExitCode.USAGE)
    assert host.after(NotConnected("unknown host", ExitCode.USAGE)) == [failure]
    assert host.state == Unreached()


def test_a_host_without_an_address() -> None:
    host = HostHistory(Needs(), Connected(), Greeted("no address"))
    assert host.actions == [HostFailed("h", "no address")]
    assert host.state == FailedHost()


def test_a_host_without_packages() -> None:
    host = preparing()
    host.after(PortsHeld((7,)), ImportsBegun(K))
    unable = Unable("Python cannot import TensorFlow", ("ImportError",))
    failure = HostFailed("h", unable.cause, tail=("ImportError",))
    assert host.after(NotImported("k", unable)) == [failure]
    assert host.after(BYE) == [HostClosed("h")]


@pytest.mark.parametrize("said", [(), (SYNCED,), (SYNCED, PREPARED)])
def test_a_host_that_cannot_be_prepared(said: tuple[Event, ...]) -> None:
    host = preparing(Needs(ports=1, files=True, set_up=True))
    host.after(*said)
    failure = HostFailed("h", "line 2 failed", tail=("no such module",))
    assert host.after(Unable("line 2 failed", ("no such module",))) == [failure]
    assert host.after(PREPARED, PortsHeld((7,)), WARMED) == []
    assert host.after(Closed("h", "its agent ended")) == [], "it is known to fail"


def test_too_few_ports() -> None:
    host = preparing(Needs(ports=2))
    failure = HostFailed("h", "only one is free")
    assert host.after(PortsHeld((7,), "only one is free")) == [failure]
    assert host.after(ImportsBegun(frozenset())) == []


@pytest.mark.parametrize("greeted", [False, True])
def test_a_connection_that_ends_during_the_start(greeted: bool) -> None:
    host = HostHistory(Needs(), Connected(), *([Greeted()] if greeted else []))
    assert host.after(Closed("h", "its agent ended")) == [
        HostFailed("h", "its agent ended")
    ]
    assert is_gone(host.state)
    assert host.after(ImportsBegun(K), WARMED) == []


def test_a_new_attempt_after_a_failed_one_knows_nothing_of_it() -> None:
    failed = HostHistory(Needs(ports=1), NotConnected("refused"))
    assert is_gone(failed.state), "so the host may be added anew"
    host = HostHistory(Needs(ports=1), Connected(), Greeted())
    host.after(PortsHeld((8,)), ImportsBegun(frozenset()))
    assert host.actions == [HostReady("h")]


# --- the life of a ready host -------------------------------------------------------


def test_a_ready_host_is_lost() -> None:
    host = ready()
    assert host.after(Closed("h", "its agent ended")) == [LOST]
    assert host.state == Gone((7,)), "other tasks may still have the address"
    assert host.after(GivenUp()) == [Disconnect(sweep=True)]


def test_a_silent_host_is_given_up() -> None:
    host = ready()
    assert host.after(GivenUp()) == [Disconnect(sweep=True)]
    assert host.after(Closed("h", "killed")) == [], "we did that ourselves"


def test_an_interpreter_may_die_later() -> None:
    host = ready()
    assert host.after(NotImported("k", Unable("killed"))) == []
    assert warm_of(host.state) == frozenset()
    assert isinstance(host.state, ReadyHost)


def test_a_fault_of_the_agent_matters_only_during_the_start() -> None:
    assert ready().after(Unable("cannot write")) == []
    failure = HostFailed("h", "cannot write")
    assert preparing().after(Unable("cannot write")) == [failure]


def test_an_agent_that_was_asked_to_end_by_somebody_else() -> None:
    assert ready().after(BYE) == [HostClosed("h")]


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
    assert connecting.after(Connected()) == [Disconnect(sweep=False)]
    assert preparing().after(GivenUp()) == [Disconnect(sweep=True)]


# --- ends ---------------------------------------------------------------------------


def test_an_orderly_end() -> None:
    host = ready()
    assert host.after(EndWanted(10.0)) == [EndAgent(10.0)]
    assert host.after(BYE) == [HostClosed("h")]
    assert host.after(Closed("h", "its agent ended")) == []


def test_a_stop_while_connecting_does_not_wait_for_the_connection() -> None:
    host = HostHistory(Needs(ports=1))
    assert host.after(EndWanted(10.0)) == [HostClosed("h")]
    assert host.after(NotConnected("timed out")) == []
    assert host.after(Connected()) == [Disconnect(sweep=False)]


@pytest.mark.parametrize("greeted", [False, True])
def test_a_stop_during_the_preparation(greeted: bool) -> None:
    needs = Needs(ports=1, set_up=True)
    host = HostHistory(needs, Connected(), *([Greeted()] if greeted else []))
    assert host.after(EndWanted(10.0)) == [EndAgent(10.0)]
    assert host.after(Greeted(), PREPARED, Unable("the lines were killed")) == []
    assert host.after(BYE) == [HostClosed("h")]


def test_a_stop_of_a_host_that_has_failed() -> None:
    unreached = HostHistory(Needs(), NotConnected("refused"))
    assert unreached.after(EndWanted(10.0)) == [HostClosed("h")], "or all would wait"
    failed = HostHistory(Needs(), Connected(), Greeted("no address"))
    assert failed.after(EndWanted(10.0)) == [EndAgent(10.0)]


def test_a_connection_that_ends_during_the_end() -> None:
    host = ready()
    host.after(EndWanted(10.0))
    assert host.after(EndWanted(0.0)) == [EndAgent(0.0)]
    assert host.after(Closed("h", "its agent ended")) == [LOST]
