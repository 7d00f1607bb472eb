"""Requirements files and projects, as they are read where tfcluster is started."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.fuzz.target import Target
from tfcluster.config import requirements
from tfcluster.config.requirements import RequirementsError, bundle

_FILE = b"""\
--index-url https://me:word@x.example/simple
-r more.txt
-c 'some constraints.txt'
-e .[test]
--find-links=../wheels  # ours
./pkg[gpu] ; python_version > "3.10"
a @ file:///srv/a-1-py3-none-any.whl
git+https://x.example/a.git#egg=a
tensorflow>=2.16
libs/demo
"""
_PROJECT = b'[project]\nname = "x"\ndependencies = ["a>1", "b @ ./b"]\ndynamic = []\n'


def _one(seed: bytes) -> tuple[bytes, ...]:
    return (seed,)


def _exists(path: Path) -> bool:
    return len(str(path)) % 2 == 0


def _bundle(name: str, data: bytes) -> None:
    """The second file is included, or the first one again."""
    text, folder = data.decode(errors="surrogateescape"), Path("/work")
    found = bundle(
        folder / name, folder, lambda _: text, lambda path: len(str(path)) % 2 == 0
    )
    names = [name for name, _ in found.files]
    assert len(set(names)) == len(names) <= requirements.MAX_FILES
    assert not any("/" in name or name in (".", "..") for name in names)
    for path in (*found.local, *found.editable):
        assert path.is_absolute()
        assert ".." not in path.parts


TARGETS = [
    Target(
        name=f"requirements.{kind}",
        run=partial(_bundle, name),
        seeds=partial(_one, seed),
        errors=(RequirementsError,),
        most_bytes=1 << 14,
        words=words,
    )
    for kind, name, seed, words in (
        (
            "file",
            "a.txt",
            _FILE,
            (b"-r", b"-e", b"-f", b"--editable", b"file://", b"${"),
        ),
        ("project", "pyproject.toml", _PROJECT, (b"[project]", b"dependencies")),
    )
]
