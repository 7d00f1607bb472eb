"""The same programs on four hosts with each backend: SSH, Slurm, Grid Engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit import SITE
from tests.rigs.testbed import Testbed
from tests.rigs.testbed.layout import REPOSITORY
from tests.schedulers.sge.site import USER, Site, site_on

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

TRAINING_S = 200.0
PROGRAM = REPOSITORY / "tests" / "runtime" / "programs" / "final_weights.py"
DIGITS = REPOSITORY / "examples" / "digits.py"
EPOCHS = 1
"""23 steps; in a longer training the rounding errors would grow too large."""


@pytest.fixture
def site(testbed: Testbed, request: pytest.FixtureRequest) -> Iterator[Site]:
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    yield from site_on(testbed, testbed.accounts[USER].home / name, sys.executable)
    testbed.login.run(("scancel", f"--user={USER}"), user=USER)


def launched(site: Site, config: str, *words: str) -> str:
    """Launch an example configuration, which must succeed; returns its output."""
    settings = ("--set", f"env.PYTHONPATH={SITE}")
    file = str(REPOSITORY / "configs" / config)
    launch = site.start("launch", file, *settings, *words)
    code, said = site.finish(launch, TRAINING_S)
    assert code == 0, said
    assert site.status()["state"] == "succeeded"
    return said


def hosts_of(site: Site) -> set[str]:
    return {task["host"] for task in site.status()["tasks"]}


@pytest.mark.parametrize(
    "backend",
    [
        "ssh",
        pytest.param("slurm", marks=pytest.mark.exhaustive),
        pytest.param("sge", marks=pytest.mark.exhaustive),
    ],
)
def test_a_coordinator_drives_workers_and_ps(site: Site, backend: str) -> None:
    """TensorFlow's ParameterServerStrategy with the cluster of TF_CONFIG."""
    choice = ("--set", f"backend={backend}")
    said = launched(site, "parameter-server.yaml", *choice, "--", "--steps", "40")
    for ps in range(2):
        assert f"/job:ps/replica:0/task:{ps}/" in said, said
    assert "40 steps by 3 workers" in said
    ends = {task["task"]: task["state"] for task in site.status()["tasks"]}
    servers = {"worker:0", "worker:1", "worker:2", "ps:0", "ps:1"}
    assert ends == {"chief:0": "succeeded", **dict.fromkeys(servers, "stopped")}
    assert len(hosts_of(site)) == 4
    site.nothing_is_left()


@pytest.fixture(scope="module")
def alone(testbed: Testbed) -> list[np.ndarray]:
    """The weights that a single process trains on one of the rig's hosts."""
    folder = testbed.accounts[USER].home / "alone"
    results, arguments = folder / "results", ("--epochs", str(EPOCHS))
    testbed.login.output(("mkdir", "-p", str(folder)), user=USER)
    script = (str(PROGRAM), str(results), str(DIGITS), *arguments)
    argv = (sys.executable, *script)
    testbed.login.output(argv, user=USER, cwd=folder, timeout_s=TRAINING_S)
    return weights(folder / "results-0.npz")


def weights(file: Path) -> list[np.ndarray]:
    with np.load(file) as found:
        return [found[f"w{index}"] for index in range(8)]


@pytest.mark.parametrize("backend", ["ssh", "slurm", "sge"])
def test_four_hosts_train_the_weights_of_one(
    site: Site, backend: str, alone: list[np.ndarray]
) -> None:
    results = site.folder / "results"
    command = f"python {PROGRAM} {results} {DIGITS} --epochs {EPOCHS}"
    output = ("--output", str(site.folder))
    launched(site, f"{backend}.yaml", "--set", f"command={command}", "--", *output)
    ranks = [weights(site.folder / f"results-{rank}.npz") for rank in range(4)]
    for other in ranks[1:]:
        for one, same in zip(ranks[0], other, strict=True):
            np.testing.assert_array_equal(one, same)
    for wanted, found in zip(alone, ranks[0], strict=True):
        np.testing.assert_allclose(
            found, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max())
        )
    assert len(hosts_of(site)) == 4
    site.nothing_is_left()


def test_hosts_may_have_unequal_numbers_of_ranks(site: Site) -> None:
    hosts = json.dumps([{"host": "node1", "slots": 3}, {"host": "node2", "slots": 1}])
    output = ("--output", str(site.folder))
    words = ("--set", f"hosts={hosts}", "--", "--epochs", str(EPOCHS), *output)
    launched(site, "ssh.yaml", *words)
    assert hosts_of(site) == {"node1", "node2"}
    site.nothing_is_left()
