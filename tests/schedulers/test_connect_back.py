"""Tests of the connections that a step's processes open to the launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tfcluster.schedulers import connect_back
from tfcluster.schedulers.agent_bundle import agent_argv
from tfcluster.schedulers.connect_back import Caller, CallerReception, Refused, greet

SOON_S = 20.0
TOKEN = b"t" * 32


@contextmanager
def reception() -> Iterator[CallerReception]:
    listening = CallerReception(["node7"])
    try:
        yield listening
    finally:
        listening.close()


def arrival(listening: CallerReception, timeout_s: float = SOON_S) -> Caller | None:
    until_s = time.monotonic() + timeout_s
    return listening.caller("node7", lambda: until_s, lambda: False)


@contextmanager
def process(program: str, node: str = "node7") -> Iterator[subprocess.Popen[bytes]]:
    """What srun starts on a node, with the program on its standard input."""
    env = os.environ | {
        "SLURMD_NODENAME": node,
        "SLURM_PROCID": "6",
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    started = subprocess.Popen(
        agent_argv((sys.executable,)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
    )
    assert started.stdin is not None
    with started:
        try:
            started.stdin.write(program.encode() + b"\0")
            started.stdin.close()
            yield started
        finally:
            started.kill()


def test_a_process_runs_what_comes_over_its_connection() -> None:
    with reception() as listening, process(listening.program()) as started:
        caller = arrival(listening)
        assert caller is not None
        assert (caller.node, caller.task) == ("node7", 6)
        program = b"import os\nwhile data := os.read(0, 99): os.write(1, data.upper())"
        with caller.connection as line:
            line.settimeout(SOON_S)
            line.sendall(program + b"\0hello")
            assert line.recv(99) == b"HELLO"
            line.shutdown(socket.SHUT_WR)
            assert line.recv(99) == b""
        assert started.wait(SOON_S) == 0


def test_a_process_without_the_token_is_turned_away() -> None:
    with reception() as listening:
        with reception() as other:
            program = listening.program().replace(
                f"{listening._token.hex()}", f"{other._token.hex()}"
            )
        with process(program) as started:
            assert started.stderr is not None
            said = started.stderr.read()
        assert said.decode() == (
            f"tfcluster: 127.0.0.1 port {listening.port} is not the launcher\n"
        )
        assert arrival(listening, 0.0) is None


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.0\r\n\r\n" + bytes(64),
        b"TFB1" + bytes(32) + bytes(32) + b"\x00\x05nodeX",
        b"TFB1" + bytes(32) + bytes(32) + b"\xff\xff",
    ],
    ids=["another protocol", "another token", "a long identity"],
)
def test_a_stranger_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(said)
        with pytest.raises(Refused):
            greet(ours, TOKEN)
        theirs.settimeout(SOON_S)
        # It learns nothing but a nonce of ours and a proof for this connection.
        assert len(theirs.recv(999)) in (0, 64) if said[:4] == b"TFB1" else True


def test_a_peer_that_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect_back, "HANDSHAKE_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError, match="timed out"):
        greet(ours, TOKEN)


def test_silent_strangers_do_not_keep_a_process_out() -> None:
    with reception() as listening:
        address = ("127.0.0.1", listening.port)
        strangers = [
            socket.create_connection(address, SOON_S)
            for _ in range(connect_back.AT_ONCE - 1)
        ]
        try:
            with process(listening.program()):
                caller = arrival(listening)
                assert caller is not None
                caller.connection.close()
        finally:
            for stranger in strangers:
                stranger.close()


def test_nothing_listens_after_the_end() -> None:
    with reception() as listening:
        port = listening.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), SOON_S)


def test_it_listens_on_a_port_that_srun_may_use() -> None:
    with socket.create_server(("", 0)) as taken:
        busy = taken.getsockname()[1]
        ports = range(busy, busy + 20)
        listening = CallerReception(["node7"], ports)
        listening.close()
    assert listening.port in ports[1:]
