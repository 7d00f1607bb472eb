"""The program's handlers of signals run on all ranks at the same point of the program.

A rank that gets a signal only notes it. Between two exchanges, when a function or an
operation has ended, it meets the other ranks: only if all of them are there, after the
same exchange and the same number of functions, does each call the program's handler.
Otherwise some rank is in an exchange already, for which it needs this one; then all
know of the signal, and meet after that exchange. So a handler may raise an exception,
save the model or set a flag, as on one machine, and never runs within an exchange.

A program that is busy with something else for a while, such as a loop of its own, is
interrupted where it is, provided that all ranks are between the same exchanges.

A rank may also wait for others elsewhere: in a group of some ranks, or at a parameter
server. There it cannot learn that another one meets, and a thread meets for it.
"""

from __future__ import annotations

import _thread
import inspect
import math
import os
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from types import FrameType, TracebackType
from typing import Any, Protocol

from tfcluster.runtime.errors import CollectiveError

SHARED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
"""What people and schedulers send. The order is that in which handlers are called."""
_LOOK_S = 0.05
"""How often a thread looks whether this rank waits elsewhere, while one is noted."""
_IDLE_S = 1.0
"""A program is busy with something else if no function has ended for this long."""
_JOIN_S = 3.0
"""How long a signal waits for ranks that are not connected to each other yet."""
_ECHO_S = 10.0
"""A rank whose handler has run for another rank's signal may get the signal itself
within this time: a launcher sends it to all ranks, also to those on other hosts."""
_AGAIN_S = 2.0
"""If a signal comes again after this time, its handler runs without the other ranks."""
_TRACE_S = 5.0
"""How long a handler waits for the end of a function's tracing: there, it could read
no variable."""
_SAY_S = 3.0
"""After this time, a warning says why a handler has not run yet."""
_NOTE = struct.Struct(">HBxI")
"""The signals, as bits; what the rank does; the functions since the exchange."""
_BETWEEN, _IDLE, _ELSEWHERE = range(3)
"""A rank is between two functions, or busy with something else for a while, or it waits
for other ranks elsewhere."""

Handler = Callable[[int, FrameType | None], Any]


class Nearness(Enum):
    """Whether ranks can meet."""

    ALONE = "other ranks have left, or cannot be reached any more"
    CONNECTING = "the ranks are not connected yet"
    CONNECTED = "they can meet"


class Peers(Protocol):
    """The group of all ranks."""

    @property
    def nearness(self) -> Nearness:
        """Whether the ranks can meet now. Takes no lock."""
        ...

    @property
    def completed(self) -> int:
        """The number of exchanges that this rank has completed. Takes no lock."""
        ...

    def begin(self) -> None:
        """Start to connect to the other ranks, unless already started."""
        ...

    def notify(self, number: int, count: int) -> None:
        """Notify all ranks of a signal; ``count`` is as in ``Signals.heard``."""
        ...

    def meet(self, note: Callable[[], bytes | None]) -> list[bytes] | None:
        """Every rank's note if all have called this; None if some are in an exchange.

        Waits for all ranks. ``note`` is called when no thread of this rank exchanges or
        meets; if it returns None, this returns None. Raises CollectiveError if they
        cannot meet.
        """
        ...


class Signals:
    """The signals of this process. It handles none before ``install``."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        """The program's handlers of the signals whose handler in Python is ours."""
        self._noted: dict[int, float] = {}
        """The signals for which handlers have to run, and when they were noted."""
        self._own: dict[int, int] = {}
        """Those of them that this process itself has received; ``heard``'s count."""
        self._echoes: dict[int, float] = {}
        """Signals that may still come here, but have been handled; until when."""
        self._handled: Counter[int] = Counter()
        self._nudges: set[int] = set()
        """Signals that this process sends to itself, to call our handler."""
        self._peers: Peers | None = None
        self._main = 0
        """The main thread; 0 before ``install``."""
        self._depth = 0
        """How many sections the main thread is in."""
        self._elsewhere = 0
        """How many threads wait for other ranks elsewhere."""
        self._counting = threading.Lock()
        self._meeting = False
        self._nudging = False
        self._completed = 0
        self._ended = 0
        """The sections that have ended since the last exchange."""
        self._ended_at = 0.0
        self._awaits = 0
        """After how many of them the ranks meet again."""
        self.is_tracing: Callable[[], bool] = lambda: False
        """Whether the thread that calls this is tracing a function."""
        self.say_late: Callable[[str], None] = lambda name: None
        """Called by a thread, with the name of a signal whose handler cannot run yet,
        because the main thread is busy outside of all sections."""
        self._set, self._get = signal.signal, signal.getsignal
        self._changing = threading.RLock()
        """Held while a handler is changed, or called by a signal of our own."""

    # --- the program's handlers -------------------------------------------------------

    def install(self) -> None:
        """Take the place of the program's handlers, present and future ones.

        Does nothing except in the main thread, and if it was called before.
        """
        main = threading.main_thread().ident
        if self._main or main is None or threading.get_ident() != main:
            return
        self._main = main
        os.register_at_fork(after_in_child=self._leave)
        for number in SHARED:
            handler = self._get(number)
            if callable(handler):
                self._handlers[number] = handler
                self._set(number, self._received)
        signal.signal, signal.getsignal = self._signal, self._getsignal

    def coordinate(self, peers: Peers | None) -> None:
        """Meet ``peers`` from now on; None: handlers run at once."""
        self._peers = peers

    def _signal(self, signalnum: int, handler: Any) -> Any:
        """``signal.signal`` for the program."""
        shared = signalnum in SHARED and callable(handler)
        with self._changing:
            previous = self._set(signalnum, self._received if shared else handler)
            before = self._handlers.pop(signalnum, previous)
            if shared:
                self._handlers[signalnum] = handler
        return before

    def _getsignal(self, signalnum: int) -> Any:
        """``signal.getsignal`` for the program."""
        return self._handlers.get(signalnum, self._get(signalnum))

    def _leave(self) -> None:
        """In a forked child, which is no rank, handlers run at once."""
        self._peers, self._depth, self._meeting = None, 0, False
        self._changing, self._counting = threading.RLock(), threading.Lock()
        self._elsewhere = 0
        self._main = _thread.get_ident()
        self._nudging = False
        for signals in (self._noted, self._own, self._nudges):
            signals.clear()

    # --- where handlers may run -------------------------------------------------------

    def __enter__(self) -> None:
        """Enter a section, within which no handler of a signal runs."""
        if _thread.get_ident() == self._main:
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave a section; at the end of the outermost one, handlers may run.

        They do not if an exception is being raised, which they might replace.
        """
        if _thread.get_ident() != self._main:
            if self._noted and not self._depth:
                self._nudge()
            return
        self._depth -= 1
        if self._depth:
            return
        self._ended = self._since_exchange() + 1
        self._ended_at = time.monotonic()
        if self._noted and kind is None:
            self._meet(idle=False)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """A section in which this rank may wait for others, but not with all of them.

        It does not count as one that has ended, since other ranks may not have it.
        """
        is_main = _thread.get_ident() == self._main
        self._depth += is_main
        self._wait_elsewhere(1)
        try:
            yield
        finally:
            self._wait_elsewhere(-1)
            self._depth -= is_main
        if is_main and self._noted and not self._depth:
            self._meet(idle=self._is_idle)

    @property
    def _ought_to_wait(self) -> bool:
        now = time.monotonic()
        waited_s = now - min(self._noted.values(), default=now)
        return waited_s < _TRACE_S and self.is_tracing()

    @property
    def _is_idle(self) -> bool:
        return time.monotonic() - self._ended_at > _IDLE_S

    def _wait_elsewhere(self, more: int) -> None:
        with self._counting:
            self._elsewhere += more

    def _since_exchange(self) -> int:
        """How many sections have ended since the last exchange, on any thread."""
        peers = self._peers
        completed = self._completed if peers is None else peers.completed
        if completed != self._completed:
            self._completed, self._ended, self._awaits = completed, 0, 0
        return self._ended

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context within which signals that end this process wait.

        So a file is written to its end before a signal ends the process for which the
        program has no handler.
        """
        if _thread.get_ident() != self._main:
            yield
            return
        arrived: list[int] = []
        ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
        held = [number for number in ends if self._get(number) is signal.SIG_DFL]
        for number in held:
            self._set(number, lambda number, frame: arrived.append(number))
        try:
            yield
        finally:
            for number in held:
                self._set(number, signal.SIG_DFL)
            for late in arrived:
                os.kill(os.getpid(), late)

    # --- what comes -------------------------------------------------------------------

    def _received(self, number: int, frame: FrameType | None) -> None:
        """The handler in Python of all shared signals."""
        if number in self._nudges:
            self._nudges.discard(number)
            if self._noted and not self._depth:
                self._meet(idle=self._is_idle)
            return
        if time.monotonic() < self._echoes.pop(number, 0.0):
            return
        since = self._noted.get(number)
        may_run = self._meeting or not self._depth
        alone = self._nearness is Nearness.ALONE and not self._ought_to_wait
        if may_run and alone:
            self._forget(number)
            self._call(number, frame)
        elif since is None or number not in self._own:
            self._own[number] = self._handled[number]
            self._note(number)
        elif may_run and time.monotonic() - since > _AGAIN_S:
            self._forget(number)
            self._call(number, frame)

    def heard(self, number: int, count: int) -> None:
        """Another rank has received a signal; called by any thread.

        ``count`` says how often handlers of it had run there. If they have run more
        often here, this signal is among them.
        """
        if number in SHARED and count >= self._handled[number]:
            self._note(number)

    def heard_in(self, notes: list[bytes]) -> None:
        """Other ranks have met, while this one is in an exchange."""
        for number in _numbers(notes):
            self._note(number)

    def _note(self, number: int) -> None:
        self._noted.setdefault(number, time.monotonic())
        if not self._nudging and self._main:
            self._nudging = True
            # Not a threading.Thread: the main thread may hold a lock of that module.
            _thread.start_new_thread(self._follow, ())

    def _follow(self) -> None:
        """While a signal is noted, tell others of ours and wake the main thread."""
        notified: set[tuple[int, int]] = set()
        nudge_at = time.monotonic() + _IDLE_S
        say_at = time.monotonic() + _SAY_S
        while self._nudging:
            while self._noted:
                self._notify(notified)
                time.sleep(_LOOK_S)
                if self._elsewhere:
                    self._meet_for_main()
                if time.monotonic() < nudge_at:
                    continue
                nudge_at = time.monotonic() + _IDLE_S
                waits = self._noted and not self._depth
                if waits and time.monotonic() >= say_at:
                    say_at = math.inf
                    with suppress(Exception):
                        self.say_late(signal.Signals(min(self._noted)).name)
                if waits:
                    self._nudge()
            self._nudging = False
            if self._noted:  # One was noted just now, which has started no thread.
                self._nudging = True

    def _notify(self, notified: set[tuple[int, int]]) -> None:
        """Tell the other ranks of signals not in ``notified``, and add them to it."""
        peers = self._peers
        if peers is None or peers.nearness is Nearness.ALONE:
            return
        with suppress(Exception):  # Then handlers run without the other ranks.
            peers.begin()
        if peers.nearness is Nearness.CONNECTED:
            for own in list(self._own.items()):
                if own not in notified:
                    peers.notify(*own)
                    notified.add(own)

    def _nudge(self) -> None:
        """Make the main thread call our handler, also if it waits for something."""
        with self._changing:
            # If it becomes one with another signal, that is of no consequence.
            numbers = [
                number for number in (*self._noted, *SHARED) if number in self._handlers
            ]
            if numbers:
                self._nudges.add(numbers[0])
                signal.pthread_kill(self._main, numbers[0])

    # --- meetings ---------------------------------------------------------------------

    def _meet(self, *, idle: bool) -> None:
        """Meet the other ranks, and call the handlers if all are at the same point."""
        while self._noted and not self._ought_to_wait:
            peers, nearness = self._peers, self._nearness
            waited_s = time.monotonic() - min(self._noted.values())
            if nearness is Nearness.CONNECTING and waited_s < _JOIN_S:
                return
            if peers is None or nearness is not Nearness.CONNECTED:
                self._call_all()
                return
            ours = self._since_exchange()
            if ours < self._awaits and not idle:
                return
            state = _IDLE if idle else _BETWEEN
            notes = self._met(peers, _NOTE.pack(_bits(self._noted), state, ours))
            if notes is None:
                return
            if not notes:
                self._call_all()
                return
            self.heard_in(notes)
            points = [_NOTE.unpack(note) for note in notes]
            if any(point[1] == _ELSEWHERE for point in points):
                return
            last = self._awaits = max(point[2] for point in points)
            if all(point[2] == last or point[1] == _IDLE for point in points):
                self._call_all(_numbers(notes))
            elif ours < last:
                return  # This rank goes on to where another one waits.

    def _met(self, peers: Peers, note: bytes) -> list[bytes] | None:
        """As ``Peers.meet``; empty if this rank is alone now."""
        self._meeting = True
        self._depth += 1
        try:
            return peers.meet(lambda: note)
        except CollectiveError:
            return []
        finally:
            self._depth -= 1
            self._meeting = False

    def _meet_for_main(self) -> None:
        """Meet the other ranks while this one waits elsewhere, so that they go on."""

        def note() -> bytes | None:
            if not self._noted or not self._elsewhere:
                return None
            return _NOTE.pack(_bits(self._noted), _ELSEWHERE, 0)

        peers = self._peers
        if peers is not None and peers.nearness is Nearness.CONNECTED:
            with suppress(CollectiveError):
                self.heard_in(peers.meet(note) or [])

    @property
    def _nearness(self) -> Nearness:
        return Nearness.ALONE if self._peers is None else self._peers.nearness

    def _call_all(self, agreed: Sequence[int] | None = None) -> None:
        """Call the handlers of all signals, or of those on which the ranks agree.

        One that was noted a moment ago is not among them.
        """
        for number in SHARED if agreed is None else agreed:
            if number in self._noted:
                if agreed is not None:
                    self._handled[number] += 1
                if number not in self._own:
                    self._echoes[number] = time.monotonic() + _ECHO_S
                self._forget(number)
                self._call(number, inspect.currentframe())

    def _forget(self, number: int) -> None:
        self._own.pop(number, None)
        self._noted.pop(number, None)

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        if handler is not None:
            handler(number, frame)


def _bits(numbers: dict[int, float]) -> int:
    return sum(1 << place for place, number in enumerate(SHARED) if number in numbers)


def _numbers(notes: list[bytes]) -> list[int]:
    """The signals of which some of these notes tell."""
    bits = 0
    for note in notes:
        bits |= _NOTE.unpack(note)[0]
    return [number for place, number in enumerate(SHARED) if bits >> place & 1]


SIGNALS = Signals()
"""Those of this process, and the section in which no handler of a signal runs."""
