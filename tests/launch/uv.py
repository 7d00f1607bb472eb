"""uv, installed into an environment of the tests' own if the machine has none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def installed_uv(folder: Path) -> str:
    """The path of uv; skips the test if it cannot be installed."""
    found = shutil.which("uv")
    if found is not None:
        return found
    home = folder / "uv"
    for argv in (
        (sys.executable, "-m", "venv", str(home)),
        (str(home / "bin" / "pip"), "install", "--quiet", "uv"),
    ):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"uv cannot be installed: {done.stderr[-200:]}")
    return str(home / "bin" / "uv")
