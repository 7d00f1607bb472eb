"""Checks that results equal those of a single process; they do not change results."""
