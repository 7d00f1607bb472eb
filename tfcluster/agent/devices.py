"""Which GPUs of this host are ours. Asks no driver, so that it costs nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

_NVIDIA = "/proc/driver/nvidia/gpus"


def gpus(
    environ: Mapping[str, str], folder: str | os.PathLike[str] = _NVIDIA
) -> tuple[str, ...]:
    """Names as CUDA_VISIBLE_DEVICES takes them: those that it has, else all there are.

    Where there is a driver but no such folder of it (in some containers) none is seen.
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(word.strip() for word in given.split(",") if word.strip())
    try:
        count = len(os.listdir(folder))
    except OSError:
        return ()
    return tuple(map(str, range(count)))
