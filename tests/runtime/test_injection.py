"""Programs that cannot be trained on all ranks, and the seeds of all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from tests.kit.ranks import ROOT, Job, Jobs, Ranks
from tfcluster.plan.model import Strategy
from tfcluster.runtime.collective import CollectiveError
from tfcluster.runtime.context import Context
from tfcluster.runtime.process_identity import RankInfo
from tfcluster.runtime.task.injection import common_seed, refuse_other_backends

TRAININGS = [
    "other_model",
    "other_shapes",
    "leaves",
    "never_trains",
]

SERVED = {"TFCLUSTER_STRATEGY": "parameter_server"}
CHIEF_PRINTS = {"TFCLUSTER_RUNTIME": '{"chief_only": ["print"]}'}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    return Jobs(
        tmp_path_factory.mktemp("failing"),
        [
            *(Job(name, 3, "failing.py", (name,)) for name in TRAININGS),
            Job("second_model", 2, "failing.py", ("second_model",), SERVED, 1),
            Job("unseeded", 3, "unseeded.py"),
            Job("chief prints", 2, "chief_prints.py", env=CHIEF_PRINTS),
        ],
        timeout_s=170,
    )


@pytest.mark.tensorflow
@pytest.mark.timeout(180)
def test_a_second_model_has_its_own_proof_to_give(jobs: Mapping[str, Ranks]) -> None:
    ranks = jobs["second_model"]
    assert ranks.exit_codes == [1, 1]
    for output in ranks.outputs:
        assert "the first model was trained" in output
        assert "NotDistributedError: the script was not distributed" in output


@pytest.mark.tensorflow
def test_other_models_are_named_on_every_rank(jobs: Mapping[str, Ranks]) -> None:
    ranks = jobs["other_model"]
    assert ranks.exit_codes == [1, 1, 1]
    for output in ranks.outputs:
        assert "CollectiveMismatchError" in output
        assert "rank 0, 2: sequential/dense/kernel float32 (3, 4)" in output
        assert "rank 1: sequential/dense/kernel float32 (3, 5)" in output


@pytest.mark.tensorflow
def test_batches_of_other_shapes_are_named_on_every_rank(
    jobs: Mapping[str, Ranks],
) -> None:
    ranks = jobs["other_shapes"]
    assert ranks.exit_codes == [1, 1, 1]
    for output in ranks.outputs:
        assert "rank 0, 2: (4, 3); rank 1: (4, 4)" in output
        assert "These are the shapes of their batches" in output


@pytest.mark.tensorflow
def test_who_still_trains_learns_who_has_left(jobs: Mapping[str, Ranks]) -> None:
    ranks = jobs["leaves"]
    assert ranks.exit_codes == [1, 0, 1]
    for rank in (0, 2):
        assert "the ranks took different numbers of steps" in ranks.outputs[rank]
        assert "rank 1 ended its program" in ranks.outputs[rank]


@pytest.mark.tensorflow
def test_a_program_that_never_trains_is_left_to_its_agent(
    jobs: Mapping[str, Ranks],
) -> None:
    ranks = jobs["never_trains"]
    assert ranks.exit_codes == [0, 0, 0]
    assert "warning" not in ranks.outputs[0]
    assert all("prediction (12, 1)" in output for output in ranks.outputs)


@pytest.mark.tensorflow
def test_ranks_draw_the_same_numbers(jobs: Mapping[str, Ranks]) -> None:
    drawn = [
        json.loads(line)
        for output in jobs["unseeded"].outputs
        for line in output.splitlines()
        if line.startswith("{")
    ]
    for own in zip(*(found.pop("own") for found in drawn), strict=True):
        assert len({*own}) == 3
    assert drawn[0] == drawn[1] == drawn[2]
    assert drawn[0]["unseeded"] != drawn[0]["seeded"]
    with_seeds, without_global_seed = drawn[0]["own_seeds"]
    assert with_seeds == without_global_seed
    for kind in ("new", "helpers"):
        numbers = np.ravel(drawn[0][kind])
        assert len({*numbers}) == len(numbers) > 5


_COLD = """
import sys
from tfcluster.runtime.task import injection
from tfcluster.runtime.context import Context
from tfcluster.runtime.process_identity import RankInfo
from tfcluster.plan.model import Strategy
injection.install(Context(
    rank_info=RankInfo(rank=1, size=2), strategy=Strategy.COLLECTIVE,
    addresses=("127.0.0.1:1", "127.0.0.1:2"), token=b"x",
))
assert not {"numpy", "tensorflow", "keras"} & sys.modules.keys()
import keras
print(keras.Model.fit.__wrapped__.__name__)
"""


@pytest.mark.tensorflow
def test_keras_is_hooked_when_the_program_imports_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COLD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=55,
    )
    assert done.stdout == "fit\n"


def test_other_backends_of_keras_are_refused() -> None:
    refuse_other_backends("tensorflow")
    with pytest.raises(CollectiveError, match="KERAS_BACKEND is 'jax'"):
        refuse_other_backends("jax")


def context(token: bytes, attempt: int = 0) -> Context:
    return Context(
        rank_info=RankInfo(rank=0, size=2),
        token=token,
        attempt=attempt,
        strategy=Strategy.COLLECTIVE,
    )


def test_every_run_and_attempt_has_a_seed_of_its_own() -> None:
    seeds = [
        common_seed(context(b"a")),
        common_seed(context(b"b")),
        common_seed(context(b"a", attempt=1)),
    ]
    assert len(set(seeds)) == 3
    assert common_seed(context(b"a")) == seeds[0]


_LAZY = """
import sys
import tfcluster.runtime as tfc
assert tfc.rank() == 0 and tfc.size() == 1 and not tfc.is_initialized()
assert issubclass(tfc.PeerLostError, tfc.CollectiveError)
assert "allreduce" in dir(tfc)
assert "tensorflow" not in sys.modules
try:
    tfc.no_such_name
except AttributeError as error:
    print(error)
"""


def test_the_api_does_not_import_tensorflow_before_it_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAZY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "has no attribute 'no_such_name'" in done.stdout


@pytest.mark.tensorflow
def test_what_is_printed_by_the_chief_alone(jobs: Mapping[str, Ranks]) -> None:
    ranks = jobs["chief prints"]
    assert ranks.exit_codes == [0, 0]
    chief, other = ranks.outputs
    for words in ("all of it", "as an error"):
        assert words in chief
        assert words not in other
    assert "WARNING:root:careful" in other
    assert (ranks.folder / "notes.txt").read_text() == "kept tensorflow\n" * 2
