"""An unmodified script's tf.data pipelines are computed by the run's data tasks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.kit.ranks import Job, run_jobs
from tests.kit.written import Written
from tests.runtime.harness import WarmInterpreter, held_ports
from tfcluster.runtime.context import Context
from tfcluster.runtime.task.tf_data_service import journal_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(600),
]

ROWS, BATCH, EPOCHS = 50, 8, 3


@contextmanager
def data_tasks(
    warm: WarmInterpreter, folder: Path, count: int
) -> Iterator[dict[str, str]]:
    """Run ``count`` data tasks; the environment that other tasks need to find them."""
    folder.mkdir()
    (folder / "WHO").write_text("1")
    with held_ports(1) as (port,):
        env = {
            "TF_GRPC_REUSE_PORT": "true",
            "TFCLUSTER_DATA_SERVICE": f"grpc://127.0.0.1:{port}",
            "TFCLUSTER_DATA_TASKS": str(count),
            "TFCLUSTER_RUN": folder.name,
        }
        tasks = []
        for index in range(count):
            named = {**env, "TFCLUSTER_TASK": f"data:{index}"}
            tasks.append(warm.start(["server"], folder, named))
            tasks[-1].wait_for_event("phase", phase="serving")
        yield env
        for task in tasks:
            os.kill(task.pid, signal.SIGTERM)
            assert task.end().status == 0
        assert not journal_of(Context(run=folder.name)).exists()


def job(folder: Path, name: str, size: int, env: Mapping[str, str], *cases: str) -> Job:
    runtime = {"TFCLUSTER_RUNTIME": "{}"}
    args = (str(folder / name), *cases)
    return Job(name, size, "data_tasks.py", args, {**env, **runtime})


def written(folder: Path, jobs: Sequence[Job]) -> Written:
    ended = run_jobs(folder, jobs, timeout_s=500)
    for ranks in ended.values():
        assert set(ranks.exit_codes) == {0}, ranks.outputs
    return Written(folder, ended)


@pytest.fixture(scope="module")
def found(warm: WarmInterpreter, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("data-tasks")
    with data_tasks(warm, folder / "one-task", 1) as one:
        jobs = [
            job(folder, "here", 2, {}, "fit", "loop", "structures"),
            job(folder, "one", 2, one, "fit", "loop", "structures", "kept_here"),
            job(folder, "alone", 1, {}, "passes", "reasons"),
        ]
        return written(folder, jobs)


@pytest.fixture(scope="module")
def more(warm: WarmInterpreter, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The jobs that only slow tests need."""
    folder = tmp_path_factory.mktemp("more-data-tasks")
    with (
        data_tasks(warm, folder / "two-tasks", 2) as two,
        data_tasks(warm, folder / "own-task", 1) as own,
    ):
        jobs = [
            job(folder, "two", 2, two, "fit", "loop"),
            job(folder, "single", 1, own, "loop"),
        ]
        return written(folder, jobs)


@pytest.fixture(params=["one", pytest.param("two", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest) -> tuple[str, Written]:
    """The job of ranks whose data come from so many data tasks."""
    name = "found" if request.param == "one" else "more"
    ranks: Written = request.getfixturevalue(name)
    return request.param, ranks


@pytest.mark.parametrize("case", ["fit", "loop", "structures"])
def test_one_reader_gives_what_every_rank_reads_by_itself(
    found: Written, case: str
) -> None:
    for there, here in zip(found.of("one", case), found.of("here", case), strict=True):
        assert there.keys() == here.keys()
        for key in here.keys() - {"makers"}:
            np.testing.assert_array_equal(there[key], here[key], err_msg=key)


def test_ranks_compute_their_elements_where_no_data_task_does(found: Written) -> None:
    for values in found.of("here", "fit"):
        assert values["makers"].tolist() == [0]


def test_the_data_tasks_compute_the_elements(served: tuple[str, Written]) -> None:
    name, found = served
    for values in found.of(name, "fit"):
        assert values["makers"].tolist() == [1]


def test_every_element_is_used_once_in_an_epoch(served: tuple[str, Written]) -> None:
    name, found = served
    ranks = found.of(name, "fit")
    for epoch in range(EPOCHS):
        for values in ranks:
            # Every rank sees whole batches.
            seen = values[f"seen_{epoch}"].tolist()
            assert sorted(seen) == list(range(ROWS)), name
    orders = [ranks[0][f"seen_{epoch}"].tolist() for epoch in range(EPOCHS)]
    assert orders[0] != orders[1] != orders[2]
    for values in ranks[1:]:
        np.testing.assert_array_equal(values["w0"], ranks[0]["w0"])


def test_loops_use_every_element_once_in_a_pass(served: tuple[str, Written]) -> None:
    name, found = served
    ranks = found.of(name, "loop")
    for epoch in range(2):
        first = ranks[0][f"first_{epoch}"]
        for values in ranks[1:]:
            np.testing.assert_array_equal(values[f"first_{epoch}"], first)
        rest = np.concatenate([values[f"rest_{epoch}"] for values in ranks])
        assert set(first.tolist()) | set(rest.tolist()) == set(range(ROWS))


@pytest.mark.slow
def test_one_rank_alone_goes_over_all_of_them(more: Written) -> None:
    (values,) = more.of("single", "loop")
    for epoch in range(2):
        seen = [*values[f"first_{epoch}"], *values[f"rest_{epoch}"]]
        assert sorted(seen) == list(range(ROWS))


def test_a_generator_stays_with_the_ranks_and_they_say_so(found: Written) -> None:
    for values in found.of("one", "kept_here"):
        assert values["makers"].tolist() == [0]
    chief = found.jobs["one"].outputs[0]
    assert chief.count("computed by every rank, not by the data tasks") == 1
    assert "it calls Python" in chief


@pytest.mark.parametrize("name", ["seeded", "common", "twice", "fixed", "plain"])
def test_a_pass_elsewhere_has_the_order_that_it_has_here(
    found: Written, name: str
) -> None:
    (values,) = found.of("alone", "passes")
    np.testing.assert_array_equal(values[f"{name}_there"], values[f"{name}_here"])


def test_passes_differ_where_they_do_here(found: Written) -> None:
    (values,) = found.of("alone", "passes")
    repeated = values["repeated_there"]
    # The first pass has the same order as here; later passes have different ones.
    np.testing.assert_array_equal(repeated[0], values["repeated_here"][0])
    orders = {tuple(each.tolist()) for each in repeated}
    assert len(orders) == 3
    assert all(sorted(each) == sorted([*range(9)] * 2) for each in orders)
    assert len(set(values["draws"].tolist())) == 3


@pytest.mark.parametrize(
    ("pipeline", "one", "two"),
    [
        ("plain", "None", "None"),
        ("python", "it calls Python", "it calls Python"),
        ("variable", "it uses a variable", "it uses a variable"),
        ("take", "None", "cannot share take"),
        ("remainder", "None", "drop a remainder"),
        ("files", "None", "None"),
        ("zip", "None", "cannot share zip"),
    ],
)
def test_what_data_tasks_cannot_compute(
    found: Written, pipeline: str, one: str, two: str
) -> None:
    (values,) = found.of("alone", "reasons")
    assert one in str(values[f"{pipeline}_1"])
    assert two in str(values[f"{pipeline}_2"])
