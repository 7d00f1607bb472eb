"""Prints numbered lines at an even rate: ``steady.py LINES LINES_PER_S``."""

import sys
import time

lines, rate = int(sys.argv[1]), float(sys.argv[2])
begin = time.monotonic()
for number in range(lines):
    due = begin + number / rate
    if (left := due - time.monotonic()) > 0:
        sys.stdout.flush()
        time.sleep(max(left, 0.05))  # write lines in batches, like a buffered program
    sys.stdout.write(f"line {number} loss 0.12345 accuracy 0.98765 something more\n")
