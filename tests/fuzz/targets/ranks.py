"""Between ranks: handshake, addresses, messages of the transports, reports, PMI."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence

from tests.fuzz.target import Target
from tests.fuzz.targets.text import bytes_of, text_of
from tfcluster.protocol import wire
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import WireError
from tfcluster.runtime.collective import (
    peer_reports,
    signature,
)
from tfcluster.runtime.collective.peer_reports import (
    Answer,
    Exit,
    ExitReport,
    Query,
    RankProgress,
    ReadyMessage,
)
from tfcluster.runtime.collective.signature import Signature
from tfcluster.runtime.collective.transports import multiplexed_sockets, pmi_server
from tfcluster.runtime.collective.transports.multiplexed_sockets import PeerSockets
from tfcluster.runtime.errors import CollectiveError
from tfcluster.runtime.net import rendezvous
from tfcluster.runtime.net.rendezvous import HandshakeError, Member

_ME = Member(0, 3, b"token")
_WAIT_S = 5.0


def _accept(data: bytes) -> None:
    """A stranger dials: whatever it says, it is not authenticated."""
    _against(data, lambda connection: rendezvous.accept(connection, _ME))


def _dial(data: bytes) -> None:
    """A stranger is dialled."""
    me = Member(1, 3, b"token")
    _against(data, lambda connection: rendezvous.dial(connection, me, 0))


def _against(data: bytes, act: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(_WAIT_S)
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        assert callable(act)
        act(ours)
    raise AssertionError("it was authenticated")


def _address(data: bytes) -> None:
    host, port = rendezvous.parse_address(text_of(data))
    assert host
    assert 0 <= port <= 65535


def _swap(data: bytes) -> None:
    """The message of another rank in an all-gather."""
    ours, theirs = _tcp_pair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sockets = PeerSockets({1: ours})
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        own, other = sockets.swap(0, range(2), [b"mine", b"to rank 1"], _WAIT_S)
    assert own == b"mine"
    assert multiplexed_sockets.framed(other) == data[: 8 + len(other)]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def _monitor(data: bytes) -> None:
    """What a rank tells the peer monitors of the others."""
    reports: dict[int, ExitReport] = {}
    others: dict[int, RankProgress | None] = {1: None}
    for frame in wire.Decoder().feed(data + b"\n"):
        message = peer_reports.decode(frame)
        assert peer_reports.decode(wire.parse(encode(message))) == message
        match message:
            case Answer(progress) | Query(progress):
                others[1] = progress
            case Exit(report):
                reports[1] = report
    me = RankProgress(7, "gradients of adam", 1.5, inside=True)
    failed = {rank: said.text for rank, said in reports.items() if said.failed}
    peer_reports.inquiry_text(me, others, failed)
    peer_reports.verdict(7, {}, reports, None)
    peer_reports.cannot_succeed(7, reports)


def _signatures(data: bytes) -> None:
    """A rank explains an exchange that differs from ours."""
    theirs = Signature.decoded(data)
    assert Signature.decoded(theirs.encoded()) == theirs
    signature.difference([Signature("sum", ("a float32 (3)",)), theirs])


def _pmi(data: bytes) -> None:
    manager = pmi_server.ProcessManager("job", ["a", "a", "b"], lambda own: [own] * 3)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ours.settimeout(0.05)
        manager.serve(ours)
    if isinstance(manager.failure, Exception):
        raise manager.failure


def _reports() -> Sequence[bytes]:
    progress = RankProgress(41, "gradients of adam", 2.25, inside=True)
    state = {"weights": "norm 1.5 of 3", "seed": "7"}
    left = ExitReport(41, "CollectiveError", "no", 12, state)
    ended = ExitReport(41, "", "ended", 12, state)
    frames = [
        Query(progress),
        Answer(progress),
        Exit(left),
        Exit(ended),
        ReadyMessage(),
    ]
    return [*map(encode, frames), b"".join(map(encode, frames))]


_HELLO = struct.pack(">4sII32s", b"TFC1", 1, 0, bytes(range(32)))

TARGETS = (
    Target(
        "accept",
        _accept,
        lambda: [_HELLO, _HELLO + bytes(32)],
        (HandshakeError, OSError),
        (b"TFC1",),
        most_bytes=4096,
    ),
    Target(
        "dial",
        _dial,
        lambda: [bytes(64), bytes(64) + b"\x01"],
        (HandshakeError, OSError),
        most_bytes=4096,
    ),
    Target(
        "address",
        _address,
        lambda: bytes_of("node1:40000", "[::1]:40001", "10.0.0.1:1"),
        (CollectiveError,),
        (b"[", b"]", b":"),
    ),
    Target(
        "swap",
        _swap,
        lambda: [multiplexed_sockets.framed(b"x" * n) for n in (0, 1, 100, 40000)],
        (CollectiveError,),
        most_bytes=1 << 17,
    ),
    Target(
        "monitor",
        _monitor,
        _reports,
        (WireError,),
        (b'{"type":"', b'"progress":[', b'"report":['),
    ),
    Target(
        "signatures",
        _signatures,
        lambda: [Signature("sum", ("a float32 (3)", "b int32 ()")).encoded()],
        (TypeError, ValueError),
        most_bytes=1 << 18,
    ),
    Target(
        "pmi",
        _pmi,
        lambda: [
            b"cmd=init pmi_version=1 pmi_subversion=1\ncmd=get_maxes\ncmd=get_appnum\n"
            b"cmd=get_my_kvsname\ncmd=put kvsname=job key=a value=b\ncmd=barrier_in\n"
            b"cmd=get kvsname=job key=a\ncmd=get_universe_size\ncmd=finalize\n",
            b"cmd=abort exitcode=1\n",
        ],
        (),
        (b"cmd=", b"key=", b"value=", b" ", b"cmd=put ", b"cmd=barrier_in\n"),
        most_bytes=1 << 15,
    ),
)
