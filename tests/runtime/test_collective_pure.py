"""Keys, buckets, sparse rows and padding, without TensorFlow."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tfcluster.runtime.collective.transports.tensorflow.collective_keys import (
    GROUP_KEYS,
    NAMED_KEYS,
    CollectiveKeys,
    instance_key,
)
from tfcluster.runtime.collective.transports.tensorflow.failures import (
    reason_of,
    translated,
)
from tfcluster.runtime.collective.transports.tensorflow.gpus import (
    identities,
    obstacle,
)
from tfcluster.runtime.collective.transports.tensorflow.padding import padded, unpadded

DEVICES = ["/job:worker/task:0/CPU:0", "/job:worker/task:1/CPU:0"]


def test_keys_are_of_a_range_that_tensorflow_does_not_reach() -> None:
    keys = CollectiveKeys()
    group = keys.group_key(DEVICES)
    assert group == GROUP_KEYS.start > 1_000_000
    assert instance_key(["gradients"]) in NAMED_KEYS
    assert GROUP_KEYS.stop <= NAMED_KEYS.start
    assert NAMED_KEYS.stop <= 1 << 31


def test_a_group_has_one_key_whatever_the_order_of_its_devices() -> None:
    keys = CollectiveKeys()
    first = keys.group_key(DEVICES)
    assert keys.group_key(reversed(DEVICES)) == first
    assert keys.group_key(DEVICES[:1]) == first + 1
    assert CollectiveKeys(group_key_start=7).group_key(DEVICES) == 7


@pytest.fixture
def _hasty_threads() -> Iterator[None]:
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_hasty_threads")
def test_threads_get_one_key_for_a_group() -> None:
    keys = CollectiveKeys()
    found: list[tuple[int, int]] = []
    begin = threading.Barrier(8)

    def ask() -> None:
        begin.wait(10)
        for number in range(300):
            found.append((number, keys.group_key([*DEVICES, str(number)])))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 2400
    assert len(set(found)) == len({key for _, key in found}) == 300


def test_a_copy_goes_on_from_where_it_was_made() -> None:
    keys = CollectiveKeys()
    group = keys.group_key(DEVICES)
    copied = copy.deepcopy(keys)
    assert copied.group_key(DEVICES) == group
    assert copied.group_key(DEVICES[:1]) == keys.group_key(DEVICES[:1]) == group + 1


def test_keys_say_what_is_exchanged_and_count_nothing() -> None:
    words = ["gradients of adam", "dense/kernel float32 (64, 10)"]
    key = instance_key(words)
    assert instance_key(words) == key
    assert instance_key([*words, "x"]) != key
    # Another process has a different hash seed.
    program = (
        "from tfcluster.runtime.collective.transports.tensorflow.collective_keys "
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


@pytest.mark.parametrize("shape", [(2,), (2, 3), (2, 3, 4), (2, 1, 4, 2), (0, 3)])
def test_rows_are_padded_with_zeros_and_cut_again(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.int32)
    longer = padded(array, 5)
    assert longer.shape == (5, *shape[1:])
    assert longer.dtype == np.int32
    np.testing.assert_array_equal(longer[: shape[0]], array)
    assert not longer[shape[0] :].any()
    assert padded(array, shape[0]) is array
    both = np.concatenate([longer, padded(2 * np.ones_like(array[:1]), 5)])
    first, second = unpadded(both, [shape[0], min(1, shape[0])])
    np.testing.assert_array_equal(first, array)
    assert len(second) == min(1, shape[0])


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match="scalar"):
        padded(np.array(1), 2)
    with pytest.raises(ValueError, match="3 rows do not fit into 2"):
        padded(np.ones(3), 2)
    with pytest.raises(ValueError, match="5 rows are not 2 equal parts"):
        unpadded(np.ones(5), [1, 1])
