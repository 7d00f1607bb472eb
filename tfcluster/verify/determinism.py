"""What the environment of the runs that are compared changes in TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

VARIABLE = "TF_DETERMINISTIC_OPS"
_THREADS = "TF_NUM_INTRAOP_THREADS"


def variables(gpus: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes TensorFlow's operations deterministic on GPUs.

    Empty without a GPU, where the variable would only change input pipelines, and if
    ``given`` already has a value.
    """
    return {VARIABLE: "1"} if gpus and VARIABLE not in given else {}


def prevents(reason: str, tail: Sequence[str]) -> bool:
    """Whether a program failed because an operation has no deterministic form."""
    return "determinis" in "\n".join([reason, *tail]).lower()


def other_threads(given: Mapping[str, str]) -> dict[str, str]:
    """The environment that gives TensorFlow's operations another number of threads."""
    count = given.get(_THREADS, "") or str(len(os.sched_getaffinity(0)))
    return {_THREADS: "2" if count == "1" else "1"}
