"""A long run finds what is planted, and says how to repeat it."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from base64 import b64decode
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from tests.fuzz.__main__ import table
from tests.fuzz.campaign import Report, packed
from tests.fuzz.coverage import Coverage, lines_of
from tests.fuzz.mutate import mutated
from tests.fuzz.target import Target
from tests.fuzz.trial import attempt

_ROOT = Path(__file__).parents[2]


class DocumentedError(Exception):
    pass


def parser(data: bytes) -> None:
    """What tests plant: each letter is another defect."""
    if data.startswith(b"d"):
        raise DocumentedError
    if data.startswith(b"c"):
        raise KeyError("planted")
    if data.startswith(b"m"):
        bytearray(200_000_000)
    if data.startswith(b"s"):
        while True:
            pass


def _target(*modules: ModuleType) -> Target:
    return Target("planted", parser, lambda: [b"x"], modules, (DocumentedError,))


@pytest.mark.parametrize(
    ("data", "kind"), [(b"c", "KeyError"), (b"m", "memory"), (b"s", "slow")]
)
def test_defects_are_seen(data: bytes, kind: str) -> None:
    defect = attempt(_target(), data, most_s=0.3).defect
    assert defect is not None
    assert defect.kind == kind


def test_documented_errors_are_no_defects() -> None:
    outcome = attempt(_target(), b"d")
    assert outcome.refused
    assert outcome.defect is None
    assert attempt(_target(), b"").defect is None


def test_coverage_tells_ways_apart() -> None:
    coverage = Coverage([sys.modules[__name__]])
    target, found = _target(), []
    for data in (b"", b"d"):
        with coverage.traced():
            attempt(target, data)
        found.append(coverage.arcs)
    assert found[0] - found[1]
    assert found[1] - found[0]
    assert lines_of(found[0]) == 4


def test_mutation_depends_on_nothing_but_the_seed() -> None:
    def some(seed: int) -> list[bytes]:
        random = Random(seed)
        return [mutated(random, b'{"a": [1, 2]}\n', most_bytes=99) for _ in range(300)]

    assert some(1) == some(1) != some(2)
    assert max(map(len, some(1))) == 99
    assert len(set(some(1))) > 200


def test_an_input_on_the_command_line_is_tried() -> None:
    data = b'{"type":"unprepared","tail":6}'
    words = ["--input", packed(data), "to-launcher"]
    assert zlib.decompress(b64decode(words[1])) == data
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *words],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "30 bytes" in done.stdout
    assert "no defect" in done.stdout


def test_a_short_campaign_prints_a_table_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "0.01", "record", "gpus"],
        cwd=_ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    heading, *rows = done.stdout.splitlines()
    assert heading.split()[:3] == ["target", "inputs", "per"]
    assert [row.split()[0] for row in rows] == ["record", "gpus"]
    assert all(int(row.split()[1]) > 1 for row in rows)
    assert not list(tmp_path.iterdir())


def test_rows_of_the_table_are_aligned() -> None:
    lines = table([Report("a", inputs=10), Report("longer", inputs=10_000)])
    assert len({len(line) for line in lines}) == 1
