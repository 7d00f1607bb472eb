"""Whether the rows of a sparse gradient are distinct."""

from __future__ import annotations

import numpy as np

from tfcluster.runtime.parameter_server.service import are_distinct


def test_rows_that_come_twice_are_seen() -> None:
    assert are_distinct(np.array([], np.int64))
    assert are_distinct(np.array([7, 3, 9]))
    assert not are_distinct(np.array([7, 3, 7]))
