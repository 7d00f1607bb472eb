"""Makes Keras train on all ranks, without a word in the program.

The only package that touches Keras's internals; ``begin`` puts the hooks in place.
"""

from __future__ import annotations

from tfcluster.runtime.keras.choosing import begin
from tfcluster.runtime.keras.session import Session

__all__ = ["Session", "begin"]
