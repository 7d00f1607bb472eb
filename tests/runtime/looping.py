"""Ranks as processes without TensorFlow that exchange until something happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.kit import PYTHONPATH
from tests.kit.ranks import PROGRAMS, TOKEN, held_addresses

LONG_S = 50.0


class Processes:
    """Ranks as processes that exchange vectors until something happens."""

    def __init__(
        self, addresses: list[str], words: list[str], options: dict[str, object]
    ) -> None:
        self._children: list[int] = []
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(PROGRAMS / "looping_rank.py"), *words],
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "TFCLUSTER_TOKEN": TOKEN.hex(),
                    "TFCLUSTER_RUNTIME": json.dumps(options),
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": addresses},
                            "task": {"type": "worker", "index": rank},
                        }
                    ),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(len(addresses))
        ]

    def wait_until_under_way(self, *ranks: int) -> None:
        """Wait for these ranks, or for all if none are given."""
        for rank in [self.ranks[r] for r in ranks] or self.ranks:
            assert rank.stdout is not None
            while (line := rank.stdout.readline()) != "under way\n":
                assert line, rank.communicate(timeout=LONG_S)
                self._children.append(int(line))

    def failure(self, rank: int) -> tuple[float, str, str]:
        """The time of a rank's failure, the error, and the rank's standard error."""
        out, err = self.ranks[rank].communicate(timeout=LONG_S)
        found = re.fullmatch(r"failed (\S+) (.*)\n", out)
        assert found, (out, err)
        assert self.ranks[rank].returncode == 3
        return float(found[1]), found[2], err

    def end(self) -> None:
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()


@contextmanager
def processes(
    size: int, length: int, *deed: str, **options: object
) -> Iterator[Processes]:
    """Start ``size`` ranks with these runtime options; see ``looping_rank.py``."""
    words = [str(length), *deed]
    with held_addresses(size) as addresses:
        started = Processes(addresses, words, options)
        try:
            yield started
        finally:
            started.end()
