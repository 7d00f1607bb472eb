"""Inputs from outside that nobody has written: every parser meets mutated data.

``targets`` says what is parsed and what must hold, ``trial`` runs one input, and
``strategies`` makes them. pytest runs a few inputs of each target, ``make fuzz`` many.
"""
