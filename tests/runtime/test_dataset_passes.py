"""Passes of custom loops over datasets: each has its own number."""

from __future__ import annotations

import subprocess
import sys

import pytest

# An address that Python gives again must not make two passes the same one.
PROGRAM = """
from types import SimpleNamespace
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration, DatasetPass
from tfcluster.runtime.keras.session import LoopState, Share

loop = LoopState(share=Share.undivided_batch(counts=True))
session = SimpleNamespace(loop=loop, rank=0, size=2, chief=True)
passes = DatasetIteration(session, None, None, None)
address = None
for _ in range(100):
    each = DatasetPass(session, passes, 3)
    again = id(each) == address
    address = id(each)
    each.next_bounds(7, divisible=True)
    if again:
        break
    del each
print(again, len(loop.taken), len({taken.dataset_pass for taken in loop.taken}))
"""


@pytest.mark.tensorflow
def test_an_address_that_python_gives_again_is_another_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    again, taken, passes = done.stdout.split()
    assert again == "True", done.stderr
    assert taken == passes
    assert int(taken) >= 2
