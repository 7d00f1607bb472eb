"""What tests use: launches, ranks, one machine as their oracle, and waiting."""

import os
from pathlib import Path

SITE = Path(__file__).parent / "site"
"""First on the PYTHONPATH of programs that tests start."""
PYTHONPATH = os.pathsep.join([str(SITE), str(Path(__file__).resolve().parents[2])])
"""For a program that imports TensorFlow and tfcluster's own modules."""
