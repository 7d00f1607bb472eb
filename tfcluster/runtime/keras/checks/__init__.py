"""Checks that a result is the one of a single process; none of them changes it."""
