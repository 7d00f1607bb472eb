"""Runs the tests of a file that imports TensorFlow: ``pytest_file.py PATH``."""

from __future__ import annotations

import os
import sys

import pytest

from tests.conftest import OWN_PROCESS

os.environ[OWN_PROCESS] = "1"
# Nothing of it belongs to the process that waits for this one.
os.environ.pop("PYTEST_XDIST_WORKER", None)
sys.exit(pytest.main(["-n0", "-q", sys.argv[1]]))
