"""Mutual authentication: both ends of a new connection prove that they know the token.

Nothing else is read before that: at most 76 bytes from an unauthenticated peer.

    dialer -> acceptor   "TFC1", own rank, acceptor's rank, nonce
    acceptor -> dialer   nonce, HMAC-SHA256 over "accept", both ranks and nonces
    dialer -> acceptor   HMAC-SHA256 over "dial", both ranks and nonces
    acceptor -> dialer   one byte: welcome

It is a challenge-response protocol like SKID3 (Menezes et al., "Handbook of Applied
Cryptography", 10.3.2). The module does not know what is sent afterwards.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from dataclasses import dataclass, field

_MAGIC = b"TFC1"
_HELLO = struct.Struct(">4sII32s")
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WELCOME = b"\x01"


class HandshakeError(Exception):
    """The peer could not be authenticated as a rank of this run."""


@dataclass(frozen=True, slots=True)
class Member:
    """The identity of this end.

    ``generation`` keeps restarted ranks from connecting to ranks of an earlier attempt.
    """

    rank: int
    size: int
    token: bytes = field(repr=False)
    generation: int = 0

    def proof(self, role: bytes, ranks: tuple[int, int], nonces: bytes) -> bytes:
        """HMAC-SHA256, 32 bytes, that is valid for this role and connection only."""
        facts = struct.pack(">IIIQ", *ranks, self.size, self.generation)
        return hmac.digest(self.token, role + b"\0" + facts + nonces, "sha256")


def dial(connection: socket.socket, me: Member, peer: int) -> None:
    """Authenticate to rank ``peer``, and have it authenticate itself.

    Raises HandshakeError if it is not that rank, and OSError if the connection fails or
    its timeout expires.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    ranks = (me.rank, peer)
    connection.sendall(_HELLO.pack(_MAGIC, *ranks, nonce))
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES)
    nonces = nonce + answer[:_NONCE_BYTES]
    if not hmac.compare_digest(
        answer[_NONCE_BYTES:], me.proof(b"accept", ranks, nonces)
    ):
        raise HandshakeError("it does not know this run's token")
    connection.sendall(me.proof(b"dial", ranks, nonces))
    try:
        welcome = _receive(connection, len(_WELCOME))
    except ConnectionError:
        welcome = b""
    if welcome != _WELCOME:
        raise HandshakeError("it rejected the handshake")


def accept(connection: socket.socket, me: Member) -> int:
    """Authenticate the dialer and return its rank, which is higher than ours.

    Raises HandshakeError if it does not know the token or wants another rank, and
    OSError if the connection fails or times out.
    """
    hello = _receive(connection, _HELLO.size)
    magic, dialer, wanted, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC or wanted != me.rank or not me.rank < dialer < me.size:
        raise HandshakeError("it is not a tfcluster rank, or dialled another rank")
    ranks = (dialer, me.rank)
    ours = secrets.token_bytes(_NONCE_BYTES)
    nonces = nonce + ours
    connection.sendall(ours + me.proof(b"accept", ranks, nonces))
    if not hmac.compare_digest(
        _receive(connection, _PROOF_BYTES), me.proof(b"dial", ranks, nonces)
    ):
        raise HandshakeError("it does not know this run's token")
    connection.sendall(_WELCOME)
    return int(dialer)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        portion = connection.recv(count - len(data))
        if not portion:
            raise ConnectionResetError("connection closed")
        data += portion
    return bytes(data)
