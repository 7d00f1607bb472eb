"""Prints, logs and writes to a file on every rank."""

import logging
import sys
from pathlib import Path

import keras

print("all of it")
print("as an error", file=sys.stderr)
with Path("notes.txt").open("a") as notes:
    print("kept", keras.backend.backend(), file=notes)
logging.warning("careful")
