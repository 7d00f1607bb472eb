"""``doctor``: checks all hosts in parallel for problems that would make a launch fail.

probe         runs on each host and prints plain facts; standard library only
probe_hosts   starts agents, has them run the probe, collects the facts
diagnosis     turns facts into problems and a table (pure)
"""
