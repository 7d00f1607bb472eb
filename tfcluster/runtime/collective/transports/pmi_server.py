"""A PMI server for one MPI process; it takes the place of mpiexec.

MPICH and its derivatives ask their process manager, by lines of text on a descriptor
(PMI, wire protocol 1), for their rank, and for the addresses that the other processes
have put there. Here each rank runs its own server, and at every PMI barrier all ranks
exchange the values put since the last barrier. So an MPI job needs no launcher and no
extra port. Knows nothing about MPI itself. The protocol is implemented in src/pmi of
MPICH (Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for
Extreme-Scale Systems", 2010).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tfcluster.protocol.wire import LineBuffer, WireError

_MAX_NAME = 256
_MAX_KEY = 64
_MAX_VALUE = 1024
_FOREIGN = ("PMI_", "PMIX_", "PMI2_")
"""Variables that would lead MPI to another process manager, such as Slurm's."""

Gather = Callable[[bytes], list[bytes]]
"""An all-gather: returns every rank's bytes in rank order; all ranks must call it."""


class ProcessManager:
    """Answers the PMI requests of one rank's MPI library.

    ``job`` has to be unique among runs: MPI names its shared memory after it. Ranks
    with equal ``host_keys`` share memory. ``gather`` is called from the serving thread,
    while the rank waits inside MPI.
    """

    def __init__(self, job: str, host_keys: Sequence[str], gather: Gather) -> None:
        self._job = job
        self._size = len(host_keys)
        self._gather = gather
        self._own_puts: dict[str, str] = {}
        self._values = {"PMI_process_mapping": process_mapping(host_keys)}
        self.failure: Exception | None = None
        """The error that interrupted the exchange between the ranks, if any."""

    def answer(self, line: str) -> str | None:
        """The answer to one request line; both are without the newline.

        None if the library expects no answer. Raises what ``gather`` raises.
        """
        request = words(line)
        match request.get("cmd"):
            case "init":
                well = request.get("pmi_version") == "1"
                return (
                    "cmd=response_to_init pmi_version=1 pmi_subversion=1 "
                    f"rc={0 if well else -1}"
                )
            case "get_maxes":
                return (
                    f"cmd=maxes kvsname_max={_MAX_NAME} keylen_max={_MAX_KEY} "
                    f"vallen_max={_MAX_VALUE}"
                )
            case "get_appnum":
                return "cmd=appnum appnum=0"
            case "get_universe_size":
                return f"cmd=universe_size size={self._size}"
            case "get_my_kvsname":
                return f"cmd=my_kvsname kvsname={self._job}"
            case "put":
                self._own_puts[request.get("key", "")] = request.get("value", "")
                return "cmd=put_result rc=0 msg=success"
            case "get":
                value = self._values.get(request.get("key", ""))
                if value is None:
                    return "cmd=get_result rc=-1 msg=key_not_found"
                return f"cmd=get_result rc=0 msg=success value={value}"
            case "barrier_in":
                self._exchange()
                return "cmd=barrier_out rc=0"
            case "finalize":
                return "cmd=finalize_ack rc=0"
            case "abort":
                return None
        return f"cmd={request.get('cmd', '')}_result rc=-1 msg=unknown_command"

    def serve(self, connection: socket.socket) -> None:
        """Answer requests until the library disconnects or ``gather`` fails."""
        lines = LineBuffer()
        with connection:
            try:
                while data := connection.recv(65536):
                    for line in lines.feed(data):
                        answer = self.answer(line.decode("ascii", "replace"))
                        if answer is not None:
                            connection.sendall(answer.encode() + b"\n")
            except (OSError, WireError):
                return  # The library has closed its end.
            except Exception as error:
                self.failure = error

    def _exchange(self) -> None:
        """The PMI barrier: afterwards all ranks know what was put before it."""
        puts, self._own_puts = self._own_puts, {}
        own = "\n".join(f"{key}={value}" for key, value in puts.items())
        for data in self._gather(own.encode()):
            for line in data.decode().splitlines():
                key, _, value = line.partition("=")
                self._values[key] = value


def words(line: str) -> dict[str, str]:
    """``cmd=put key=a value=b`` as a mapping; values hold no spaces."""
    pairs = (word.partition("=") for word in line.split(" ") if word)
    return {key: value for key, _, value in pairs}


def process_mapping(host_keys: Sequence[str]) -> str:
    """PMI_process_mapping: blocks of (first node, number of nodes, ranks on each).

    Nodes are numbered in the order of their first ranks.
    """
    nodes = {
        host_key: number for number, host_key in enumerate(dict.fromkeys(host_keys))
    }
    blocks: list[tuple[int, int]] = []
    for host_key in host_keys:
        node = nodes[host_key]
        if blocks and blocks[-1][0] == node:
            blocks[-1] = node, blocks[-1][1] + 1
        else:
            blocks.append((node, 1))
    text = ",".join(f"({node},1,{count})" for node, count in blocks)
    return f"(vector,{text})"


@contextmanager
def serving(manager: ProcessManager, rank: int, size: int) -> Iterator[None]:
    """Point the MPI library of this process to ``manager`` while it is initialised.

    The manager continues to serve afterwards. The environment is restored on exit, so
    that children of this process do not act as MPI ranks.
    """
    ours, theirs = socket.socketpair()
    # The library owns its end, and closes it itself.
    descriptor = theirs.detach()
    threading.Thread(
        target=manager.serve, args=(ours,), daemon=True, name="tfcluster-pmi"
    ).start()
    variables = {
        "PMI_FD": str(descriptor),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
    }
    with _environment(variables):
        yield


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables, and hide the variables of any other process manager."""
    before = {
        name: value for name, value in os.environ.items() if name.startswith(_FOREIGN)
    }
    for name in before:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)
