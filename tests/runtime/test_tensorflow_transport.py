"""TensorFlow's collective ops as the transport.

A job runs when a test first needs its results.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.ranks import ROOT, Job, Jobs, Ranks
from tests.kit.time_limits import allow_s

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(300),
]

SIZE = 3
TRANSPORT = {
    "TFCLUSTER_RUNTIME": '{"transport": "tensorflow", "bucket_mb": 0.02}',
    "TF_GRPC_REUSE_PORT": "1",
}
ALONE = TRANSPORT | {
    "TFCLUSTER_STRATEGY": "none",
    "TFCLUSTER_RUNTIME": '{"transport": "tensorflow", "stall_timeout_s": 3}',
}
"""Nothing is injected: the program itself calls ``init``."""
PATIENT = TRANSPORT | {"TFCLUSTER_STRATEGY": "none"}
WARNING = PATIENT | {
    "TFCLUSTER_RUNTIME": '{"transport": "tensorflow", "stall_warning_s": 0.2}'
}
Values = Mapping[str, NDArray[Any]]
PROGRAM = "tensorflow_transport.py"
TRAINING = "tensorflow_transport_training.py"
WEIGHTS = "final_weights.py"
DIGITS = (str(ROOT / "examples" / "digits.py"), "--epochs", "3")


@dataclass(frozen=True)
class Outcomes:
    folder: Path
    jobs: Mapping[str, Ranks]

    def ended(self, job: str) -> Ranks:
        """A job's results; its ranks must have ended with the expected status."""
        found = self.jobs[job]
        expected = [0, 0, -9] if job == "early" else [0] * len(found.exit_codes)
        assert found.exit_codes == expected, (job, found.outputs)
        return found

    def said(self, job: str) -> list[dict[str, Any]]:
        """The last line of JSON of each rank that wrote one."""
        found = []
        for output in self.ended(job).outputs:
            lines = [line for line in output.splitlines() if line.startswith("{")]
            found += [json.loads(line) for line in lines[-1:]]
        return found

    @cached_property
    def ranks(self) -> list[Values]:
        assert self.ended("three")
        return [dict(np.load(self.folder / f"three-{r}.npz")) for r in range(SIZE)]

    @cached_property
    def one(self) -> Values:
        assert self.ended("one")
        return dict(np.load(self.folder / "one-0.npz"))

    def case(self, name: str) -> tuple[Values, list[Values]]:
        """The weights after a training, in one process and on each rank."""
        return _of_case(self.one, name), [_of_case(r, name) for r in self.ranks]


def _of_case(values: Values, name: str) -> Values:
    return {key: values[key] for key in values if key.startswith(f"{name}/w")}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("items")
    jobs = [
        Job("device", SIZE, PROGRAM, ("device",), TRANSPORT),
        Job("early", SIZE, PROGRAM, ("early",), PATIENT),
        Job("late_start", 2, PROGRAM, ("late_start",), WARNING),
        Job("late_init", 2, PROGRAM, ("late_init",), ALONE),
        Job("strategy", 2, PROGRAM, ("strategy",), ALONE),
        Job("configured", 2, PROGRAM, ("configured",), TRANSPORT),
        Job("three", SIZE, TRAINING, (str(folder / "three"),), TRANSPORT),
        Job("one", 1, TRAINING, (str(folder / "one"),)),
        Job("digits-2", 2, WEIGHTS, (str(folder / "digits-2"), *DIGITS), TRANSPORT),
        # The same job as in keras_jobs.py, so that both share one baseline.
        Job("digits-1", 1, WEIGHTS, (str(folder / "digits-1"), *DIGITS), keep=True),
    ]
    return Outcomes(folder, Jobs(folder, jobs, timeout_s=280))


def assert_as_one_process(outcomes: Outcomes, name: str) -> None:
    one, ranks = outcomes.case(name)
    assert one
    for rank in ranks:
        assert rank.keys() == one.keys()
        for key, value in one.items():
            np.testing.assert_allclose(rank[key], value, 1e-4, 1e-6, err_msg=key)
            np.testing.assert_array_equal(rank[key], ranks[0][key], err_msg=key)


@pytest.mark.slow
def test_digits_prints_what_one_process_prints(outcomes: Outcomes) -> None:
    figures = re.compile(r"(accuracy|loss): [\d.]+|validation .*")

    def printed(job: str) -> list[str]:
        return [m[0] for m in figures.finditer(outcomes.ended(job).outputs[0])]

    assert len(printed("digits-1")) > 5
    assert printed("digits-2") == printed("digits-1")


def test_tensorflow_starts_with_the_first_op_of_a_rank(outcomes: Outcomes) -> None:
    for rank in outcomes.said("configured"):
        assert rank == {"threads": 2, "devices": 2, "total": 3.0, "forked": 7}


def test_multiworkermirroredstrategy_and_we_in_one_process(
    outcomes: Outcomes,
) -> None:
    assert [rank["steps"] for rank in outcomes.said("strategy")] == [3, 3]


def test_after_an_op_it_is_too_late(outcomes: Outcomes) -> None:
    for rank in outcomes.said("late_init"):
        ((kind, text),) = rank["errors"]
        assert kind == "CollectiveError"
        assert "before any TensorFlow op" in text


def test_a_rank_that_traces_again_trains_on(outcomes: Outcomes) -> None:
    assert_as_one_process(outcomes, "retraced")
    assert [int(rank["retraced/again"]) for rank in outcomes.ranks] == [0, 1, 0]


def test_a_rank_that_dies_before_the_first_op_is_named(outcomes: Outcomes) -> None:
    said = outcomes.said("early")
    assert len(said) == SIZE - 1
    for rank in said:
        ((kind, text),) = rank["errors"]
        assert kind == "PeerLostError"
        assert text.startswith("rank 2 has left: its process ended")
        assert rank["seconds"] < allow_s(1)


def test_a_rank_that_is_late_for_the_first_op_is_named(outcomes: Outcomes) -> None:
    assert [rank["total"] for rank in outcomes.said("late_start")] == [4.0, 4.0]
    first, last = outcomes.ended("late_start").outputs
    assert re.search(
        r"tfcluster: rank 1 has not entered exchange 1: TensorFlow's first op "
        r"\(waiting for \d+ s\); it has not exchanged anything yet\n",
        first,
    )
    assert re.search(
        r"tfcluster: rank 0 has waited \d+ s for this rank to enter exchange 1: "
        r"TensorFlow's first op. It is here:\n(?s:.*)in late_start",
        last,
    )


def test_a_model_of_two_dtypes(outcomes: Outcomes) -> None:
    assert_as_one_process(outcomes, "mixed")
    one, _ = outcomes.case("mixed")
    assert {value.dtype.name for value in one.values()} == {"float32", "float64"}


@pytest.mark.parametrize("axis", range(4))
def test_uneven_tensors_along_any_axis(outcomes: Outcomes, axis: int) -> None:
    parts = []
    for rank in range(SIZE):
        shape = [30, 12, 7, 5]
        shape[axis] += 3 * rank if rank < 2 else -shape[axis]
        part = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        parts.append(part + 1000 * rank)
    expected = np.concatenate(parts, axis)
    for found in outcomes.ranks:
        np.testing.assert_array_equal(found[f"gathered/{axis}"], expected)


@pytest.mark.parametrize("case", ["few_rows", "many_rows"])
def test_embeddings_of_few_and_of_many_rows(outcomes: Outcomes, case: str) -> None:
    assert_as_one_process(outcomes, case)


def test_tensorflow_knows_each_rank_by_its_task(outcomes: Outcomes) -> None:
    assert [rank["own device"] for rank in outcomes.said("device")] == [
        f"/job:{task}/device:CPU:0"
        for task in (
            "chief/replica:0/task:0",
            "worker/replica:0/task:0",
            "worker/replica:0/task:1",
        )
    ]


def test_hints_are_those_that_tensorflow_compares_with() -> None:
    # TensorFlow takes an unknown hint for a ring.
    program = """
import tensorflow as tf
from tensorflow.python.ops import collective_ops
from tfcluster.runtime.collective.transports.tensorflow import devices

kinds = tf.distribute.experimental.CommunicationImplementation
for kind, hint in (kinds.NCCL, devices.NCCL), (kinds.RING, devices.RING):
    with tf.Graph().as_default() as graph:
        collective_ops.all_reduce_v2(
            tf.constant(1.0), 2, 1, 1, communication_hint=kind.value
        )
    reduced = [op for op in graph.get_operations() if op.type == "CollectiveReduceV2"]
    print(reduced[0].get_attr("communication_hint").decode(), hint)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["nccl", "nccl", "ring", "ring"]
