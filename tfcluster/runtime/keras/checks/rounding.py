"""Tolerances for rounding when one number is computed in two ways."""

from __future__ import annotations

TOLERANCES = {"float64": 1e-9, "float32": 5e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""Relative errors that rounding explains, by type; the most precise type comes first.

They leave room for sums of many terms and for terms of both signs.
"""
