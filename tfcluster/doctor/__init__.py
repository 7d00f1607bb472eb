"""``doctor``: checks every host, in parallel, for what would make a launch fail.

probe         runs on each host and prints plain facts; standard library only
probe_hosts   starts agents, has them run the probe, collects the facts
diagnosis     turns facts into problems and a table (pure)
"""
