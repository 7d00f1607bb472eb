"""The examples of docs/python.md do what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cluster import DEADLINE_S, Cluster
from tfcluster.base.isolated_import import PACKAGE_ROOT

PAGE = (Path(PACKAGE_ROOT) / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLES = dict(
    re.findall(r'^```python title="(.*?)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)
)
CELL = "In a cell"
TRAIN = "import sys; print('loss', *sys.argv[1:])\n"
CONFIG = """\
name: digits
command: python train.py
tasks: {worker: 1}
runtime: {strategy: none}
"""


def _shown(cluster: Cluster, name: str) -> str:
    """The output of an example, in a folder that has all of them."""
    for each, text in EXAMPLES.items():
        (cluster.folder / each).write_text(text)
    (cluster.folder / "cell.py").write_text(f"import tfcluster\n{EXAMPLES[CELL]}")
    (cluster.folder / "train.py").write_text(TRAIN)
    cluster.file(CONFIG)
    done = subprocess.run(
        [sys.executable, name],
        cwd=cluster.folder,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("launch.py", r"run digits-\S+ in /\S+/digits-\S+\nloss\n0 succeeded None\n"),
        ("two_rates.py", r"0.1 loss --rate 0.1\n0.01 loss --rate 0.01\n"),
        ("errors.py", r"(?s)--set tasks.wroker=4 unknown .*--set grace=10 .*\n"),
        ("cell.py", r"(?s)digits-.*  succeeded\n.*worker:1  succeeded  .*"),
    ],
)
def test_examples_show(cluster: Cluster, name: str, words: str) -> None:
    assert re.fullmatch(words, _shown(cluster, name))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_function_trains(cluster: Cluster) -> None:
    shown = _shown(cluster, "call_train.py")
    assert re.fullmatch(r"\d\.\d+ \[\(4, 1\), \(1,\)\]\n", shown)


def test_every_example_is_tried() -> None:
    tried = {"launch.py", "two_rates.py", "errors.py", CELL}
    assert set(EXAMPLES) == tried | {"train_digits.py", "call_train.py"}
