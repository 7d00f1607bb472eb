"""Finds Grid Engine's programs from the environment of a job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tfcluster.errors import StartError


def find_program(name: str, env: Mapping[str, str]) -> str:
    """The path of a program such as qrsh. Raises StartError if there is none.

    A program that is not on the job's PATH is sought below SGE_ROOT.
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
