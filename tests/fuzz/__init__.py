"""Inputs from outside that nobody has written: every parser meets mutated data.

``targets`` says what is parsed and what must hold, ``trial`` runs one input, ``mutate``
and ``campaign`` find new ones with the help of line coverage. pytest runs a few inputs
of each target, ``python -m tests.fuzz`` as many as time permits.
"""
