"""Plans must match the golden files. To update them, set TFCLUSTER_GOLDEN=write.

Read the diff before committing it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.json_formats import assert_format
from tests.kit.time_limits import allow_s

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))


def tfcluster_plan(folder: Path, config: str, *words: str) -> str:
    """The output of ``plan``, with HERE in place of the folder."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/home/u",
        "WANDB_API_KEY": "canary",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tfcluster", "plan", config, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    # The golden interpreter does not exist here, and this machine may have few cores.
    usual = re.compile("/opt/venv|^note: .* share .* cores? of localhost")
    other = [line for line in done.stderr.splitlines() if not usual.search(line)]
    assert other == []
    return done.stdout.replace(str(folder), "HERE").replace(sys.executable, "PYTHON")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["txt", "json"])
def test_plans_are_word_for_word(name: str, kind: str, tmp_path: Path) -> None:
    config = tmp_path / f"{name}.yaml"
    config.write_text((GOLDEN / config.name).read_text())
    for script in ("train.py", "evaluate.py", "train.sh"):
        (tmp_path / script).write_text("import tensorflow\n")
        (tmp_path / script).chmod(0o700)
    words = ["--json"] if kind == "json" else []
    said = tfcluster_plan(tmp_path, config.name, *words)
    assert "canary" not in said
    golden = GOLDEN / f"{name}.{kind}"
    if os.environ.get("TFCLUSTER_GOLDEN") == "write":
        golden.write_text(said)
    assert said == golden.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_json_has_what_the_contract_promises(name: str) -> None:
    plan = json.loads((GOLDEN / f"{name}.json").read_text())
    assert_format("plan", plan)
    assert set(plan) >= {"name", "backend", "hosts", "tasks"}
    for host in plan["hosts"]:
        assert set(host) == {"host", "slots", "gpus"}
    ranks = [task["rank"] for task in plan["tasks"]]
    ranked = [rank for rank in ranks if rank is not None]
    assert ranks == [*range(len(ranked)), *[None] * (len(ranks) - len(ranked))]
    for task in plan["tasks"]:
        assert set(task) >= {
            *("task", "rank", "host", "address", "argv", "cwd", "env"),
            *("tf_config", "device_filters", "log"),
        }
        kind, _, index = task["task"].partition(":")
        assert task["tf_config"]["task"] == {"type": kind, "index": int(index)}
        assert "evaluator" not in task["tf_config"]["cluster"]


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_plan_of_3000_tasks_takes_a_moment(tmp_path: Path) -> None:
    """A loose bound; ``benchmarks.planning`` measures it. TF_CONFIG alone is 150 MB."""
    (tmp_path / "big.yaml").write_text(
        "backend: ssh\ncommand: python train.py\n"
        'hosts: ["node[0001-1000]"]\n'
        "tasks: {chief: 1, worker: 2949, ps: 50}\n"
    )
    began_s = _children_cpu_s()
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(
            [sys.executable, "-m", "tfcluster", "plan", "big.yaml", "--json"],
            cwd=tmp_path,
            stdout=out,
            check=True,
            timeout=30,
        )
    assert _children_cpu_s() - began_s < allow_s(2)
    tasks = json.loads((tmp_path / "out").read_bytes())["tasks"]
    assert len(tasks) == 3000
    assert len(tasks[7]["tf_config"]["cluster"]["worker"]) == 2949
