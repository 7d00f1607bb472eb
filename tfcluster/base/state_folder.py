"""Where the records of all runs are, by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_path(environ: Mapping[str, str]) -> Path:
    """The state folder, which need not exist; ``record.paths.state_dir`` makes it."""
    if folder := environ.get("TFCLUSTER_STATE_DIR"):
        return Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() follows links
    # XDG Base Directory Specification: a relative path is invalid and is ignored.
    if (folder := environ.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(folder) / "tfcluster"
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return home.absolute() / ".local" / "state" / "tfcluster"
