"""Runs cases of a theme while even small variables of optimizers are divided.

cases_with_pieces.py THEME RESULTS [CASE...]
"""

import runpy
import sys
from pathlib import Path

from tfcluster.runtime.partition import variable_placements

variable_placements.LEAST_BYTES = 1
theme = sys.argv.pop(1)
path = Path(__file__).with_name("cases") / f"{theme}.py"
sys.argv[0] = str(path)
runpy.run_path(str(path), run_name="__main__")
