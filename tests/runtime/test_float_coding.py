"""Coded numbers: each bit comes back, and coding is chosen where it is faster."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as from_numpy

from tfcluster.runtime.collective import float_coding
from tfcluster.runtime.collective.float_coding import BLOCK, Coder, Trials, most_bytes
from tfcluster.runtime.tensor_types import Array

CODER = Coder()
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
COUNTS = [1, 2, 3, 1000, BLOCK - 1, BLOCK]


def coded(values: Array) -> Array | None:
    """What ``values`` are coded as, in memory that had other bits; None if not."""
    data = np.full(most_bytes(len(values), values.itemsize), 0xFF, np.uint8)
    used = CODER.code(values, data)
    return data[:used] if used else None


def bits(values: Array) -> Array:
    return values.view(f"u{values.itemsize}")


def assert_it_comes_back(values: Array, data: Array) -> None:
    result = np.full(len(values), 7.0, values.dtype)
    CODER.decode(data, result)
    np.testing.assert_array_equal(bits(result), bits(values))


def gradients(count: int, dtype: np.dtype) -> Array:
    """Numbers around 0.001, of which some are 0, negative 0, subnormal or small."""
    rng = np.random.default_rng(count)
    values = rng.normal(size=count).astype(np.float32) * np.float32(1e-3)
    values[::7], values[5::11], values[3::13] = 0.0, -0.0, 1e-41
    values[9::1000] = 1e-12
    rounded: Array = values.astype(dtype)
    return rounded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_gradients_come_back_from_fewer_bits(count: int, dtype: np.dtype) -> None:
    values = gradients(count, dtype)
    data = coded(values)
    assert data is not None
    assert_it_comes_back(values, data)
    if count >= 1000:
        least = {4: 0.875, 2: 0.75}[dtype.itemsize]
        assert least <= len(data) / values.nbytes < least + 0.02
        assert len(data) * float_coding.SHRINKS_LESS_THAN > values.nbytes


@given(
    st.sampled_from(DTYPES),
    st.data(),
    st.integers(0, 254),
    st.integers(0, 40),
)
def test_all_bits_come_back(
    dtype: np.dtype, data: st.DataObject, exponent: int, spread: int
) -> None:
    """Any signs and fractions; exponents next to each other, and any others."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    shift = 23 if dtype.itemsize == 4 else 7
    random = data.draw(from_numpy.arrays(unsigned, st.integers(1, 300)))
    places = np.arange(len(random)) % (spread + 1)
    exponents = np.minimum(exponent + places, 255).astype(unsigned)
    few = random & unsigned.type(~(0xFF << shift) & np.iinfo(unsigned).max)
    few |= exponents << unsigned.type(shift)
    few[::97] = random[::97]
    for values in (random.view(dtype), few.view(dtype)):
        if (result := coded(values)) is not None:
            assert_it_comes_back(values, result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_all_sizes_are_not_coded(dtype: np.dtype) -> None:
    values = np.geomspace(1e-30, 1e30, 5000).astype(dtype)
    assert coded(values) is None


def test_only_these_dtypes_are_coded() -> None:
    others = map(np.dtype, ("float64", "float16", "int32", "uint8", "complex64"))
    assert all(map(float_coding.is_coded, DTYPES))
    assert not any(map(float_coding.is_coded, others))


class Clock:
    """A clock that a sum advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("coded_s", [0.8, 1.2])
def test_the_faster_way_is_taken_after_a_trial(coded_s: float) -> None:
    clock = Clock()
    trials = Trials(clock=clock)
    ways = []
    for _ in range(500):
        with trials.of(DTYPES[0], 1 << 20) as codes:
            clock.now_s += coded_s if codes else 1.0
        ways.append(codes)
    tried = [False] * 3 + [True] * 3
    assert ways[:6] == ways[64:70] == tried
    faster = coded_s < 1.0
    assert set(ways[6:64]) == set(ways[70:192]) == {faster}
    # What is faster may change, and is tried less often from then on.
    assert ways[192:198] == tried
    assert set(ways[198:448]) == {faster}


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float32", 1000), ("float16", 1 << 20), ("int32", 1 << 20)]
)
def test_other_vectors_are_not_coded(dtype: str, nbytes: int) -> None:
    trials = Trials()
    for _ in range(20):
        with trials.of(np.dtype(dtype), nbytes) as codes:
            assert not codes


def test_each_dtype_has_a_trial_of_its_own() -> None:
    clock = Clock()
    trials = Trials(clock=clock)
    ways = []
    for number in range(20):
        dtype = DTYPES[number % 2]
        with trials.of(dtype, 1 << 20) as codes:
            clock.now_s += 2.0 if codes == (dtype == np.float32) else 1.0
        ways.append(codes)
    assert ways[12:] == [False, True] * 4


def test_vectors_that_are_much_smaller_are_not_tried() -> None:
    clock = Clock()
    trials = Trials(clock=clock)
    ways = []
    for number in range(40):
        nbytes = 1 << (24 if number % 4 == 0 else 20)
        with trials.of(DTYPES[0], nbytes) as codes:
            # Small vectors take as long as large ones, so their rate is low.
            clock.now_s += 0.8 if codes else 1.0
        ways.append(codes)
    assert ways[:24:4] == [False] * 3 + [True] * 3
    assert set(ways[24:]) == {True}
