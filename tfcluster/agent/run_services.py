"""What all tasks and programs of an agent have in common."""

from __future__ import annotations

from tfcluster.agent.channel import Channel
from tfcluster.agent.children import Children
from tfcluster.agent.loop import Loop
from tfcluster.agent.output_capture import OutputCapture
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
