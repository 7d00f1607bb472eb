"""Variables that a program's source sets before it imports TensorFlow."""

from __future__ import annotations

import pytest

from tfcluster.runtime.warm.import_variables import variables_set


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("os.environ['A'] = '1'", {"A": "1"}),
        ('    environ["A"]=""', {"A": ""}),
        ("os.environ['A'] = str(1)", {"A": None}),
        ("os.environ.setdefault('A', '1')", {"A": "1"}),
        ("os.environ.setdefault('SET', '1')", {}),
        ("os.environ['SET'] = '1'", {"SET": "1"}),
        ("os.putenv('A', '1')", {"A": "1"}),
        ("if os.environ['A'] == '1': pass", {}),
        ("x = os.environ.get('A', '1')", {}),
        ("# os.environ['A'] = '1'", {}),
        ("import tensorflow as tf\nos.environ['A'] = '1'", {}),
        ("import numpy\nos.environ['A'] = '1'\nfrom keras import x", {"A": "1"}),
        ("def f():\n    import keras\n    environ['A'] = '1'", {"A": "1"}),
    ],
)
def test_variables_are_found(source: str, found: dict[str, str | None]) -> None:
    assert variables_set(source, {"SET": "0"}) == found
