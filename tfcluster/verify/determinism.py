"""Deterministic operations on GPUs, in all runs that are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLE = "TF_DETERMINISTIC_OPS"


def variables(gpus: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """The environment that makes TensorFlow's operations deterministic on GPUs.

    Empty without a GPU, where it would only change input pipelines, and if ``given``
    has a value already.
    """
    return {VARIABLE: "1"} if gpus and VARIABLE not in given else {}


def prevents(reason: str, tail: Sequence[str]) -> bool:
    """Whether a program failed because one of its operations has no such form."""
    return "determinis" in "\n".join([reason, *tail]).lower()
