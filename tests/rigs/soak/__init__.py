"""A long training with a fault every minute: does it end as if nothing had happened?

``program`` is what trains, ``training`` launches it and resumes it, ``usage`` samples
what its processes and files use, ``verdict`` compares. It shares sites with
``tests.rigs.chaos``.
"""
