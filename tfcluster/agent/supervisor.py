"""The agent itself: answers the launcher's requests, keeps the lease, exits cleanly.

Other modules do the work; this one only determines the order of events.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from tfcluster import __version__
from tfcluster.agent import guard, proc
from tfcluster.agent.channel import Channel
from tfcluster.agent.children import Children
from tfcluster.agent.console_lines import ConsoleQueue
from tfcluster.agent.file_names import local_name
from tfcluster.agent.gpus import gpus
from tfcluster.agent.guard import FORWARDED, IGNORED, GuardSocket
from tfcluster.agent.host_network import Ports, local_addresses, way_in
from tfcluster.agent.loop import Loop
from tfcluster.agent.output_capture import OutputCapture
from tfcluster.agent.preparation import Preparation
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.signals import adopt_orphans
from tfcluster.agent.spawn import environment
from tfcluster.agent.sweep import (
    AGENT,
    RUN,
    SWEEP_S,
    agent_mark,
    belongings,
    clear_away,
    kill_until_gone,
    other_agents_remain,
)
from tfcluster.agent.tasks import CLOSE_LOOK_S, TaskTable
from tfcluster.agent.warm_interpreters import WarmInterpreters
from tfcluster.base.process_title import set_title
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.wire import PROTOCOL

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from tfcluster.agent.result_sender import ResultSender
    from tfcluster.agent.workdir_receiver import WorkdirReceiver

_OPEN_S = 120.0  # until `open` must have arrived
_FLUSH_S = 3.0  # to send the last frames to a launcher that does not read
_OTHERS_LOOK_S = 0.1  # each look reads the environment of every process of the user
_CAPTURE_CLOSE_S = 2.0


def serve(guard_socket: GuardSocket) -> int:
    """Serve the launcher on standard input and output. Returns an exit code."""
    # No child inherits these, and what uses the standard streams disturbs no frame.
    ends = os.dup(0), os.dup(1)
    guard.leave_standard_streams()
    loop = Loop()
    backlog = ConsoleQueue()
    channel = Channel(loop, ends, backlog)
    supervisor = Supervisor(loop, channel, backlog, guard_socket)
    # The guard blocked them until there were handlers.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    while not supervisor.ended:
        try:
            loop.run()
        except Exception as error:
            # After a second error, while closing, the guard cleans up.
            if supervisor.closing:
                raise
            supervisor.fault(_one_line(error))
    guard_socket.send_clean()
    return supervisor.code


class Supervisor:
    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        backlog: ConsoleQueue,
        guard_socket: GuardSocket,
    ) -> None:
        self.code = guard.EXIT_CLOSED
        self.closing = False
        self.ended = False
        self._loop = loop
        self._channel = channel
        self._backlog = backlog
        self._guard_socket = guard_socket
        self._opened: requests.Open | None = None
        self._run: AgentRun | None = None
        self._ports = Ports()
        self._syncing: WorkdirReceiver | None = None
        self._returning: ResultSender | None = None
        self._heard = loop.awake()
        self._swept = 0
        self._others = False
        channel.on_request = self._obey
        channel.on_end = self._hung_up
        channel.on_garbage = self.fault
        loop.on_signals((signal.SIGCHLD, *FORWARDED, *IGNORED), self._signal)
        loop.watch(guard_socket.fileno(), self._guard_died)
        loop.later(_OPEN_S, self._expect_open)

    def _obey(self, request: requests.Request) -> None:
        self._heard = self._loop.awake()
        if isinstance(request, requests.Open):
            self._open(request)
            return
        if self._run is None:
            if self.closing:
                return
            raise ProtocolError("the first frame must be 'open'")
        match request:
            case requests.PingRequest():
                pass
            case requests.ClockRequest(asked_s):
                self._channel.send(messages.Clock(asked_s, time.monotonic()))
            case requests.Hold(count, low, high):
                ports, cause = self._ports.hold(count, low, high)
                self._channel.send(messages.Held(tuple(ports), cause))
            case requests.SyncRequest():
                self._sync().listed(request)
            case requests.Part():
                self._sync().came(request)
            case requests.ResultsRequest():
                self._results().obey(request)
            case requests.Close(grace_s, others_s):
                self.close(grace_s, guard.EXIT_CLOSED, others_s)
            case _:
                self._run.obey(request, closing=self.closing)

    def _sync(self) -> WorkdirReceiver:
        if self._syncing is None:
            # Most agents do not need it, and all must start fast.
            from tfcluster.agent.workdir_receiver import WorkdirReceiver

            self._syncing = WorkdirReceiver(self._channel.send)
        return self._syncing

    def _results(self) -> ResultSender:
        if self._returning is None:
            from tfcluster.agent.result_sender import ResultSender  # as above

            self._returning = ResultSender(self._channel.send, self._loop.post)
        return self._returning

    def _open(self, request: requests.Open) -> None:
        if self._opened is not None:
            raise ProtocolError("a second 'open'")
        if not request.run.isprintable() or not request.run:
            raise ProtocolError(f"{request.run!r} cannot mark the processes of a run")
        self._opened = request
        self._guard_socket.send_run(request.run)
        set_title(f"tfcluster: agent {request.run}", "tfcluster-agent")
        witness = request.witness
        hello = messages.Hello(
            protocol=PROTOCOL,
            version=__version__,
            nonce=request.nonce,
            pid=os.getpid(),
            host=socket.gethostname(),
            python=sys.version.split()[0],
            root=os.geteuid() == 0,
            cpus=len(os.sched_getaffinity(0)),
            boot_id=proc.boot_id(),
            network=proc.network(),
            package=_package(),
            way_in=way_in(os.environ),
            addresses=tuple(local_addresses()),
            gpus=gpus(os.environ),
            clock=time.time(),
            shared=None if witness is None else os.path.isfile(local_name(witness)),
        )
        self._channel.send(hello)
        if request.protocol != PROTOCOL:
            self.fault(
                f"the launcher speaks protocol {request.protocol}, "
                f"this agent {PROTOCOL} (version {__version__})"
            )
            return
        self._run = AgentRun(
            self._loop, self._channel, self._backlog, request.run, self.fault
        )
        if not self._run.adopts_orphans:
            text = "orphaned processes cannot be adopted here; only marks identify them"
            self._channel.send(messages.Note(text))
        self._beat()

    def _beat(self) -> None:
        """Send a heartbeat, and check the launcher's heartbeat."""
        if self._opened is None or self.ended:
            return
        self._channel.send_ping()
        if not self.closing and self._silent_s() > self._opened.lease_s:
            # Frames that have already arrived count, even if we read them late.
            self._channel.read()
            if not self.closing and self._silent_s() > self._opened.lease_s:
                self._lease_over(f"heard nothing for {self._opened.lease_s:g} s")
        beats = (self._opened.heartbeat_s, self._opened.lease_s / 4)
        self._loop.later(max(0.05, min(beats)), self._beat)

    def _silent_s(self) -> float:
        return self._loop.awake() - self._heard

    def _expect_open(self) -> None:
        if self._opened is None:
            self._lease_over("no 'open' frame came")

    def _hung_up(self, cause: str) -> None:
        # sshd ends the channel when the guard, its child, ends. The launcher must learn
        # that the guard died before it learns that the channel ended.
        if self._guard_socket.guard_is_dead():
            self._guard_died()
        self._lease_over(f"the channel ended: {cause}")

    def _lease_over(self, cause: str) -> None:
        if not self.closing:
            self._channel.send(messages.Note(f"stopping all tasks: {cause}"))
            self.close(self._grace_s, guard.EXIT_LEASE_ENDED)

    def _signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            if self._run is not None:
                self._run.reap()
        elif signum in FORWARDED:
            name = signal.Signals(signum).name
            text = f"the agent received {name}"
            self._channel.send(messages.Note(text, signal=name.removeprefix("SIG")))
            if signum == signal.SIGTERM and not self.closing:
                self.close(self._grace_s, guard.EXIT_TERMINATED)

    def _guard_died(self) -> None:
        # The tasks are unharmed, so the run continues, only without this safety net.
        self._loop.unwatch(self._guard_socket.fileno())
        if not self.closing:
            text = "the guard process died; if the agent dies, too, tasks may go on"
            self._channel.send(messages.Note(text, guard=self._guard_socket.guard))

    @property
    def _grace_s(self) -> float:
        return self._opened.grace_s if self._opened else 0.0

    def fault(self, cause: str) -> None:
        self._channel.stop_reading()
        self._channel.send(messages.Fault(cause))
        self.close(self._grace_s, guard.EXIT_FAULT)

    def close(self, grace_s: float, code: int, others_s: float = 0.0) -> None:
        """Stop everything and exit with ``code``; a second call shortens the grace.

        Waits ``others_s`` for another agent of the run, and sweeps what it leaves.
        """
        if self._run is not None:
            self._run.stop_all(grace_s)
        if self.closing:
            return
        self.closing, self.code = True, code
        if self._syncing is not None:
            self._syncing.close()
        if self._returning is not None:
            self._returning.close()
        patience_s = grace_s + 2 * SWEEP_S
        self._await(
            lambda: self._run is None or self._run.over,
            patience_s,
            lambda: self._await_others(others_s),
        )

    def _await_others(self, others_s: float) -> None:
        run = self._opened.run if self._opened else ""

        def over() -> bool:
            me = os.getpid()
            self._others = bool(others_s) and other_agents_remain(
                proc.snapshot(), run, me
            )
            return not self._others

        self._await(over, others_s, self._sweep, every_s=_OTHERS_LOOK_S)

    def _await(
        self,
        ready: Callable[[], bool],
        patience_s: float,
        then: Callable[[], None],
        every_s: float = CLOSE_LOOK_S,
    ) -> None:
        deadline = self._loop.now() + patience_s

        def poll() -> None:
            if ready() or self._loop.now() >= deadline:
                then()
            else:
                self._loop.later(every_s, poll)

        poll()

    def _sweep(self) -> None:
        run = self._opened.run if self._opened else None
        me = os.getpid()

        def find() -> list[ProcessEntry]:
            if self._run is not None:
                self._run.reap()
            return belongings(proc.snapshot(), run, me)

        kill_until_gone(self._loop, find, self._all_swept)

    def _all_swept(self, killed: list[ProcessEntry], left: list[ProcessEntry]) -> None:
        self._swept = len(killed)
        if killed:
            self._channel.send(messages.Swept(len(killed)))
        if left:
            self._channel.send(messages.Unkillable(tuple(p.pid for p in left)))
        if not self._others:
            clear_away(self._opened.run if self._opened else None)
        if self._run is not None:
            self._run.capture.close(_CAPTURE_CLOSE_S)
        self._channel.flush()
        self._await(lambda: self._channel.idle, _FLUSH_S, self._say_bye)

    def _say_bye(self) -> None:
        read = self._channel.idle  # otherwise nobody reads it
        # Nobody asked for the end of a lease: it must look like a lost host, even to a
        # launcher that was only suspended for a while.
        if self.code != guard.EXIT_LEASE_ENDED:
            self._channel.send(messages.Bye(self._swept, self._others))
        self._await(lambda: self._channel.idle, _FLUSH_S if read else 0.0, self._end)

    def _end(self) -> None:
        self.ended = True
        self._loop.stop()


def _one_line(error: Exception) -> str:
    import traceback  # only here: it takes long to import

    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{os.path.basename(place.filename)}:{place.lineno}"
    return f"{type(error).__name__} in {where}: {error}".replace("\n", " ")[:1000]


def _package() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


class AgentRun:
    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        backlog: ConsoleQueue,
        run: str,
        fault: Callable[[str], None],
    ) -> None:
        self.adopts_orphans = adopt_orphans()
        self.capture = OutputCapture(backlog, loop.post, channel.flush, fault)
        marks = {RUN: run, AGENT: agent_mark(os.getpid())}
        self._children = Children()
        base = dict(environment(os.environb, marks))
        shared = RunServices(loop, channel, self.capture, self._children, base)
        self._tasks = TaskTable(shared)
        self._warmer = WarmInterpreters(shared, self._tasks)
        self._preparation = Preparation(shared)

    def obey(self, request: requests.Request, *, closing: bool) -> None:
        match request:
            case requests.Start() if closing:
                self._tasks.refuse(request, "the agent is closing")
            case requests.Start(warm=None):
                self._tasks.start(request)
            case requests.Start():
                self._warmer.fork(request)
            case requests.Warm():
                if not closing:
                    self._warmer.start(request)
            case requests.Prepare():
                if not closing:
                    self._preparation.start(request)
            case requests.StopRequest():
                self._tasks.stop(request)
            case requests.StacksRequest(names):
                self._tasks.ask_stacks(names)

    def reap(self) -> None:
        self._children.reap()

    def stop_all(self, grace_s: float) -> None:
        self._preparation.close()
        self._warmer.close()
        self._tasks.stop_all(grace_s)

    @property
    def over(self) -> bool:
        """Whether no task and no interpreter is left; the rest can be swept."""
        return self._tasks.over and self._warmer.over and self._preparation.over
