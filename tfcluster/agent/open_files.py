"""The limit on the number of files that this process may open."""

from __future__ import annotations

import resource


def allow(count: int) -> None:
    """Raise the soft limit to ``count``, as far as the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
