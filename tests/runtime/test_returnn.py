"""Unmodified RETURNN, which uses Horovod's API under the name ``horovod``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.ranks import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("returnn") is None,
        reason="RETURNN is not installed: pip install 'tfcluster[returnn]'",
    ),
]


@pytest.mark.parametrize(
    ("reduced", "size"),
    [
        ("grad", 2),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in [("grad", 3), ("param", 2)]
        ),
        ("param", 3),
    ],
)
def test_it_trains_on_all_ranks(reduced: str, size: int, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TFCLUSTER_")}
    env["TFCLUSTER_STATE_DIR"] = str(tmp_path / "state")
    config = str(ROOT / "examples" / "returnn_12ax.config")
    words = (sys.executable, "-m", "returnn", config)
    more = ("++horovod_reduce_type", reduced, "++model", str(tmp_path / "network"))
    launch = (sys.executable, "-m", "tfcluster", "launch", "-v", "-n", str(size), "--")
    done = subprocess.run(
        [*launch, *words, *more],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        check=False,
        timeout=280,
    )
    output = done.stdout.decode(errors="replace")
    said = output + done.stderr.decode(errors="replace")
    assert done.returncode == 0, said
    assert said.count("horovod is not installed") == 1
    for rank in range(size):
        assert f"rank {rank} / size {size}" in said
    # All ranks end with the same parameters, and so with the same score.
    scores = re.findall(r"dev: score (\S+)", said)
    assert len(set(scores[-size:])) == 1, scores
