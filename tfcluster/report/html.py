"""Makes HTML from elements, so that no text can ever become markup. Pure.

A task's output, name and metrics may be anything: all text passes through here and is
escaped, and characters that are invisible or reorder text become visible.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tfcluster.console.sanitise import sanitise

Content: TypeAlias = "ET.Element | str | Iterable[Content]"


def element(tag: str, *content: Content, **attributes: str) -> ET.Element:
    """An element. ``class_`` is the attribute class, and ``aria_label`` aria-label."""
    made = ET.Element(
        tag,
        {
            name.rstrip("_").replace("_", "-"): _clean(value)
            for name, value in attributes.items()
        },
    )
    _append(made, content)
    return made


def document(title: str, style: str, policy: str, *content: Content) -> str:
    """A whole page. ``style`` and ``policy`` are our own text and are not escaped."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", style),
    )
    page = element("html", head, element("body", *content), lang="en")
    text = ET.tostring(page, encoding="unicode", method="html")
    return f"<!DOCTYPE html>\n{text}\n"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Content]],
    *,
    caption: str,
    numbers: Iterable[int] = (),
) -> ET.Element:
    """A scrollable table; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def kind(column: int) -> dict[str, str]:
        return {"class_": "number"} if column in right else {}

    heads = [
        element("th", name, scope="col", **kind(i)) for i, name in enumerate(header)
    ]
    body = [
        element(
            "tr",
            *(
                element("th", cell, scope="row")
                if column == 0
                else element("td", cell, **kind(column))
                for column, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", *heads)),
            element("tbody", *body),
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def lines(text: Iterable[str]) -> ET.Element:
    """Lines of a log, or of a file."""
    joined = "\n".join(text)
    return element("pre", joined, tabindex="0")


def _append(parent: ET.Element, content: Iterable[Content]) -> None:
    last: ET.Element | None = None
    for part in content:
        if isinstance(part, str):
            if last is None:
                parent.text = (parent.text or "") + _clean(part)
            else:
                last.tail = (last.tail or "") + _clean(part)
        elif isinstance(part, ET.Element):
            parent.append(part)
            last = part
        else:
            inner = list(part)
            _append(parent, inner)
            last = parent[-1] if len(parent) else last


def _clean(text: str) -> str:
    return sanitise(text)
