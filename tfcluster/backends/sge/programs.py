"""Where Grid Engine's programs lie, as the environment of a job tells."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tfcluster.errors import StartError


def find_program(name: str, env: Mapping[str, str]) -> str:
    """The path of qrsh or one of its kin. Raises StartError where there is none.

    A job's PATH may lack it; then it lies where the rest of Grid Engine does.
    """
    folders = [env.get("PATH", "")]
    if root := env.get("SGE_ROOT"):
        arch = env.get("SGE_ARCH") or env.get("ARC", "")
        folders.append(str(Path(root, "bin", arch)))
    for folder in folders:
        if found := shutil.which(name, path=folder):
            return found
    raise StartError(
        f"{name} is not found",
        hint="put Grid Engine's programs on the PATH of the job",
    )
