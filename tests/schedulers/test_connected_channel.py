"""The channel to a process that has connected, over a real connection."""

from __future__ import annotations

import select
import socket

import pytest

from tfcluster.schedulers.process_channel import WORDS_S, ConnectedChannel


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_process_that_ends_before_it_has_read_all_has_its_last_words(
    how: str,
) -> None:
    """Also if our side is closed in answer to that, before we ask for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    waited_s: list[float] = []

    def words(timeout_s: float) -> str:
        waited_s.append(timeout_s)
        return "its home is full"

    channel = ConnectedChannel(ours, words, lambda: None)
    with ours:
        channel.write(b"a program that is never read")
        assert select.select([theirs], [], [], 10.0)[0]
        theirs.close()  # The kernel answers with a reset, because data is left.
        if how == "read":
            assert channel.read() == b""
        else:
            with pytest.raises(ConnectionError, match=r"[Rr]eset|[Bb]roken pipe"):
                channel.write(bytes(1 << 24))
        channel.close()
        assert channel.diagnosis() == "its home is full"
    assert waited_s == [WORDS_S]
