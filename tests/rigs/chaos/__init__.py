"""Trials in which something breaks at a random time, on four kinds of sites.

``faults`` lists what can break and what must follow, ``plan`` draws a trial from its
seed, ``sites`` are this machine and rigs of hosts, ``programs`` what the tasks run,
``strikes`` breaks things, ``trial`` runs one trial and ``oracle`` judges what it left.
pytest runs a few trials, ``python -m tests.rigs.chaos`` as many as are wanted.
"""
