"""Benchmarks against other tools, which alternate with ours in one run.

``python -m benchmarks`` runs all of them, ``python -m benchmarks.startup`` only one.
"""
