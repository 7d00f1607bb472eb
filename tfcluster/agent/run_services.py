"""What all tasks and programs of an agent use; children that are no tasks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial

from tfcluster.agent.channel import Channel
from tfcluster.agent.children import Children
from tfcluster.agent.loop import Loop
from tfcluster.agent.output_capture import LogFile, OutputCapture, OutputStream
from tfcluster.agent.signals import send_group
from tfcluster.agent.spawn import SpawnedProgram, SpawnError, spawn
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol.messages import Note


@dataclass(frozen=True, slots=True)
class RunServices:
    loop: Loop
    channel: Channel
    capture: OutputCapture
    children: Children
    base: dict[bytes, bytes]  # the environment of all processes, with the run's marks

    def note_log(self, name: str, cause: str | None, lost_bytes: int) -> None:
        """Report why a log cannot be written, or, without a cause, that it can be."""
        text = cause or f"can be written again; {lost_bytes} bytes are missing"
        self.channel.send(Note(f"the log of {name}: {text}"))


class HelperProgram:
    """A child that is no task, such as a warm interpreter. Its output goes to a log."""

    def __init__(
        self,
        services: RunServices,
        name: str,
        program: SpawnedProgram,
        log: str,
        *inherited: int,
        on_end: Callable[[int], None],
        on_output: Callable[[list[str]], None],
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """Start it, with these descriptors of ours. Raises SpawnError."""
        self.status: int | None = None
        self._capture = services.capture
        self._on_end = on_end
        self._on_output = on_output
        try:
            read_end, write_end = os.pipe()
        except OSError as error:
            raise SpawnError(f"no pipes: {error.strerror}") from error
        trouble = partial(services.note_log, name)
        self._stream = OutputStream(
            read_end, LogFile(log), None, self._drained, trouble
        )
        self._capture.add(self._stream)
        try:
            self.pid = spawn(program, write_end, *inherited, stdin=stdin)
        except SpawnError:
            self._capture.drop(self._stream)
            raise
        finally:
            os.close(write_end)
        services.children.expect(self.pid, self._ended)

    def send_group(self, signum: int = signal.SIGKILL) -> None:
        """Signal its process group, unless it has ended: its pid may be reused."""
        if self.status is None:
            send_group(self.pid, signum)

    def _ended(self, status: int, _used: object) -> None:
        self.status = status
        self._capture.drain(self._stream)
        self._on_end(status)

    def _drained(self, tail: list[str]) -> None:
        if self.status is not None:  # otherwise it could not even be started
            self._capture.drop(self._stream)
            self._on_output(tail)
