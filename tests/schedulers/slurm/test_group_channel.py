"""The channel to one process of a step for many hosts, over a real connection."""

from __future__ import annotations

import select
import socket
from typing import cast

from tfcluster.schedulers.slurm.connect_back import Caller
from tfcluster.schedulers.slurm.group_step import WORDS_S, ConnectedChannel, GroupStep


class Step:
    """Knows the last words of each process, and how long it may be waited for them."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []

    def said_about(self, host: str, task: int, timeout_s: float) -> str:
        self.waited_s.append(timeout_s)
        return "its home is full"

    def left(self, host: str) -> None:
        pass


def test_a_process_that_ends_before_it_has_read_all_has_its_last_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    step = Step()
    channel = ConnectedChannel(Caller("node7", 6, ours), cast("GroupStep", step))
    with ours:
        channel.write(b"a program that is never read")
        assert select.select([theirs], [], [], 10.0)[0]
        theirs.close()  # The kernel answers with a reset, because data is left.
        assert channel.read() == b""
        assert channel.diagnosis() == "its home is full"
    assert step.waited_s == [WORDS_S]
