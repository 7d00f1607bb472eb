"""Chooses the device that caches the variables that a worker reads once per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tensor_types import DType, Shape, Variable

THRESHOLD_BYTES = 64 * 1024
"""Smaller variables stay on one device, because spreading them gains nothing."""


class Caches:
    """Choose caching devices: all small variables go to one device, and each large
    variable to the device with the fewest bytes so far."""

    def __init__(
        self,
        devices: Sequence[str],
        small: str,
        threshold_bytes: int = THRESHOLD_BYTES,
    ) -> None:
        self._bytes = dict.fromkeys(devices, 0)
        self._small = small
        self._threshold_bytes = threshold_bytes

    def device_for(self, size: int) -> str:
        """Choose the device that caches a variable of ``size`` bytes."""
        if size < self._threshold_bytes:
            return self._small
        device = min(self._bytes, key=lambda name: self._bytes[name])
        self._bytes[device] += size
        return device

    def cached(
        self, getter: Callable[..., Variable], name: str, **options: Any
    ) -> Variable:
        """A ``custom_getter`` for variable scopes that caches trainable variables."""
        # None means the default, which is trainable.
        trained = options.get("trainable") is not False
        if not trained or options.get("caching_device"):
            return getter(name, **options)
        if options.get("reuse") is True:
            return getter(name, **options)
        size = _bytes_of(options.get("shape"), options.get("dtype"))
        return getter(name, **{**options, "caching_device": self.device_for(size)})


def caches(kind: str, cpu: str, towers: Sequence[str], threshold_bytes: int) -> Caches:
    """The ``Caches`` on the CPU or on the towers.

    Raises ValueError unless ``kind`` is 'cpu' or 'gpu'.
    """
    if kind not in ("cpu", "gpu"):
        raise ValueError(
            f"caching={kind!r}: variables are cached on 'cpu' or on 'gpu' (the devices "
            "of the towers)"
        )
    devices = towers if kind == "gpu" else [cpu]
    return Caches(devices, cpu, threshold_bytes)


def _bytes_of(shape: Shape | Sequence[int] | None, dtype: DType | None) -> int:
    known = tf.TensorShape(shape)
    if not known.is_fully_defined():
        return 0
    count: int = math.prod(known.as_list())
    return count * int(tf.as_dtype(dtype or tf.float32).size)
