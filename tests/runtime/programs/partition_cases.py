# The cases are written like user scripts: without type annotations.
# mypy: allow-untyped-calls
"""Runs the cases of a theme as they are, and divided among simulated ranks.

    partition_cases.py THEME SIZES [CASE...]

SIZES are numbers of ranks, such as ``2,3``. Prints a line for each case and size:
``equal``; ``rounding`` if it is equal in float64 only; ``whole`` if a function has no
program, and it is equal since that runs whole; ``different`` with the largest
difference relative to an array's largest value; or ``error``. Behind it is how many of
the programs were divided, and which ops on rows were computed whole. TRACE=1 prints the
tracebacks of errors. Exits with 1 if a case is different or fails.
"""

from __future__ import annotations

import collections
import gc
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tests.runtime.keras_checks import (
    HALF_PRECISION,
    METRICS,
    OTHERS,
    WEIGHTS,
    is_metric,
)
from tests.runtime.partition.installed import simulated_ranks
from tests.runtime.programs.cases.tools import OPTIMIZED
from tfcluster.runtime.partition.hook import Hook
from tfcluster.runtime.partition.propagate import Placed

Values = Mapping[str, NDArray[Any]]
Case = Callable[[], Values]

LIMIT_S = int(os.environ.get("LIMIT_S", "240"))
"""Of one run of a case."""
IN_DOUBLE = 1e-9
"""Tolerance for float64, relative to an array's largest value."""

IN_HALF = 2e-2
"""The same for cases that compute in half precision."""


def run(name: str, case: Case, floatx: str) -> Values:
    """What a case returns."""
    keras.config.set_floatx(floatx)
    options = {"disable_meta_optimizer": name not in OPTIMIZED}
    tf.config.optimizer.set_experimental_options(options)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        signal.alarm(LIMIT_S)
        try:
            found = case()
        finally:
            signal.alarm(0)
            os.chdir(before)
    if name in OTHERS:
        found = {key: each for key, each in found.items() if each.dtype.kind in "fiu"}
    return found


def divided(
    name: str, case: Case, floatx: str, size: int, *, strict: bool = True
) -> tuple[Values, Hook]:
    with simulated_ranks(size, strict=strict) as hook:
        return run(name, case, floatx), hook


def difference(one: Values, found: Values, limit: float | None = None) -> str:
    """What differs by more than the tolerances; empty if nothing does."""
    if one.keys() != found.keys():
        return f"other results: {sorted(one.keys() ^ found.keys())}"
    worst, text = 0.0, ""
    for key, value in one.items():
        expected, other = np.asarray(value), np.asarray(found[key])
        if expected.shape != other.shape:
            return f"{key} has the shape {other.shape}, not {expected.shape}"
        if expected.dtype.kind not in "fiu":
            if key == "raised":
                # Which of several ops fails first, and so the text, may vary.
                expected, other = (
                    np.array(str(each).partition(":")[0]) for each in (expected, other)
                )
            if not np.array_equal(expected, other):
                return f"{key} is {str(other)[:150]!r}, not {str(expected)[:150]!r}"
            continue
        wide, far = expected.astype("f8"), other.astype("f8")
        if not np.array_equal(np.isfinite(wide), np.isfinite(far)):
            return f"{key} has other numbers that are not finite"
        largest = np.abs(wide[np.isfinite(wide)]).max(initial=0)
        apart = np.abs(np.where(np.isfinite(wide), wide - far, 0)).max(initial=0)
        allowed = limit or (METRICS if is_metric(key) else WEIGHTS)
        relative = apart / largest if largest else apart
        if apart > allowed * largest + 1e-12 and relative > worst:
            worst, text = relative, f"{relative:.1e} in {key}"
    return text


def one_line(error: Exception) -> str:
    if os.environ.get("TRACE"):
        traceback.print_exception(error)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"


def computed_whole(placed: Placed) -> collections.Counter[str]:
    found = collections.Counter(node.type for node in placed.whole)
    for bodies in placed.bodies.values():
        for body in bodies:
            found += computed_whole(body)
    return found


def share(hook: Hook) -> str:
    """How many programs are divided, and what was computed whole in them."""
    placed = [program.placed for program in hook.programs if program.is_divided]
    whole = sum(
        (computed_whole(each) for each in placed if each is not None),
        collections.Counter[str](),
    )
    return f"{len(placed)}/{len(hook.programs)} programs, whole {dict(whole)}"


def equal_if_not_strict(name: str, case: Case, one: Values, size: int) -> bool:
    """Whether it is equal where a function may run whole if it has no program."""
    found, hook = divided(name, case, "float32", size, strict=False)
    failed = any(program.error is not None for program in hook.programs)
    return failed and not difference(one, found)


def outcome(name: str, case: Case, one: Values, size: int) -> tuple[str, str]:
    """The first word of the line, and the rest."""
    try:
        found, hook = divided(name, case, "float32", size)
    except Exception as error:
        if equal_if_not_strict(name, case, one, size):
            return "whole", one_line(error)
        return "error", one_line(error)
    text = difference(one, found)
    if not text:
        return "equal", share(hook)
    if name in HALF_PRECISION and not difference(one, found, IN_HALF):
        return "rounding", f"of half precision, {text}; {share(hook)}"
    if equal_if_not_strict(name, case, one, size):
        return "whole", text
    try:
        alone = run(name, case, "float64")
        found, _ = divided(name, case, "float64", size)
    except Exception as error:
        return "different", f"{text}; in float64 {one_line(error)}; {share(hook)}"
    left = difference(alone, found, IN_DOUBLE)
    if left:
        return "different", f"{text}; in float64 {left}; {share(hook)}"
    return "rounding", f"{text}; {share(hook)}"


def too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it takes more than {LIMIT_S} s")


def main(theme: str, sizes: Sequence[int], chosen: Sequence[str]) -> int:
    signal.signal(signal.SIGALRM, too_long)
    gc.freeze()
    module = importlib.import_module(f"tests.runtime.programs.cases.{theme}")
    failed = 0
    for full, case in list(vars(module).items()):
        name = full.removeprefix("case_")
        if not full.startswith("case_") or (chosen and name not in chosen):
            continue
        try:
            one = run(name, case, "float32")
        except Exception as error:
            print(f"alone     {theme}/{name}: {one_line(error)}", flush=True)
            continue
        for size in sizes:
            word, rest = outcome(name, case, one, size)
            failed += word in ("different", "error")
            print(f"{word:9} {theme}/{name} N={size}: {rest}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    theme, sizes, *chosen = sys.argv[1:]
    sys.exit(main(theme, [int(size) for size in sizes.split(",")], chosen))
