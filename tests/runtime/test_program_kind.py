"""Which programs distribute their training by themselves, and how that is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.ranks import ROOT, Job, Ranks, run_jobs
from tfcluster.runtime.scripts.analysis import analyse

US = "import tfcluster.runtime as tfc\n"


@pytest.mark.parametrize(
    "source",
    [
        "import tfcluster.runtime as hvd\nhvd.DistributedOptimizer(1)",
        "import tfcluster.runtime\ntfcluster.runtime.DistributedGradientTape(1)",
        "from tfcluster import runtime as r\ndef f():\n    r.DistributedOptimizer(1)",
        "from tfcluster.runtime import DistributedOptimizer",
        "def f():\n    from tfcluster.runtime import DistributedGradientTape as T\n",
        "import horovod.tensorflow as hvd",
        "try:\n    import horovod.keras as hvd\nexcept ImportError:\n    hvd = None",
        US + "o.apply_gradients([(tfc.allreduce(g), v) for g, v in zip(gs, vs)])",
        US + "def f(x):\n"
        "    gs = t.gradient(x, vs)\n"
        "    gs = [tfc.allreduce(g) for g in gs]\n"
        "    o.apply_gradients(zip(gs, vs))",
        US + "def mean(gs):\n"
        "    out = []\n"
        "    for g in gs:\n"
        "        out.append(tfc.allreduce(g))\n"
        "    return out\n"
        "class Model:\n"
        "    def train_step(self, data):\n"
        "        gs = mean(t.gradient(x, vs))\n"
        "        self.optimizer.apply(gs, vs)",
        "from tfcluster.runtime import grouped_allreduce as mean\n"
        "gs, _ = tf.clip_by_global_norm(mean(t.gradient(x, vs)), 1.0)\n"
        "o.apply_gradients(zip(gs, vs))",
        US + "for v in vs:\n    v.assign(tfc.allreduce(v))",
        US + "m.set_weights([tfc.allreduce(w) for w in m.get_weights()])",
    ],
)
def test_programs_that_say_so(source: str) -> None:
    assert analyse(source).distributes_itself


@pytest.mark.parametrize(
    "source",
    [
        "",
        "import tfcluster.runtime as tfc\ntfc.allreduce(1)",
        "import tfcluster.runtime as tfc  # DistributedOptimizer, one day",
        "import tfcluster.runtime as tfc\nprint('DistributedOptimizer')",
        "import horovodlike.tensorflow as hvd\nhvd.DistributedOptimizer(1)",
        "if a:\n    import horovod.tensorflow as hvd",
        US + "def f(x):\n"
        "    gs = t.gradient(x, vs)\n"
        "    o.apply_gradients(zip(gs, vs))\n"
        "    return tfc.allreduce(x)\n"
        "print(f(1))",
        US + "x = tfc.allreduce(x)\ngs = t.gradient(x, vs)\no.apply(gs, vs)",
        US + "norm = tfc.allreduce(tf.linalg.global_norm(gs))\no.apply(gs, vs)",
        US + "best.assign(tfc.allreduce(loss))",
        "import tfcluster.runtime as tfc\nDistributedOptimizer = (",
        "import tfcluster.runtime as tfc\0\nDistributedOptimizer",
    ],
)
def test_programs_that_do_not(source: str) -> None:
    assert not analyse(source).distributes_itself


_READ = """
import sys
from tfcluster.runtime.context import context_from
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.scripts.run_script import parse
program_kind.read(parse(sys.argv[1:]), context_from({}))
print(program_kind.distributes_itself(), "tensorflow" in sys.modules)
"""


def test_the_main_file_is_read(tmp_path: Path) -> None:
    code = "import tfcluster.runtime as t; t.DistributedOptimizer"
    script = tmp_path / "naïve.py"
    script.write_text(f"# ☃\n{code}\n", encoding="utf-8")
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"# \xff\n" + code.encode())
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    for name in ("train", "__main__"):
        (package / f"{name}.py").write_text(code)
    for words, expected in {
        (str(script),): "True False",
        ("-m", "pack.train"): "True False",
        ("-m", "pack"): "True False",
        (str(package),): "True False",
        ("-c", code): "True False",
        ("-m", "json.tool"): "False False",
        (str(latin),): "False False",
        (str(tmp_path / "missing.py"),): "False False",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", _READ, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.strip() == expected, words


_BOTH = """
import json
from tfcluster.runtime.context import context_from
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.scripts.run_script import Script
cluster = {"ps": ["a:1"], "worker": ["a:2", "b:2"]}
task = {"type": "worker", "index": 0}
env = {
    "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
    "TFCLUSTER_STRATEGY": "parameter_server",
    "TFCLUSTER_TOKEN": "00" * 32,
}
source = "import horovod.tensorflow\\ntf.train.replica_device_setter(1)"
def read(code, env):
    program_kind.read(Script("-c", code), context_from(env))
    print(program_kind.distributes_itself(), program_kind.is_tf1_script())
read("print(1)", env)
read(source, {})
read(source, env)
read("print(1)", env)
"""


def test_both_kinds_are_found_and_kept() -> None:
    """A script for TensorFlow 1 counts as one only in a cluster with a ps task."""
    done = subprocess.run(
        [sys.executable, "-c", _BOTH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split("\n") == [
        "False False",
        "True False",
        "True True",
        "True True",
        "",
    ], done.stderr


_LATE = """
from tfcluster.runtime.scripts import program_kind
def too_late():
    raise RuntimeError("too late")
program_kind.guard_distribution(too_late)
try:
    program_kind.claim_distribution()
except RuntimeError as error:
    print(error, program_kind.distributes_itself())
program_kind.guard_distribution(lambda: None)
program_kind.claim_distribution()
program_kind.guard_distribution(too_late)
program_kind.claim_distribution()
print(program_kind.distributes_itself())
"""


def test_a_claim_can_be_too_late_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LATE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout == "too late False\nTrue\n"


RUNS = (
    ("own", "eager", 2),
    ("own", "eager", 3),
    ("own", "function", 2),
    ("own", "fit", 2),
    ("printed", "eager", 2),
    ("printed", "function", 2),
    ("part", "eager", 2),
    ("part", "fit", 2),
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    folder = tmp_path_factory.mktemp("byhand")
    alone = Job("alone", 1, "own_exchanges.py", ("alone", "eager", str(folder / "a")))
    several = [
        Job(
            f"{how}-{mode}-{size}",
            size,
            "own_exchanges.py",
            (how, mode, str(folder / f"{how}-{mode}-{size}")),
        )
        for how, mode, size in RUNS
    ]
    return run_jobs(folder, [alone, *several], timeout_s=280)


def weights(ranks: Ranks, name: str) -> list[Mapping[str, Any]]:
    folder = ranks.folder.parent.parent
    return [
        dict(np.load(folder / f"{name}-{rank}.npz"))
        for rank in range(len(ranks.outputs))
    ]


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param("own-eager-2", 6, marks=pytest.mark.slow),
        pytest.param("own-eager-3", 4, marks=pytest.mark.exhaustive),
        pytest.param("own-function-2", 6, marks=pytest.mark.slow),
        # Every rank sees the whole batch.
        pytest.param("printed-eager-2", 12, marks=pytest.mark.exhaustive),
        pytest.param("printed-function-2", 12, marks=pytest.mark.slow),
    ],
)
def test_no_row_is_lost(jobs: Mapping[str, Ranks], name: str, rows: int) -> None:
    """For programs that combine their gradients, and for those that average a loss."""
    ranks = jobs[name]
    (expected,) = weights(jobs["alone"], "a")
    for output, found in zip(ranks.outputs, weights(ranks, name), strict=True):
        assert f"fewest rows {rows}\n" in output
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, 1e-5, 1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["part-eager-2", "part-fit-2"])
def test_a_part_of_the_data_is_pointed_out(
    jobs: Mapping[str, Ranks], name: str
) -> None:
    assert jobs[name].outputs[0].count("the ranks have different batches") == 1
    assert "set runtime.batch: per_worker" in jobs[name].outputs[0]
