"""Compares what two runs wrote and printed.

Arrays are compared in the files of numpy and HDF5, in Keras's archives and in text;
other files by their names. numpy and h5py are imported on use.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcluster.verify.compare import Difference, array_difference

if TYPE_CHECKING:
    import numpy.typing as npt

_TEXT = {".csv", ".json", ".jsonl", ".log", ".txt", ".tsv", ".yaml", ".yml"}
_HDF5 = {".h5", ".hdf5"}
_TEXT_TOLERANCE = 1e-3
"""Text has few digits: a rounding difference may change the last digit."""
_LAST_DIGIT = 1.01
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_TIMES = re.compile(
    r"\d+(?:\.\d+)?\s?(?:[mun]?s|seconds|sec|minutes|min|h)\b(?:/(?:step|epoch|sample))?"
    r"|\d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\d"
)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\n\r]*\r(?!\n)|.\x08")
_NOT_THE_PROGRAM = re.compile(
    r"tfcluster: |[IWEF]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: |WARNING: All log"
    r"|(?:INFO|WARNING):tensorflow:|\S.*:\d+: \w*Warning: "
)
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: ")
_DEPRECATION = "Instructions for updating:"
"""The line after this one also belongs to a TensorFlow warning."""
_UNSTABLE = re.compile(r"\d{6,}")
"""Times and process ids in file names, such as TensorBoard's."""


def compare_outputs(
    folders: tuple[Path, Path] | None,
    before: Mapping[str, Path] | None,
    logs: tuple[Path, Path] | None,
    tolerance: float,
) -> Difference | None:
    """The first difference between the outputs of two runs.

    Each pair has the run alone and the ranks; None is not compared. ``before`` has the
    files that existed before the runs.
    """
    if folders is not None:
        found = _files(*folders, before or {}, tolerance)
        if found is not None:
            return found
    if logs is None:
        return None
    alone, ranks = map(_program_lines, logs, folders or (None, None))
    words = _lines_differ(alone, ranks, tolerance)
    return None if words is None else _output("printed", f"the chief printed {words}")


# --- files ----------------------------------------------------------------------------


def _files(
    alone: Path, ranks: Path, before: Mapping[str, Path], tolerance: float
) -> Difference | None:
    mine, theirs = _written(alone, before), _written(ranks, before)
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            where = "only alone" if name in mine else "only on the ranks"
            return _output("file", f"the program wrote {name} {where}")
        words = _content(mine[name], theirs[name], tolerance, (alone, ranks))
        if words is not None:
            return _output("file", f"{name}: {words}")
    return None


def _written(folder: Path, before: Mapping[str, Path]) -> dict[str, Path]:
    """The files that are new or changed, by their names without times."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if "__pycache__" in file.parts or not file.is_file() or file.is_symlink():
            continue
        if name not in before or not _same_bytes(file, before[name]):
            found[_UNSTABLE.sub("*", name)] = file
    return found


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    return one.read_bytes() == other.read_bytes()


def _content(
    one: Path, other: Path, tolerance: float, folders: tuple[Path, Path]
) -> str | None:
    """How the contents differ; None if they are equal, or of an unknown kind."""
    if one.suffix in (".npy", ".npz", ".keras", *_HDF5):
        mine, theirs = dict(_arrays(one)), dict(_arrays(other))
        return _arrays_differ(mine, theirs, tolerance)
    if one.suffix in _TEXT:
        mine_lines, their_lines = (
            file.read_text("utf-8", "replace").replace(str(folder), ".").splitlines()
            for file, folder in zip((one, other), folders, strict=True)
        )
        return _lines_differ(mine_lines, their_lines, tolerance)
    return None


def _arrays(file: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    import numpy as np

    if file.suffix == ".npy":
        yield "", np.load(file, allow_pickle=False)
    elif file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as found:
            for name in found.files:
                yield name, found[name]
    elif file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                if Path(name).suffix in _HDF5:
                    yield from _in_hdf5(io.BytesIO(archive.read(name)))
    else:
        yield from _in_hdf5(file)


def _in_hdf5(file: Path | io.BytesIO) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    import h5py

    found: dict[str, npt.NDArray[Any]] = {}

    def visit(name: str, one: Any) -> None:
        if isinstance(one, h5py.Dataset) and one.dtype.kind in "biufc":
            found[name] = one[()]

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    yield from found.items()


def _arrays_differ(
    mine: Mapping[str, npt.NDArray[Any]],
    theirs: Mapping[str, npt.NDArray[Any]],
    tolerance: float,
) -> str | None:
    import numpy as np

    for name in sorted({*mine, *theirs}):
        if "seed_generator" in name:
            continue
        if name not in mine or name not in theirs:
            return f"array {name} exists only {'alone' if name in mine else 'on ranks'}"
        one, other = np.asarray(mine[name]), np.asarray(theirs[name])
        if one.dtype.kind not in "biufc":
            continue
        relative, at = array_difference(one, other)
        if relative > tolerance:
            values = f"{one.flat[at]:.7g} alone, {other.flat[at]:.7g} on the ranks"
            return f"array {name}: {values}"
    return None


# --- text -----------------------------------------------------------------------------


def _program_lines(log: Path, folder: Path | None) -> list[str]:
    """What the program printed, as a terminal would show it in the end.

    ``folder`` is the run's copy of the working directory, whose name is replaced by the
    same text in all runs.
    """
    try:
        text = log.read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    if folder is not None:
        text = text.replace(str(folder), ".")
    lines = [_CONTROL.sub("", line) for line in text.split("\n")]
    return [
        line.strip()
        for line, before in zip(lines, ["", *lines], strict=False)
        if line.strip() and not _is_of_a_library(line, before)
    ]


def _is_of_a_library(line: str, before: str) -> bool:
    """Whether a line is a warning or a log record from Python or TensorFlow."""
    if _NOT_THE_PROGRAM.match(line) or _DEPRECATION in (line, before):
        return True
    # The program's line follows it, indented.
    return bool(_WARNING.match(before)) and line.startswith("  ")


def _lines_differ(mine: list[str], theirs: list[str], tolerance: float) -> str | None:
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False), 1):
        if not _same_text(one, other, tolerance):
            return f"line {number}: {one!r} alone, {other!r} on the ranks"
    if len(mine) != len(theirs):
        return f"{len(mine)} lines alone, {len(theirs)} on the ranks"
    return None


def _same_text(one: str, other: str, tolerance: float) -> bool:
    """Whether lines are equal except for times and the last digits of numbers."""
    one, other = _TIMES.sub("TIME", one), _TIMES.sub("TIME", other)
    if one == other:
        return True
    # Without spaces: numpy pads numbers that have fewer digits than others.
    texts = ["".join(_NUMBER.sub("0", each).split()) for each in (one, other)]
    if texts[0] != texts[1]:
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(_same_number(mine, theirs, tolerance) for mine, theirs in pairs)


def _same_number(one: str, other: str, tolerance: float) -> bool:
    if one == other:
        return True
    if not any(sign in one + other for sign in ".eE"):
        return False
    mine, theirs = float(one), float(other)
    gap = abs(mine - theirs)
    relative = max(_TEXT_TOLERANCE, tolerance)
    return gap <= max(relative * abs(mine), _LAST_DIGIT * _unit(one))


def _unit(number: str) -> float:
    """The value of the last digit: 0.001 for ``0.123``."""
    digits, _, exponent = number.lower().partition("e")
    _, _, decimals = digits.partition(".")
    return float(10.0 ** (int(exponent or 0) - len(decimals)))


def _output(kind: str, name: str) -> Difference:
    return Difference(
        step=-1, kind=kind, name=name, alone=None, ranks=None, relative=None
    )
