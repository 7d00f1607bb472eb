"""Shows what came back from the hosts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.text import byte_size, plural
from tfcluster.record.run_status import ResultsView

_SHOWN_HOSTS = 3


def result_lines(view: ResultsView) -> list[str]:
    """All lines about the results of one host; at least one line."""
    host = sanitise_word(view.host)
    if view.state == "shared":
        return [f"{host} shares the working directory: nothing to fetch"]
    lines = []
    if view.cause is None and not view.files and not view.missed_count:
        there = sanitise_word(view.there or "its working directory")
        lines.append(f"results from {host}: no file in {there} matches")
    elif view.cause is None or view.fetched or view.unchanged:
        lines.append(f"results from {host}: {_counts(view)}")
    if view.cause is not None:
        why = sanitise_word(view.cause)
        lines.append(f"warning: results from {host} are incomplete: {why}")
    for names, words in (
        (view.kept, "not replaced by the file of"),
        (view.growing, "still written to on"),
    ):
        lines += [
            f"{words} {host}: {sanitise_word(path)}: {sanitise_word(why)}"
            for path, why in names
        ]
    lines += [
        f"warning: not fetched from {host}: {sanitise_word(path)}: {sanitise_word(why)}"
        for path, why in view.missed
    ]
    if (more := view.missed_count - len(view.missed)) > 0:
        lines.append(f"warning: not fetched from {host}: {plural(more, 'more file')}")
    return lines


def result_summary(views: Sequence[ResultsView]) -> list[str]:
    """One line for each host whose results are incomplete, and one for the others."""
    lines = []
    for view in views:
        if view.state != "incomplete":
            continue
        why = view.cause or ", ".join(path for path, _ in view.missed[:_SHOWN_HOSTS])
        count = f"{plural(view.missed_count, 'file')} missing, " * bool(
            view.missed_count
        )
        lines.append(
            sanitise_word(f"results from {view.host} are incomplete: {count}{why}")
        )
    well = [view for view in views if view.state == "fetched"]
    for view in well[:_SHOWN_HOSTS]:
        lines.append(sanitise_word(f"results from {view.host}: {_counts(view)}"))
    if len(well) > _SHOWN_HOSTS:
        lines.append(f"results from {plural(len(well) - _SHOWN_HOSTS, 'more host')}")
    return lines


def progress_text(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """``fetching results: node1 12.4 MB of 80.0 MB``, for hosts not yet done."""
    sizes = {
        host: (int(progress.get("bytes") or 0), int(progress.get("of_bytes") or 0))
        for host, progress in hosts.items()
    }
    busy = {host: size for host, size in sizes.items() if size[0] < size[1]}
    amounts = ", ".join(
        f"{sanitise_word(host)} {byte_size(done)} of {byte_size(total)}"
        for host, (done, total) in list(busy.items())[:_SHOWN_HOSTS]
    )
    left = len(busy) - _SHOWN_HOSTS
    more = f" and {left} more hosts" if left > 0 else ""
    return f"fetching results: {amounts}{more}" if amounts else "fetching results"


def _counts(view: ResultsView) -> str:
    text = f"{plural(view.fetched, 'file')}, {byte_size(view.sent_bytes)}"
    return f"{text}; {view.unchanged:,} unchanged" if view.unchanged else text
