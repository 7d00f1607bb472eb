"""Benchmarks beside peers, each in one run of alternating trials.

``python -m benchmarks`` runs all of them, ``python -m benchmarks.startup`` one.
"""
