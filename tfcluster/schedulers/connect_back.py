"""Connections that processes of a job open to us, instead of pipes through a scheduler.

Each process gets a program with a token, over its standard input. Both ends then prove
that they know the token before anything else is sent:

    process -> us        "TFB1", nonce
    us -> process        nonce, HMAC-SHA256 over "launcher" and both nonces
    process -> us        HMAC-SHA256 over "process", both nonces and the identity; the
                         length of the identity, and the identity: "NODE TASK-NUMBER"
    us -> process        one byte: welcome

It is a challenge-response protocol like SKID3 (Menezes et al., "Handbook of Applied
Cryptography", 10.3.2). Afterwards the connection is the process's standard input and
output.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable

from tfcluster.base.light_dataclasses import dataclass

HANDSHAKE_S = 10.0
AT_ONCE = 8
"""How many peers may be in a handshake at a time; a stalled peer occupies a place."""
MAX_IDENTITY_BYTES = 300

_MAGIC = b"TFB1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_WELCOME = b"\x01"
_CONNECT_S = 30
_POLL_S = 0.2

# SLURM_LAUNCH_NODE_IPADDR is the address of srun's node as slurmd sees it (srun(1)).
_PROGRAM = """\
import hmac, os, socket, sys
token, port = bytes.fromhex({token!r}), {port}
where = os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or {fallback!r}
node = {node!r} or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
me = (node + " " + os.environ.get("SLURM_PROCID", "0")).encode()

def received(count):
    data = b""
    while len(data) < count:
        part = line.recv(count - len(data))
        if not part:
            sys.exit("tfcluster: the launcher closed the connection")
        data += part
    return data

def proof(role, more=b""):
    return hmac.digest(token, role + bytes(1) + nonces + more, "sha256")

try:
    line = socket.create_connection((where, port), {connect_s})
    nonces = os.urandom({nonce_bytes})
    line.sendall({magic!r} + nonces)
    nonces += received({nonce_bytes})
    if not hmac.compare_digest(received({proof_bytes}), proof(b"launcher")):
        sys.exit("tfcluster: %s port %d is not the launcher" % (where, port))
    line.sendall(proof(b"process", me) + len(me).to_bytes(2, "big") + me)
    received({welcome_bytes})
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.settimeout(None)
except OSError as error:
    sys.exit("tfcluster: cannot connect to %s port %d: %s" % (where, port, error))
os.dup2(line.fileno(), 0)
os.dup2(line.fileno(), 1)
line.close()
exec(bytes().join(iter(lambda: os.read(0, 1) or os._exit(10), bytes(1))))
"""


class Refused(Exception):
    """The peer could not be authenticated."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated process of the job."""

    node: str
    task: int
    connection: socket.socket


class CallerReception:
    """Listens until a process that knows the token has connected from each node."""

    def __init__(self, nodes: Iterable[str], ports: range | None = None) -> None:
        """Raises OSError if no port (of ``ports``, if given) is free."""
        self._changed = threading.Condition()
        self._awaited = set(nodes)
        self._callers: dict[str, Caller] = {}
        self.has_callers = False
        """Whether any process has connected."""
        self._token = os.urandom(32)
        self._listener = _listener(ports)
        self.port = int(self._listener.getsockname()[1])
        for _ in range(AT_ONCE):
            threading.Thread(
                target=self._accept_all, name="connect back", daemon=True
            ).start()

    def caller(
        self, node: str, deadline_s: Callable[[], float], is_over: Callable[[], bool]
    ) -> Caller | None:
        """The process on ``node``, once it has connected; None: too late or over."""
        with self._changed:
            while node not in self._callers:
                left_s = deadline_s() - time.monotonic()
                if left_s <= 0 or is_over():
                    self._awaited.discard(node)
                    return None
                self._changed.wait(min(left_s, _POLL_S))
            return self._callers.pop(node)

    def program(self, node: str = "") -> str:
        """The source code for a process on ``node`` (empty: ask Slurm's variables)."""
        return _PROGRAM.format(
            token=self._token.hex(),
            port=self.port,
            node=node,
            fallback=socket.gethostname(),
            connect_s=_CONNECT_S,
            magic=_MAGIC,
            nonce_bytes=_NONCE_BYTES,
            proof_bytes=_PROOF_BYTES,
            welcome_bytes=len(_WELCOME),
        )

    def close(self) -> None:
        # Closing alone does not wake a thread that is in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                caller = greet(connection, self._token)
            except (OSError, Refused):
                connection.close()
            else:
                self._welcome(caller)

    def _welcome(self, caller: Caller) -> None:
        with self._changed:
            if caller.node not in self._awaited:
                caller.connection.close()  # it connected too late, or twice
                return
            self._awaited.discard(caller.node)
            self._callers[caller.node] = caller
            self.has_callers = True
            self._changed.notify_all()
            complete = not self._awaited
        if complete:
            self.close()


def greet(connection: socket.socket, token: bytes) -> Caller:
    """Authenticate the peer. Raises Refused, or OSError if it is gone or too slow."""
    until_s = time.monotonic() + HANDSHAKE_S
    hello = _received(connection, len(_MAGIC) + _NONCE_BYTES, until_s)
    if not hello.startswith(_MAGIC):
        raise Refused("it is not one of our processes")
    ours = os.urandom(_NONCE_BYTES)
    nonces = hello[len(_MAGIC) :] + ours
    connection.sendall(ours + _proof(token, b"launcher", nonces))
    answer = _received(connection, _PROOF_BYTES + 2, until_s)
    size = int.from_bytes(answer[_PROOF_BYTES:], "big")
    if size > MAX_IDENTITY_BYTES:
        raise Refused("its identity is too long")
    identity = _received(connection, size, until_s)
    expected = _proof(token, b"process", nonces + identity)
    if not hmac.compare_digest(answer[:_PROOF_BYTES], expected):
        raise Refused("it does not know the token")
    node, _, task = identity.decode().partition(" ")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_WELCOME)
    connection.settimeout(None)
    return Caller(node, int(task), connection)


def _proof(token: bytes, role: bytes, facts: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + facts, "sha256")


def _received(connection: socket.socket, count: int, until_s: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        portion = connection.recv(count - len(data))
        if not portion:
            raise ConnectionResetError("connection closed")
        data += portion
    return bytes(data)


def _listener(ports: range | None) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports or (0,):
        try:
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=1024
            )
        except OSError as error:
            last = error
    raise last
