"""Keys, buckets, sparse rows and padding, without TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tfcluster.runtime.collective.transports.tensorflow.devices import (
    GROUP_KEYS,
    NAMED_KEYS,
    identities,
    instance_key,
    obstacle,
)
from tfcluster.runtime.collective.transports.tensorflow.failures import (
    reason_of,
    translated,
)


def test_keys_are_of_a_range_that_tensorflow_does_not_reach() -> None:
    assert GROUP_KEYS.start > 1_000_000
    assert instance_key(["gradients"]) in NAMED_KEYS
    assert GROUP_KEYS.stop <= NAMED_KEYS.start
    assert NAMED_KEYS.stop <= 1 << 31


def test_keys_say_what_is_exchanged_and_count_nothing() -> None:
    words = ["gradients of adam", "dense/kernel float32 (64, 10)"]
    key = instance_key(words)
    assert instance_key(words) == key
    assert instance_key([*words, "x"]) != key
    # Another process has a different hash seed.
    program = (
        "from tfcluster.runtime.collective.transports.tensorflow.devices "
        "import instance_key\n"
        f"print(instance_key({words!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == key


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        ("DEADLINE_EXCEEDED", "{{x}} late. [Op:A]", "CollectiveTimeoutError", ": late"),
        (
            "DEADLINE_EXCEEDED",
            "Collective ops is aborted by: rank 0 has waited 3 s\nIt could be",
            "CollectiveTimeoutError",
            "in time: rank 0 has waited 3 s",
        ),
        ("UNAVAILABLE", "broken\nand more", "PeerLostError", "a rank has left: broken"),
        (
            "UNAVAILABLE",
            "x\nremote target /job:b/replica:0/task:0 y",
            "P",
            "rank 1 has",
        ),
        (
            "CANCELLED",
            "remote target /job:a/replica:0/task:0 remote target /job:b/replica:0",
            "P",
            "rank 0 has left",
        ),
        ("UNAVAILABLE", "x\nremote target /job:z/replica:0/task:9", "P", "left: x"),
        ("INVALID_ARGUMENT", "Shape mismatch", "CollectiveError", "Shape mismatch"),
    ],
)
def test_errors_of_tensorflow_become_ours(
    status: str, text: str, kind: str, words: str
) -> None:
    ranks = ["/job:a/replica:0/task:0", "/job:b/replica:0/task:0"]
    error = translated(status, text, ranks)
    assert type(error).__name__.startswith(kind)
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Collective ops failed\nmore", "Collective ops failed"),
        ("it failed [[{{node a/b}}]] [Op:f]", "it failed"),
        (
            "Graph execution error:\n\nDetected at node a/b defined at (most recent):\n"
            '  File "train.py", line 3, in <module>\n\nValueError: bad row\n\n',
            "ValueError: bad row",
        ),
        ("Graph execution error:", "Graph execution error:"),
        ("", ""),
    ],
)
def test_the_reason_in_a_message_of_tensorflow(text: str, reason: str) -> None:
    assert reason_of(text) == reason


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([["a 0"], ["a 1"]], ""),
        ([["a 0"], ["b 0"]], ""),
        ([["a 0", "a 1"], ["a 2"], ["b 0"]], ""),
        ([["a 0"], ["b 0"], ["a 0"]], "rank 0 and rank 2 share GPU 0 of a"),
        ([["a 0", "a 1"], ["a 1", "a 0"]], "rank 0 and rank 1 share GPU 1 of a"),
        ([["a 0"], []], "rank 1 has no GPU that TensorFlow can use"),
        ([[], []], "rank 0 has no GPU that TensorFlow can use"),
    ],
)
def test_nccl_needs_a_gpu_of_its_own_on_each_rank(
    gpus: list[list[str]], why: str
) -> None:
    assert obstacle(gpus) == why


@pytest.mark.parametrize(
    ("numbers", "visible", "found"),
    [
        ([0, 1], None, ("h 0", "h 1")),
        ([0], "3", ("h 3",)),
        # The program has hidden the first one by itself.
        ([1], "2,5", ("h 5",)),
        ([0], "GPU-8f,GPU-9a", ("h GPU-8f",)),
        ([], "", ()),
        ([0], "-1", ("h -1",)),
    ],
)
def test_gpus_have_names_in_the_whole_cluster(
    numbers: list[int], visible: str | None, found: tuple[str, ...]
) -> None:
    assert identities("h", numbers, visible) == found
