"""Asks a ps to start TensorFlow's server, which Keras does not need.

That server executes anything that anyone sends, so its port stays closed until a
training task of the run has proven that it knows the run's token. The connection is the
request; the ps answers with one byte once its server listens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tfcluster.runtime.errors import CollectiveError, CollectiveTimeoutError
from tfcluster.runtime.net.rendezvous import dial_until
from tfcluster.runtime.parameter_server.server_socket import STARTED, member

_TRY_S = 5.0
_START_S = 60.0


def request_server(
    addresses: Sequence[str], index: int, *, rank: int, size: int, token: bytes
) -> bool:
    """Whether ps ``index`` has started its server; False if it does not answer now.

    ``addresses`` are the addresses of all ps tasks' own services, and ``size`` is the
    number of training tasks. Raises CollectiveError if the ps could not start the
    server.
    """
    identity = member(index, rank, size, token, asks=True)
    names = (f"rank {rank}", f"ps:{index}")
    try:
        deadline = time.monotonic() + _TRY_S
        connection = dial_until(deadline, identity, 0, addresses[index], names)
    except CollectiveTimeoutError:
        return False
    with connection:
        try:
            connection.settimeout(_START_S)
            answer = connection.recv(1)
        except OSError:
            return False
    if answer != STARTED:
        raise CollectiveError(
            f"ps:{index} could not start TensorFlow's server; its log has the reason"
        )
    return True
