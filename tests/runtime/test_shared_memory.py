"""Ranks as processes that are connected by shared memory, sockets or both."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit.ranks import PROGRAMS, ROOT, held_addresses

EXCHANGES = 150
HOST_KEYS = [
    ["a", "a"],
    pytest.param(["a", "a", "a", "a"], marks=pytest.mark.slow),
    pytest.param(["a", "b", "a", "b"], marks=pytest.mark.slow),
    ["a", "a", "a", "b", ""],
]


@pytest.mark.parametrize("host_keys", HOST_KEYS, ids="-".join)
def test_many_exchanges_of_all_sizes(host_keys: list[str]) -> None:
    seed = 7
    with held_addresses(len(host_keys)) as addresses:
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, str(PROGRAMS / "many_exchanges.py")),
                    *(str(rank), str(seed), str(EXCHANGES), json.dumps(host_keys)),
                    *addresses,
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(len(host_keys))
        ]
        try:
            said = [rank.communicate(timeout=60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    together: dict[str, list[int]] = {}
    for number, host_key in enumerate(host_keys):
        together.setdefault(host_key or str(number), []).append(number)
    groups = tuple(tuple(group) for group in together.values())
    for rank, (out, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err
        assert out.strip() == str(groups)
