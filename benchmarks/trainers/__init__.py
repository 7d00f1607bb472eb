"""Programs that train the same models with different frameworks.

Each is started once per rank, with the arguments of ``workload.parse``.
"""
