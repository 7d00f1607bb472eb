"""Floating-point numbers in fewer bits, of which none is lost.

The numbers of a gradient are of similar size, so few of the possible exponents occur.
Each exponent becomes four bits: its distance to the largest in the block, or zero. Rare
exponents that are too small for that are listed. So a float32 takes 28 bits, and a
bfloat16 12. Signs and fractions look random, and stay as they are. That floating-point
numbers compress by their exponents only is from Hershcovitch et al., "ZipNN: Lossless
Compression for AI Models", 2024; they use Huffman codes, which numpy cannot make.

Between hosts it depends on the network whether that is worth the time: ``Trials`` finds
out. Knows no TensorFlow.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfcluster.runtime.tensor_types import Array

BLOCK = 1 << 19
"""The most numbers that are coded at once: their bits stay in a core's cache."""
SHRINKS_LESS_THAN = 2
"""No block is coded in so few bytes that it has this many times as many."""
_HEADER = struct.Struct("<II")
"""The smallest exponent that has no code, and how many exponents are listed."""
_LISTED_BYTES = 5
"""The place of a number in its block, and its exponent."""
_CODES = 15
_MOST_LISTED = 1 / 80
"""Of the numbers in a block; if there are more, they are not worth coding."""


def is_coded(dtype: np.dtype[Any]) -> bool:
    """Whether numbers of this dtype can be coded."""
    return dtype == np.float32 or dtype.name == "bfloat16"


def most_bytes(count: int, itemsize: int) -> int:
    """The most bytes that ``count`` coded numbers take."""
    planes = (itemsize - 1) * count + _half(count)
    return _HEADER.size + planes + _LISTED_BYTES * int(count * _MOST_LISTED)


def _half(count: int) -> int:
    return (count + 1) // 2


class Coder:
    """Codes and decodes blocks of at most ``BLOCK`` numbers, for one thread."""

    def __init__(self) -> None:
        self._words = np.empty(BLOCK, np.uint32)
        self._upper = np.empty(BLOCK, np.uint16)
        self._shifted = np.empty(BLOCK, np.uint16)
        self._exponents = np.empty(BLOCK, np.uint8)
        self._codes = np.empty(BLOCK, np.uint8)
        self._rest = np.empty(BLOCK, np.uint8)
        self._has_code = np.empty(BLOCK, np.bool_)
        self._is_listed = np.empty(BLOCK, np.bool_)

    def code(self, values: Array, out: Array) -> int:
        """Code ``values``, of shape (n,) and a dtype that ``is_coded``, into ``out``.

        ``out`` has dtype uint8 and at least ``most_bytes`` elements. Returns how many
        are used: zero if the numbers would not become smaller.
        """
        count, half = len(values), _half(len(values))
        planes = _Planes(out, count, values.itemsize)
        upper, shifted = self._upper[:count], self._shifted[:count]
        if planes.lower is None:
            upper = values.view(np.uint16)
        else:
            bits, words = values.view(np.uint32), self._words[:count]
            np.copyto(planes.lower, bits, casting="unsafe")
            np.right_shift(bits, 16, out=words)
            np.copyto(upper, words, casting="unsafe")
        exponents, codes = self._exponents[:count], self._codes[:count]
        np.right_shift(upper, 7, out=shifted)
        np.copyto(exponents, shifted, casting="unsafe")
        # The sign, and the seven bits of the fraction that are next to the exponent.
        np.right_shift(shifted, 1, out=shifted)
        np.copyto(codes, shifted, casting="unsafe")
        np.bitwise_and(codes, 0x80, out=codes)
        np.copyto(planes.signs, upper, casting="unsafe")
        np.bitwise_and(planes.signs, 0x7F, out=planes.signs)
        np.bitwise_or(planes.signs, codes, out=planes.signs)

        base = max(int(exponents.max(initial=0)) - _CODES, 0)
        has_code = self._has_code[:count]
        np.greater(exponents, base, out=has_code)
        np.subtract(exponents, np.uint8(base), out=codes)
        np.multiply(codes, has_code.view(np.uint8), out=codes)
        places = np.empty(0, np.intp)
        if base:
            is_listed = self._is_listed[:count]
            np.not_equal(exponents, 0, out=is_listed)
            np.greater(is_listed, has_code, out=is_listed)
            places = np.flatnonzero(is_listed)
        if len(places) > count * _MOST_LISTED:
            return 0
        np.copyto(planes.codes, codes[:half])
        high = planes.codes[: count - half]
        np.left_shift(codes[half:], 4, out=codes[half:])
        np.bitwise_or(high, codes[half:], out=high)
        _HEADER.pack_into(out.data, 0, base, len(places))
        return planes.write_listed(places, exponents)

    def decode(self, data: Array, values: Array) -> None:
        """Decode ``data``, what ``code`` used, into ``values`` of the same dtype."""
        count, half = len(values), _half(len(values))
        base, listed = _HEADER.unpack_from(data.data)
        planes = _Planes(data, count, values.itemsize)
        codes, rest = self._codes[:count], self._rest[:count]
        np.bitwise_and(planes.codes, 0x0F, out=codes[:half])
        np.right_shift(planes.codes[: count - half], 4, out=codes[half:])
        if base:
            has_code = self._has_code[:count]
            np.not_equal(codes, 0, out=has_code)
            np.add(codes, np.uint8(base), out=codes)
            np.multiply(codes, has_code.view(np.uint8), out=codes)
        if listed:
            places, exponents = planes.listed(listed)
            codes[places] = exponents
        lower, shifted = planes.lower, self._shifted[:count]
        upper = values.view(np.uint16) if lower is None else self._upper[:count]
        np.copyto(upper, codes)
        np.left_shift(upper, 7, out=upper)
        np.bitwise_and(planes.signs, 0x7F, out=rest)
        np.bitwise_or(upper, rest, out=upper)
        np.bitwise_and(planes.signs, 0x80, out=rest)
        np.copyto(shifted, rest)
        np.left_shift(shifted, 8, out=shifted)
        np.bitwise_or(upper, shifted, out=upper)
        if lower is not None:
            bits = values.view(np.uint32)
            np.copyto(bits, upper)
            np.left_shift(bits, 16, out=bits)
            np.bitwise_or(bits, lower, out=bits)


class _Planes:
    """The parts of a coded block: bits of the same meaning are next to each other."""

    def __init__(self, data: Array, count: int, itemsize: int) -> None:
        start = _HEADER.size
        self.lower: Array | None = None
        """The lower two bytes of numbers of four."""
        if itemsize == 4:
            self.lower = data[start : start + 2 * count].view(np.uint16)
            start += 2 * count
        self.signs = data[start : start + count]
        start += count
        self.codes = data[start : start + _half(count)]
        """Two in each byte: one of the block's first half, and one of its second."""
        self._end = start + _half(count)
        self._data = data

    def write_listed(self, places: Array, exponents: Array) -> int:
        """List the exponents at these places; returns the length of all."""
        middle, end = self._listed_bounds(len(places))
        self._data[self._end : middle] = places.astype(np.uint32).view(np.uint8)
        self._data[middle:end] = exponents[places]
        return end

    def listed(self, count: int) -> tuple[Array, Array]:
        """The places and exponents that are listed."""
        middle, end = self._listed_bounds(count)
        places = self._data[self._end : middle].copy().view(np.uint32)
        return places, self._data[middle:end]

    def _listed_bounds(self, count: int) -> tuple[int, int]:
        middle = self._end + 4 * count
        return middle, middle + count


_LEAST_BYTES = 1 << 18
"""A smaller vector is not worth coding."""
_TRIED = 3
"""Vectors that are sent each way in a trial."""
_FIRST_PERIOD, _LONGEST_PERIOD = 64, 4096
"""Vectors from one trial to the next, which is later each time."""


@dataclass(slots=True)
class Trials:
    """Tries from time to time whether coded vectors arrive earlier than plain ones.

    All ranks try at the same vectors, and find the same unless the ways are about
    equal. The bits that arrive are the same either way.
    """

    clock: Callable[[], float] = time.perf_counter
    """In seconds."""
    _of_dtypes: dict[str, _Trial] = field(default_factory=dict)

    @contextmanager
    def of(self, dtype: np.dtype[Any], nbytes: int) -> Iterator[bool]:
        """Whether to code a vector, whose numbers are sent in this context.

        They have this dtype, and are as many bytes before they are coded.
        """
        if nbytes < _LEAST_BYTES or not is_coded(dtype):
            yield False
            return
        trial = self._of_dtypes.setdefault(dtype.name, _Trial())
        codes = trial.codes
        began_s = self.clock()
        yield codes
        trial.note(nbytes, self.clock() - began_s)


@dataclass(slots=True)
class _Trial:
    """The trial of a dtype, which begins again after a while."""

    number: int = 0
    """Of the next vector; the first are for the trial."""
    period: int = _FIRST_PERIOD
    best_rates: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Bytes in a second, of plain and of coded vectors."""
    most_bytes: int = 0
    """Of a vector so far. The rates of much smaller ones say little."""

    @property
    def codes(self) -> bool:
        if self.number < 2 * _TRIED:
            return self.number >= _TRIED
        plain, coded = self.best_rates
        return coded > plain

    def note(self, nbytes: int, elapsed_s: float) -> None:
        self.most_bytes = max(self.most_bytes, nbytes)
        if self.number < 2 * _TRIED:
            if 2 * nbytes < self.most_bytes:
                return
            way, rate = int(self.codes), nbytes / max(elapsed_s, 1e-9)
            self.best_rates[way] = max(self.best_rates[way], rate)
        self.number += 1
        if self.number == self.period:
            self.number, self.best_rates = 0, [0.0, 0.0]
            self.period = min(2 * self.period, _LONGEST_PERIOD)
