"""Makes Keras train on all ranks, without a word in the program.

The only package that touches Keras's internals; ``begin`` puts the hooks in place.
"""

from __future__ import annotations

from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies.select import begin

__all__ = ["Session", "begin"]
