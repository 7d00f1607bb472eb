"""Shows and records agents' messages about tasks; turns them into events.

Also says in one sentence why a task ended.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.base.light_dataclasses import as_dict
from tfcluster.base.task_id import TaskId
from tfcluster.launcher.host_facts import HostFacts
from tfcluster.launcher.live_run import LiveRun
from tfcluster.launcher.task_files import LogCopies, TraceFiles
from tfcluster.lifecycle import events
from tfcluster.protocol import messages, task_events
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.task_events import Epoch, Serving, Step, TraceMessage
from tfcluster.record.metrics import EPOCH, EXCHANGES

_MAX_TEXT = 300
_MOST_TOTALS = 20
_MOST_VERSIONS = 20
_MAX_EVENTS = 1000
_MAX_PHASE = 80
_UNLIMITED = (Step, Serving, Epoch, task_events.ExchangesMessage, TraceMessage)
"""Only the latest of these events is kept, or the record bounds their number."""


class TaskMessages:
    """Handles messages about tasks; remembers pids and causes that tasks reported."""

    def __init__(
        self, run: LiveRun, facts: HostFacts, copies: LogCopies, traces: TraceFiles
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._journal = run.journal
        self._host_facts = facts
        self._copies = copies
        self._traces = traces
        self.answers: dict[TaskId, task_events.Stack] = {}
        """Answers to the last request for stacks."""
        self.cold: set[TaskId] = set()
        """Tasks whose program needs a fresh interpreter."""
        self._facts: dict[tuple[TaskId, int], dict[str, Any]] = {}
        self._causes: dict[tuple[TaskId, int], str] = {}
        self._event_counts: dict[tuple[TaskId, int], int] = {}
        self._warned: set[str] = set()
        self._ends = EndOrder()

    def facts(self, task: TaskId, attempt: int) -> dict[str, Any]:
        return self._facts.get((task, attempt), {})

    def received(
        self, host: str, message: messages.Message, now: float
    ) -> list[events.Event]:
        """The lifecycle events of a message. Raises ProtocolError."""
        match message:
            case messages.Note(text, signal):
                self._run.say(_of_host(host, text))
                return [events.AgentAskedToStop(host)] if signal == "TERM" else []
            case messages.Swept(count):
                self._swept(host, count)
            case messages.Unkillable(pids):
                named = ", ".join(map(str, pids))
                text = f"pids {named} are still alive after SIGKILL"
                self._run.say(f"{host}: {text}; it may need a reboot")
            case messages.OfTask():
                return self._about(host, message, now)
        return []

    def _about(
        self, host: str, message: messages.OfTask, now: float
    ) -> list[events.Event]:
        task, attempt = key = self._task(host, message.task), message.attempt
        match message:
            case messages.Started(pid=pid):
                self._facts[key] = {"host": host, "pid": pid}
                return [events.TaskStarted(task, attempt)]
            case messages.Listening():
                return [events.TaskListening(task, attempt)]
            case messages.Intruder(port=port, pid=pid, uid=uid):
                who = f"a process of uid {uid}" if pid is None else f"pid {pid}"
                cause = f"its port {port} is held by {who}"
                return [events.TaskUnstartable(task, attempt, cause)]
            case messages.Failed(cause=cause):
                return [events.TaskUnstartable(task, attempt, cause)]
            case messages.Exited():
                at_s = self._ends.at_s(host, message.death, now - message.ago_s)
                return [self._exited(key, message, at_s)]
            case messages.Settled():
                return [events.TaskSettled(task, attempt)]
            case messages.Usage():
                self._progress.uses(task, message)
            case messages.Log(lines=lines, dropped=dropped):
                self._run.show.log(str(task), lines, dropped)
                if not self._host_facts.shares_files(host):
                    self._copies.add(task, lines, skipped=dropped, at=host)
            case messages.LogError(cause=cause, dropped_bytes=lost):
                self._run.say(
                    f"{task} on {host}: cannot write its log: {cause}, {lost} bytes "
                    "dropped"
                )
            case messages.Event(event=event):
                self._event(host, key, event, now)
        return []

    def _exited(
        self, key: tuple[TaskId, int], exited: messages.Exited, at_s: float
    ) -> events.TaskExited:
        task, attempt = key
        code, signal = exited.code, exited.signal
        if signal is not None:
            # Agents send the signal names of kill(1), everything else has signal(7)'s.
            signal = f"SIG{signal.removeprefix('SIG')}"
        tail = tuple(line[:2000] for line in exited.tail)[-20:]
        cause = cause_of_exit(code=code, signal=signal, oom=exited.oom, tail=tail)
        if cause is not None and signal is None:
            cause = self._causes.get(key) or cause
        self._facts.setdefault(key, {})["seconds"] = exited.seconds
        self._progress.uses(task, exited)
        return events.TaskExited(
            task=task,
            attempt=attempt,
            code=code,
            signal=signal,
            cause=cause,
            tail=tail,
            stopped=exited.stopped,
            victim=signal is None and looks_like_victim(cause, tail),
            exchanged=exited.exchanged,
            at_s=at_s,
        )

    def _event(
        self, host: str, key: tuple[TaskId, int], event: Mapping[str, Any], now: float
    ) -> None:
        (task, attempt), name = key, str(key[0])
        progress, journal = self._progress, self._journal
        try:
            said = task_events.decode(event)
        except ProtocolError as error:
            said = task_events.NoteMessage(f"it reports what is not valid: {error}")
        if not isinstance(said, _UNLIMITED) and not self._may_say_more(key):
            return
        match said:
            case Step():
                progress.step(task, said, now)
            case Serving():
                progress.serving(task, said)
            case Epoch(epoch, step, metrics):
                step = progress.last_step(task) if step is None else step
                keys = {"attempt": attempt, "step": step, "epoch": epoch}
                journal.metrics(EPOCH, name, **keys, metrics=metrics)
                progress.epoch(task, epoch, metrics)
            case task_events.ExchangesMessage(totals):
                costs = [as_dict(total) for total in totals[:_MOST_TOTALS]]
                journal.metrics(EXCHANGES, name, attempt=attempt, totals=costs)
            case task_events.Versions(versions):
                some = list(versions.items())[:_MOST_VERSIONS]
                shown = {k[:_MAX_PHASE]: v[:_MAX_PHASE] for k, v in some}
                journal.event("versions", task=name, versions=shown)
            case task_events.PhaseMessage(phase):
                shown_phase = phase[:_MAX_PHASE]
                journal.event("task", task=name, attempt=attempt, phase=shown_phase)
            case TraceMessage():
                self._traces.add(task, attempt, host, said)
            case task_events.Waiting():
                journal.event("waiting", task=name, attempt=attempt, **_waiting(said))
            case task_events.WarningMessage(text):
                self._warn(task, "warning", text)
            case task_events.NoteMessage(text):
                self._warn(task, "note", text)
            case task_events.ColdStart(text):
                self.cold.add(task)
                self._warn(task, "note", text)
            case task_events.FailureMessage(cause):
                self._causes[key] = cause[:_MAX_TEXT]
            case task_events.Stack(text, waiting):
                self.answers[task] = said
                awaited = waiting and _waiting(waiting)
                journal.event("stack", task=name, text=text, waiting=awaited)

    def _warn(self, task: TaskId, kind: str, text: str) -> None:
        """Show a warning or note once: ranks that run the same program all issue it."""
        text = text[:_MAX_TEXT]
        if text not in self._warned:
            self._warned.add(text)
            self._run.say(f"{kind}: {task}: {text}")

    def _may_say_more(self, key: tuple[TaskId, int]) -> bool:
        """Limit a task's events, because they all go into the record."""
        count = self._event_counts[key] = self._event_counts.get(key, 0) + 1
        if count == _MAX_EVENTS:
            end = "further ones are not recorded"
            self._run.say(f"{key[0]} sends too many events; {end}")
        return count < _MAX_EVENTS

    def _swept(self, host: str, count: int) -> None:
        self._journal.event("swept", host=host, count=count)
        if count:
            self._run.show.say(f"{host}: swept {count} leftover processes")

    def _task(self, host: str, name: str) -> TaskId:
        try:
            task = TaskId.parse(name)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if (task, host) not in self._run.current.owners:
            raise ProtocolError(f"{task} is not a task of {host}")
        return task


def _waiting(waiting: task_events.Waiting) -> dict[str, Any]:
    """What a task waits for, as the record has it."""
    since_s = round(waiting.since_s, 3)
    return {"since_s": since_s, "what": waiting.what, "for": [*waiting.ranks]}


def _of_host(host: str, text: str) -> str:
    """``h1: text``; a warning still begins with "warning: "."""
    warning = "warning: "
    rest = text.removeprefix(warning)
    return f"{host}: {text}" if rest == text else f"{warning}{host}: {rest}"


_REMEMBERED = 256
_STEP_S = 1e-6
"""The distance between two ends if only their order is known."""


class EndOrder:
    """The ends on all hosts. Each agent numbers the ends that it sees, from 0."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[tuple[int, float]]] = {}

    def at_s(self, host: str, number: int, about_s: float) -> float:
        """When an end at about ``about_s`` was, in order of the numbers."""
        ends = self._ends.setdefault(host, deque(maxlen=_REMEMBERED))
        before = max((s for n, s in ends if n < number), default=-math.inf)
        after = min((s for n, s in ends if n > number), default=math.inf)
        if not before < about_s < after:
            low = before if math.isfinite(before) else after - 2 * _STEP_S
            high = after if math.isfinite(after) else before + 2 * _STEP_S
            about_s = (low + high) / 2
        ends.append((number, about_s))
        return about_s


_SIGNALS = {
    "SIGKILL": "killed by SIGKILL",
    "SIGTERM": "ended by SIGTERM",
    "SIGINT": "ended by SIGINT",
    "SIGHUP": "ended by SIGHUP",
    "SIGSEGV": "crashed with SIGSEGV (segmentation fault)",
    "SIGBUS": "crashed with SIGBUS (bad memory access, or a full /dev/shm)",
    "SIGABRT": "aborted (SIGABRT)",
    "SIGILL": "crashed with SIGILL (an instruction that this CPU lacks)",
    "SIGFPE": "crashed with SIGFPE (arithmetic error)",
    "SIGXCPU": "ran over its CPU time limit (SIGXCPU)",
}

# The last line of a traceback: a dotted class name, perhaps with a message.
_EXCEPTION = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?")
_ADDRESS = re.compile(r"address already in use|could not start grpc server", re.I)
# Output of a task that failed only because one of its peers did.
_VICTIM = re.compile(
    r"PeerLostError|UnavailableError|Connection reset by peer|Socket closed|"
    r"failed to connect to all addresses|coordination service|Broken pipe|"
    r"heartbeat timeout",
    re.I,
)
_MAX_CHARS = 300


def cause_of_exit(
    *, code: int | None, signal: str | None, oom: bool, tail: Sequence[str]
) -> str | None:
    """One sentence; None if the task ended well. ``tail`` has its last output lines."""
    if signal is not None:
        text = _SIGNALS.get(signal, f"killed by {signal}")
        if oom:
            return f"{text}: out of memory (the kernel's OOM killer)"
        reason = _abort_reason(tail) if signal == "SIGABRT" else None
        return f"{text}: {reason}" if reason else text
    if code == 0:
        return None
    error = last_words(tail)
    if code == 127 and error is None:
        return "exited with code 127 (command not found?)"
    return error or f"exited with code {code}"


def last_words(tail: Sequence[str]) -> str | None:
    """The last exception (or known error message) in these last lines of output."""
    for line in reversed(tail):
        text = line.strip()
        if _ADDRESS.search(text):
            return _cut(f"address in use: {text}")
        if _EXCEPTION.fullmatch(text) and not line[:1].isspace():
            return _cut(text)
    return None


def looks_like_victim(cause: str | None, tail: Sequence[str]) -> bool:
    """Whether the task seems to have failed because another one had."""
    last = last_words(tail)
    return any(text and _VICTIM.search(text) for text in (cause, last))


def _abort_reason(tail: Sequence[str]) -> str | None:
    for line in reversed(tail):
        if "Check failed" in line or line.startswith(("F0", "terminate called")):
            return _cut(line.strip())
    return None


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
