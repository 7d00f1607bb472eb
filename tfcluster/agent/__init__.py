"""The agent: one process on each host, which starts and supervises the tasks there.

It knows argv, environments, files, ports and signals; a task is an opaque word to it.
Only the standard library is imported, so that the package can be shipped to any host.
``docs/protocols.md`` has the frames that it speaks.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Serve one launcher on standard input and output; see ``guard`` for the result."""
    from tfcluster.agent.guard import guarded  # the cost of importing it only when run
    from tfcluster.agent.supervisor import serve

    if argv:
        raise SystemExit(f"tfcluster.agent takes no arguments, not {list(argv)!r}")
    return guarded(serve)
