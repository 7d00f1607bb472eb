"""Plain data in files: round trips, and messages for what cannot be sent."""

from __future__ import annotations

import stat
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tfcluster.base import plain_data

KEYS = some.one_of(some.text(), some.integers(), some.booleans(), some.none())
LEAVES = some.one_of(
    KEYS, some.binary(), some.floats(allow_nan=False), some.just("\0"), some.just(())
)
PLAIN = some.recursive(
    LEAVES,
    lambda below: some.one_of(
        some.lists(below),
        some.lists(below).map(tuple),
        some.dictionaries(KEYS, below),
        some.dictionaries(some.tuples(KEYS), below),
    ),
    max_leaves=20,
)


def _again(folder: Path, value: object) -> Any:
    path = folder / "data.zip"
    plain_data.write(str(path), value, "x")
    return plain_data.read(str(path))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=PLAIN)
def test_plain_values_come_back(tmp_path: Path, value: object) -> None:
    found = _again(tmp_path, value)
    assert found == value
    assert repr(found) == repr(value)  # 1, True and 1.0 are equal


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float16).reshape(2, 3),
        np.array(7, np.int64),
        np.zeros((0, 4), np.complex64),
        np.asfortranarray(np.ones((2, 3))),
        np.array(["a", "bc"]),
        np.arange(10)[::2],
    ],
)
def test_arrays_keep_dtype_and_shape(tmp_path: Path, array: Any) -> None:
    (found,) = _again(tmp_path, [array])
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()
    found += found  # a copy of its own


def test_scalars_of_numpy_stay_scalars(tmp_path: Path) -> None:
    found = _again(tmp_path, {"a": np.float32(0.1), "b": np.bool_(True)})
    assert (type(found["a"]), type(found["b"])) == (np.float32, np.bool_)
    assert found["a"] == np.float32(0.1)


def test_files_are_private_and_hold_no_pickle(tmp_path: Path) -> None:
    _again(tmp_path, [np.ones(3)])
    path = tmp_path / "data.zip"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with zipfile.ZipFile(path) as members:
        assert members.namelist() == ["data.json", "0.npy"]
    assert list(tmp_path.iterdir()) == [path]


class Model:
    def get_weights(self) -> list[Any]:
        return []


class Tensor:
    def numpy(self) -> Any:
        return None


LOOP: list[Any] = [1]
LOOP.append({"again": LOOP})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "x is an object; what can be sent: None, bool,"),
        ([1, {"model": Model()}], r"x\[1\]\['model'\] is a Model \(.*get_weights\(\)"),
        ((Tensor(),), r"x\[0\] is a Tensor .*; send its numpy\(\)"),
        ({(1, object()): 2}, r"a key of x\[1\] is an object"),
        (np.array([None]), "x is a NumPy array of objects"),
        (LOOP, r"x\[1\]\['again'\] contains itself"),
        ("\ud800", "x is no valid text"),
        ({1}, "x is a set;"),
        (OrderedDict(a=1), "x is an OrderedDict"),
    ],
)
def test_what_cannot_be_sent_is_named_with_its_path(
    tmp_path: Path, value: object, message: str
) -> None:
    with pytest.raises(plain_data.NotPlainError, match=message):
        _again(tmp_path, value)
    assert list(tmp_path.iterdir()) == []


def test_bytes_take_subclasses_as_their_base_class() -> None:
    value = {"a": OrderedDict(b=(1, np.arange(3.0)))}
    found = plain_data.unpacked(plain_data.packed(value, "x"))
    assert type(found["a"]) is dict
    np.testing.assert_array_equal(found["a"]["b"][1], np.arange(3.0))


def test_dtypes_that_numpy_does_not_know_are_named(tmp_path: Path) -> None:
    void = np.zeros(2, "V2")
    with pytest.raises(plain_data.NotPlainError, match="x is a NumPy array of void16"):
        _again(tmp_path, void)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.zip"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(ValueError, match="is damaged"):
        plain_data.read(str(path))
