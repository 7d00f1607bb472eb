"""Makes operations on GPUs deterministic in all runs that are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLE = "TF_DETERMINISTIC_OPS"


def variables(gpus: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes TensorFlow's operations deterministic on GPUs.

    Empty without a GPU, where the variable would only change input pipelines, and if
    ``given`` already has a value.
    """
    return {VARIABLE: "1"} if gpus and VARIABLE not in given else {}


def prevents(reason: str, tail: Sequence[str]) -> bool:
    """Whether a program failed because an operation has no deterministic form."""
    return "determinis" in "\n".join([reason, *tail]).lower()
