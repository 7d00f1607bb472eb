"""The record of runs: what was planned, what happened, and who is still alive.

Knows nothing about hosts, channels, colours or commands.
"""
