"""The arrays that the cases of a job have written, by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kit.ranks import Ranks

Values = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Written:
    """Rank r of job j has written ``j-r.npz``, with arrays named ``case/key``."""

    folder: Path
    jobs: Mapping[str, Ranks]

    def of(self, job: str, case: str) -> list[Values]:
        """The arrays of a case, by rank."""
        size = len(self.jobs[job].exit_codes)
        return [self.by(rank, job, case) for rank in range(size)]

    def by(self, rank: int, job: str, case: str) -> Values:
        """One rank's arrays of a case. Raises the case's error, if it had one."""
        assert not any(self.jobs[job].exit_codes), self.jobs[job].outputs
        values = np.load(self.folder / f"{job}-{rank}.npz")
        start = f"{case}/"
        found = {k[len(start) :]: values[k] for k in values if k.startswith(start)}
        assert found, f"there is no case {case} in {job}"
        assert "error" not in found, str(found["error"])
        return found
