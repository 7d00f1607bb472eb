"""cluster.yaml and flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.config.files import ENVIRON, SMALLEST, write
from tests.fuzz.target import Target
from tests.fuzz.targets.text import text_of
from tfcluster.base.errors import ConfigError
from tfcluster.config import from_command, load, starter
from tfcluster.schedulers import names


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tfcluster-fuzz-")


def _file(data: bytes) -> None:
    path = write(Path(_folder().name), data)
    try:
        load(path, overrides=(), environ=ENVIRON)
    except ConfigError as error:
        _check(error)
        raise


def _flags(data: bytes) -> None:
    """Hosts, name, and then an override in each line."""
    hosts, name, *overrides = [*text_of(data).split("\n"), ""]
    try:
        from_command(
            ["python", "train.py"],
            count=2,
            hosts=hosts or None,
            name=name or None,
            overrides=overrides[:-1],
            environ=ENVIRON,
            cwd=Path(_folder().name),
        )
    except ConfigError as error:
        _check(error)
        raise


def _check(error: ConfigError) -> None:
    assert error.problems
    for line in error.lines():
        assert line.isprintable(), line
        assert len(line) < 1500


def _seeds() -> Sequence[bytes]:
    return [text.encode() for text in (SMALLEST, *map(starter, names()))]


_WORDS = (
    *(b"\n  ", b": ", b"- ", b"&a ", b"*a", b"<<: *a", b"${A}", b"${A:-b}", b"!!int "),
    *(b"[*a, *a]", b"? ", b"1:" * 50, b"0x" + b"f" * 300, b"hosts: ", b"tasks: {"),
)

TARGETS = (
    Target("config", _file, _seeds, (ConfigError,), _WORDS),
    Target(
        "flags",
        _flags,
        lambda: [
            b"n[1-4],a:2\nmine\ntasks.worker=4\nruntime.strategy=none",
            b"[::1]\n\nenv.A=b\nhosts=[a, b]",
        ],
        (ConfigError,),
        (*_WORDS, b"tasks.", b"=", b"."),
    ),
)
