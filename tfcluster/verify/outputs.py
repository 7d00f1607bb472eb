"""Compares what two runs wrote and printed.

Arrays are compared in the files of numpy and HDF5, in Keras's archives and in text;
other files by their names. numpy and h5py are imported on use.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfcluster.verify.compare import Difference, array_difference
from tfcluster.verify.noise import MARGIN

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = Mapping[str, npt.NDArray[Any]]

_TEXT = {".csv", ".json", ".jsonl", ".log", ".txt", ".tsv", ".yaml", ".yml"}
_HDF5 = {".h5", ".hdf5"}
_ARRAYS = {".npy", ".npz", ".keras", *_HDF5}
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


@dataclass(frozen=True, slots=True)
class Outputs:
    folder: Path | None
    log: Path | None

    @property
    def printed(self) -> list[str]:
        return [] if self.log is None else _program_lines(self.log, self.folder)

    def written(self, before: Mapping[str, Path]) -> dict[str, Path]:
        """The files that are new or changed, by their names without times."""
        files: dict[str, Path] = {}
        if self.folder is None:
            return files
        for file in sorted(self.folder.rglob("*")):
            name = str(file.relative_to(self.folder))
            if "__pycache__" in file.parts or not file.is_file() or file.is_symlink():
                continue
            if name not in before or not cmp(file, before[name], shallow=False):
                files[_UNSTABLE.sub("*", name)] = file
        return files

    def lines_of(self, file: Path | None) -> list[str]:
        """The lines of a text file, without the name of the run's folder."""
        if file is None:
            return []
        text = file.read_text("utf-8", "replace")
        return text.replace(str(self.folder), ".").splitlines()


def compare_outputs(
    alone: Outputs,
    ranks: Outputs,
    again: Outputs | None,
    before: Mapping[str, Path],
    tolerance: float,
) -> Difference | None:
    """The first difference between the outputs of two runs.

    ``again`` is a second run alone: what differs there differs by its own noise.
    ``before`` has the files that existed before the runs.
    """
    again = again or Outputs(None, None)
    mine, theirs = alone.written(before), ranks.written(before)
    third = again.written(before)
    for name in sorted({*mine, *theirs}):
        if name not in mine or name not in theirs:
            where = "only alone" if name in mine else "only on the ranks"
            return _output("file", f"the program wrote {name} {where}")
        words, suffix = None, mine[name].suffix
        one, other, noisy = mine[name], theirs[name], third.get(name)
        if suffix in _ARRAYS:
            arrays = _arrays_in(one), _arrays_in(other), _arrays_in(noisy)
            words = _arrays_differ(*arrays, tolerance)
        elif suffix in _TEXT:
            lines = alone.lines_of(one), ranks.lines_of(other), again.lines_of(noisy)
            words = _lines_differ(*lines, tolerance)
        if words is not None:
            return _output("file", f"{name}: {words}")
    if alone.log is None:
        return None
    words = _lines_differ(alone.printed, ranks.printed, again.printed, tolerance)
    return None if words is None else _output("printed", f"the chief printed {words}")


def _arrays_in(file: Path | None) -> Arrays:
    import numpy as np

    if file is None:
        return {}
    if file.suffix == ".npy":
        return {"": np.load(file, allow_pickle=False)}
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archived:
            return dict(archived)
    if file.suffix != ".keras":
        return _in_hdf5(file)
    arrays: dict[str, npt.NDArray[Any]] = {}
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if Path(name).suffix in _HDF5:
                arrays |= _in_hdf5(io.BytesIO(archive.read(name)))
    return arrays


def _in_hdf5(file: Path | io.BytesIO) -> Arrays:
    import h5py

    arrays: dict[str, npt.NDArray[Any]] = {}

    def visit(name: str, entry: Any) -> None:
        if isinstance(entry, h5py.Dataset) and entry.dtype.kind in "biufc":
            arrays[name] = entry[()]

    with h5py.File(file, "r") as opened:
        opened.visititems(visit)
    return arrays


def _arrays_differ(
    mine: Arrays, theirs: Arrays, again: Arrays, tolerance: float
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
        noise = array_difference(one, np.asarray(again.get(name, one)))[0]
        if relative > max(tolerance, MARGIN * noise):
            values = f"{one.flat[at]:.7g} alone, {other.flat[at]:.7g} on the ranks"
            return f"array {name}: {values}"
    return None


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


def _lines_differ(
    mine: list[str], theirs: list[str], again: list[str], tolerance: float
) -> str | None:
    again = again if len(again) == len(mine) else mine
    rows = zip(mine, theirs, again, strict=False)
    for number, (one, other, third) in enumerate(rows, 1):
        if not _same_text(one, other, third, tolerance):
            return f"line {number}: {one!r} alone, {other!r} on the ranks"
    if len(mine) != len(theirs):
        return f"{len(mine)} lines alone, {len(theirs)} on the ranks"
    return None


def _same_text(one: str, other: str, again: str, tolerance: float) -> bool:
    """Whether lines are equal but for times, last digits and noise (``again``)."""
    one, other, again = (_TIMES.sub("TIME", line) for line in (one, other, again))
    if one == other:
        return True
    if _words(one) != _words(other):
        return False
    if _words(one) != _words(again):
        again = one
    rows = zip(*map(_NUMBER.findall, (one, other, again)), strict=True)
    return all(
        _same_number(mine, theirs, third, tolerance) for mine, theirs, third in rows
    )


def _words(line: str) -> str:
    """``line`` without numbers and spaces: numpy pads shorter numbers."""
    return "".join(_NUMBER.sub("0", line).split())


def _same_number(one: str, other: str, again: str, tolerance: float) -> bool:
    if one == other:
        return True
    if not any(sign in one + other for sign in ".eE"):
        return False
    mine, theirs = float(one), float(other)
    gap = abs(mine - theirs)
    relative = max(_TEXT_TOLERANCE, tolerance)
    noise = MARGIN * abs(mine - float(again))
    return gap <= max(relative * abs(mine), noise, _LAST_DIGIT * _unit(one))


def _unit(number: str) -> float:
    digits, _, exponent = number.lower().partition("e")
    _, _, decimals = digits.partition(".")
    return float(10.0 ** (int(exponent or 0) - len(decimals)))


def _output(kind: str, name: str) -> Difference:
    return Difference(step=-1, kind=kind, name=name)
