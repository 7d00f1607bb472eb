"""Fixtures for all tests, and the order in which test files run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.kit import SITE

pytest_plugins = ("tests.rigs.testbed.fixtures",)

# With this variable, which turns off .pyc files, each of the thousand programs that
# tests start would compile all of tfcluster, and each process of pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(SITE), *filter(None, _paths)])
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background like this, and programs inherit it.
    # Tests find out what an interrupt does.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TESTS = Path(__file__).parent
_LONGEST_FIRST = (
    "runtime/test_partition.py",
    "submit/test_outages_rig.py",
    "runtime/test_api_collectives.py",
    "verify/test_verify.py",
    "schedulers/ssh/test_faults.py",
    "runtime/test_graph_steps.py",
    "runtime/test_shard_optimizer.py",
    "schedulers/ssh/test_rig.py",
    "runtime/test_parameter_server.py",
    "runtime/test_keras_models.py",
    "schedulers/slurm/test_rig.py",
    "runtime/test_keras_inputs.py",
    "runtime/test_shards.py",
    "schedulers/sge/test_rig.py",
    "interruptions/test_trials.py",
    "runtime/test_divided_tables.py",
    "submit/test_programs_rig.py",
    "api/test_function_call.py",
    "runtime/test_local_sgd.py",
    "test_tutorials_rig.py",
    "runtime/test_settings_before_import.py",
    "runtime/test_tensorflow_transport.py",
    "rigs/chaos/test_trials.py",
    "runtime/test_keras_callbacks.py",
    "runtime/test_keras_loops.py",
    "schedulers/ssh/test_collective_rig.py",
    "launch/test_transports.py",
    "test_docs.py",
    "benchmarks/test_peers.py",
    "schedulers/ssh/test_parameter_server_rig.py",
    "runtime/test_horovod.py",
    "runtime/test_keras_losses.py",
    "runtime/test_tf1_launched.py",
    "runtime/test_several_hosts.py",
    "runtime/test_data_tasks.py",
    "launch/test_explain.py",
    "schedulers/ssh/test_hosts.py",
    "runtime/test_bootstrap.py",
    "runtime/test_returnn.py",
    "runtime/test_keras_step_metrics.py",
    "runtime/test_tf1_scripts.py",
    "launch/test_shards.py",
    "runtime/test_keras_optimizers.py",
    "runtime/test_tf1_graph_builders.py",
    "launch/test_commands.py",
    "launch/test_lost_ps_tasks.py",
)
"""Files that take half a minute or more. They run first, because a process that began
one of them last would still be running it when all others are done. Files that start
rigs of hosts are not adjacent: a single one of them keeps a small machine busy."""
OWN_PROCESS = "TFCLUSTER_TESTS_IMPORT_TENSORFLOW"
"""Set in a process that runs only tests that import TensorFlow."""
_PLACES = {_TESTS / name: place for place, name in enumerate(_LONGEST_FIRST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.path, len(_PLACES)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Keep TensorFlow out of the process that runs the tests.

    Its import sets environment variables that every program started later inherits, so
    a test that imports it makes other tests fail.
    """
    yield
    if "tensorflow" in sys.modules and OWN_PROCESS not in os.environ:
        pytest.fail(
            "the test, its fixtures or its module imported TensorFlow into the process "
            "that runs pytest: use a program in tests/runtime/programs instead",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def _handlers_of_signals_stay() -> Iterator[None]:
    """Fail the test that leaves a handler of a signal to the tests after it."""
    before = _handlers()
    yield
    assert _handlers() == before


def _handlers() -> dict[signal.Signals, object]:
    """By signal."""
    shared = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return {number: signal.getsignal(number) for number in shared}
