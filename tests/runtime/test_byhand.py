"""Which programs distribute their training by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.ranks import ROOT
from tfcluster.runtime.byhand import says_so


@pytest.mark.parametrize(
    "source",
    [
        "import tfcluster.runtime as hvd\nhvd.DistributedOptimizer(1)",
        "import tfcluster.runtime\ntfcluster.runtime.DistributedGradientTape(1)",
        "from tfcluster import runtime as r\ndef f():\n    r.DistributedOptimizer(1)",
        "from tfcluster.runtime import DistributedOptimizer",
        "def f():\n    from tfcluster.runtime import DistributedGradientTape as T\n",
    ],
)
def test_programs_that_say_so(source: str) -> None:
    assert says_so(source)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "import tfcluster.runtime as tfc\ntfc.allreduce(1)",
        "import tfcluster.runtime as tfc  # DistributedOptimizer, one day",
        "import tfcluster.runtime as tfc\nprint('DistributedOptimizer')",
        "import horovod.tensorflow as hvd\nhvd.DistributedOptimizer(1)",
        "import tfcluster.runtime as tfc\nDistributedOptimizer = (",
        "import tfcluster.runtime as tfc\0\nDistributedOptimizer",
    ],
)
def test_programs_that_do_not(source: str) -> None:
    assert not says_so(source)


_READ = """
import sys
from tfcluster.runtime import byhand
from tfcluster.runtime.program import parse
byhand.read(parse(sys.argv[1:]))
print(byhand.claimed(), "tensorflow" in sys.modules)
"""


def test_the_main_file_is_read(tmp_path: Path) -> None:
    code = "import tfcluster.runtime as t; t.DistributedOptimizer"
    script = tmp_path / "naïve.py"
    script.write_text(f"# ☃\n{code}\n", encoding="utf-8")
    latin = tmp_path / "latin.py"
    latin.write_bytes(b"# \xff\n" + code.encode())
    for words, expected in {
        (str(script),): "True False",
        ("-c", code): "True False",
        ("-m", "json.tool"): "False False",
        (str(latin),): "False False",
        (str(tmp_path / "missing.py"),): "False False",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", _READ, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.strip() == expected, words


_LATE = """
from tfcluster.runtime import byhand
def too_late():
    raise RuntimeError("too late")
byhand.guard(too_late)
try:
    byhand.claim()
except RuntimeError as error:
    print(error, byhand.claimed())
byhand.guard(lambda: None)
byhand.claim()
byhand.guard(too_late)
byhand.claim()
print(byhand.claimed())
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
