"""One of several ranks without TensorFlow, whose exchanges have many sizes.

``argv``: rank, seed, number of exchanges, host keys (a JSON list), addresses. All
results are checked. The ranks pause at random, so that each is late at times.
"""

from __future__ import annotations

import json
import random
import sys
import time

import numpy as np

from tfcluster.runtime.collective.transports.base import ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.rendezvous import Member

TOKEN = bytes(range(32))


def main(rank: int, seed: int, count: int, host_keys: list[str], *at: str) -> None:
    size = len(host_keys)
    transport = HostTransport(Member(rank, size, TOKEN), at, host_key=host_keys[rank])
    common, own = random.Random(seed), random.Random(seed + 1000 + rank)
    for number in range(count):
        length = int(10 ** common.uniform(0, 6.2))
        kind = common.randrange(4)
        if own.random() < 0.1:
            time.sleep(own.choice([0.0001, 0.001, 0.01]))
        if kind < 2:
            dtype = common.choice(["float32", "int64", "uint8"])
            vector = (np.arange(length) % 7 + rank + number % 5).astype(dtype)
            if kind:
                transport.allreduce(vector, ReduceOp.SUM)
            else:
                # The same result, from a separate source array.
                source, vector = vector, np.empty_like(vector)
                before = source.copy()
                transport.allreduce(vector, ReduceOp.SUM, source)
                np.testing.assert_array_equal(source, before)
            whole = np.arange(length) % 7 + number % 5
            expected = (whole * size + size * (size - 1) // 2).astype(dtype)
            np.testing.assert_array_equal(vector, expected)
        elif kind == 2:
            found = transport.allgather(bytes([rank, number % 251]) * (length * rank))
            for peer, data in enumerate(found):
                assert data == bytes([peer, number % 251]) * (length * peer)
        else:
            transport.allgather(b"")
    transport.close()
    print(transport._groups)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]), int(words[1]), int(words[2]), json.loads(words[3]), *words[4:])
