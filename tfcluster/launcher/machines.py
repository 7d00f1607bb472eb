"""Warnings about machines that have several names in a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def machine_warnings(machines: Mapping[str, str]) -> Iterator[str]:
    """One line per machine; ``machines`` maps each name of a machine to its first."""
    for first in dict.fromkeys(machines.values()):
        names = [name for name, its in machines.items() if its == first]
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        yield (
            f"warning: {listed} are the same machine; its GPUs and local ranks are "
            "divided among all tasks there; list it once under 'hosts', as "
            f"{{host: {first}, slots: N}}"
        )
