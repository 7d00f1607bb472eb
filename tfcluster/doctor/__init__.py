"""``doctor``: look at every host, in parallel, for what would make a launch fail.

probe      runs on each host: plain facts, standard library only
examine    starts agents, has them run the probe, collects what it says
findings   from facts to problems, and to a table (pure)
"""
