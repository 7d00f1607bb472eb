"""The agent: one process per host, which starts and supervises the tasks there.

It knows argv, environments, files, ports and signals; a task is only a name to it. It
imports only the standard library, so that the package can be shipped to any host.
``docs/protocols.md`` lists the frames of its protocol.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Serve one launcher on stdin and stdout. Returns an exit code, see ``guard``."""
    from tfcluster.agent.guard import guarded  # imported only when run
    from tfcluster.agent.supervisor import serve

    if argv:
        raise SystemExit(f"tfcluster.agent takes no arguments, not {list(argv)!r}")
    return guarded(serve)
