"""Finds the GPUs that we may use on this host, quickly: asks no driver."""

from __future__ import annotations

import os
from collections.abc import Mapping

_NVIDIA = "/proc/driver/nvidia/gpus"


def gpus(
    environ: Mapping[str, str], folder: str | os.PathLike[str] = _NVIDIA
) -> tuple[str, ...]:
    """The devices in CUDA_VISIBLE_DEVICES if it is set, else all devices, by number.

    Finds no GPU in containers that lack the driver's folder.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(word.strip() for word in given.split(",") if word.strip())
    try:
        count = len(os.listdir(folder))
    except OSError:
        return ()
    return tuple(map(str, range(count)))
