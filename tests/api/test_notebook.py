"""Launches from a notebook, in a real Jupyter kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cluster import DEADLINE_S, Cluster

pytestmark = pytest.mark.slow

# In a process of its own: it starts threads and an event loop.
EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
client = NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True)
with client.setup_kernel():
    for number, cell in enumerate(notebook.cells):
        client.execute_cell(cell, number)
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""
WAITS = "echo up; until [ -e go ]; do sleep 0.02; done"
LAUNCH = f"""
import pathlib, threading
import tfcluster
run = tfcluster.launch(
    command=["bash", "-c", "{WAITS}"],
    workers=2,
    name="{{name}}",
    settings={{{{"runtime.strategy": "none"}}}},
)
next(run.logs(follow=True))
"""


def _executed(folder: Path, cluster: Cluster, *cells: str) -> list[Any]:
    """The outputs of each cell. The kernel has ended by then."""
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        input=json.dumps(cells),
        env=cluster.environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_notebook_watches_a_run(cluster: Cluster) -> None:
    """The view is one output that is redrawn; a run ends with its kernel."""
    _, watched, value, typed, module, _ = _executed(
        cluster.folder,
        cluster,
        LAUNCH.format(name="watched"),
        "threading.Timer(0.5, pathlib.Path('go').touch).start()\n"
        "run.watch(refresh_s=0.1)",
        "run",
        "def f(): return 1\ntfcluster.run(f)",
        "pathlib.Path('nb_work.py').write_text('def f(): return [1, None]')\n"
        "import nb_work\ntfcluster.run(nb_work.f)",
        "pathlib.Path('go').unlink()\n" + LAUNCH.format(name="left"),
    )
    display, result = watched
    assert display["output_type"] == "display_data"
    assert "  succeeded" in display["data"]["text/plain"]
    assert display["data"]["text/html"].startswith("<pre>watched-")
    assert result["data"]["text/plain"] == "Outcome(exit_code=0, state='succeeded')"
    assert "<pre>watched-" in value[0]["data"]["text/html"]
    assert typed[0]["ename"] == "ConfigError"
    assert "%%writefile train.py" in typed[0]["evalue"]
    assert module[-1]["data"]["text/plain"] == "[1, None]"
    (left,) = (run for run in cluster.run_ids() if run.startswith("left-"))
    assert cluster.recorded(left)["state"] == "stopped"
