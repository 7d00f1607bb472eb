"""Variables that a program's source sets before it imports TensorFlow."""

from __future__ import annotations

import pytest

from tfcluster.runtime.warm.import_variables import variables_set

OWN = "def seed():\n    os.environ['TF_OWN'] = '1'"
MODULES = {
    "own": OWN,
    "package.own": OWN,
    "uses": "import own\nimport tensorflow\nos.environ['TF_LATE'] = '1'",
    "mutual": "import mutual\nos.environ['TF_MUTUAL'] = '1'",
}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("os.environ['A'] = '1'", {"A": "1"}),
        ('if x:\n    environ["A"]=""', {"A": ""}),
        ("os.environ['A'] = '1'; os.environ['B'] = '2'", {"A": "1", "B": "2"}),
        ("os.environ.update(TF_A='1', B='2')", {"TF_A": "1", "B": "2"}),
        ("os.environ.update({'TF_A': '1', 'TF_B': x})", {"TF_A": "1", "TF_B": None}),
        ("for n in ('TF_A', 'TF_B'): os.environ[n] = x", {"TF_A": None, "TF_B": None}),
        ("set_variable('TF_A', '1')", {"TF_A": "1"}),
        ("print(os.environ.get('TF_A', '1'), os.getenv('TF_B'))", {}),
        ("import own\nown.seed()", {"TF_OWN": "1"}),
        ("def f():\n    from package import own", {"TF_OWN": "1"}),
        ("import uses\nos.environ['A'] = '1'", {"TF_OWN": "1"}),
        ("import mutual", {"TF_MUTUAL": "1"}),
        ("no source", {}),
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
    assert variables_set(source, {"SET": "0"}, MODULES.get) == found
