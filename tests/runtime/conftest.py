"""One warm interpreter and one fork server for all tests: importing TensorFlow takes
seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kit.machine import title
from tests.kit.ranks import end_fork_server, keep_baselines_in, share_fork_server_in
from tests.runtime.harness import WarmInterpreter, adopting_orphans, kill_leftovers
from tests.runtime.keras_jobs import Compared, Outcomes, outcomes_in


@pytest.fixture(scope="package")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmInterpreter]:
    with adopting_orphans():
        yield from _warm(tmp_path_factory)


def _warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmInterpreter]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name in [name for name in env if name.startswith(("TF_", "TFCLUSTER_"))]:
        del env[name]
    interpreter = WarmInterpreter(env, tmp_path_factory.mktemp("warm") / "log")
    assert interpreter.hear() == {"type": "ready"}
    assert title(interpreter.process.pid) == "tfcluster: warm"
    yield interpreter
    assert interpreter.close() == 0


@pytest.fixture(autouse=True)
def _no_task_outlives_its_test() -> Iterator[None]:
    yield
    kill_leftovers()


@pytest.fixture(scope="session", autouse=True)
def _fork_server_and_baselines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    folder = tmp_path_factory.getbasetemp()
    in_one_of_several = "PYTEST_XDIST_WORKER" in os.environ
    share_fork_server_in(folder.parent if in_one_of_several else folder)
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    keep_baselines_in(cache.mkdir("baselines") if cache else None)
    yield
    end_fork_server()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes_in(tmp_path_factory.mktemp("cases"))


@pytest.fixture
def compared(outcomes: Outcomes, request: pytest.FixtureRequest) -> Compared:
    """One case on one number of ranks; see ``at_each_size``."""
    return outcomes.at(*request.param)
