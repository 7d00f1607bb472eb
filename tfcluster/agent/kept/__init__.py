"""Kept interpreters: finding them on this host, starting them, taking one for a run.

``docs/protocols.md`` ("Kept interpreters") explains who talks to whom.
"""
