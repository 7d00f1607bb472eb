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
    node = ET.Element(
        tag,
        {
            name.rstrip("_").replace("_", "-"): sanitise(value)
            for name, value in attributes.items()
        },
    )
    _append(node, content)
    return node


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
    return element("pre", "\n".join(text), tabindex="0")


def _append(parent: ET.Element, content: Iterable[Content]) -> None:
    last: ET.Element | None = None
    for part in content:
        if isinstance(part, str):
            if last is None:
                parent.text = (parent.text or "") + sanitise(part)
            else:
                last.tail = (last.tail or "") + sanitise(part)
        elif isinstance(part, ET.Element):
            parent.append(part)
            last = part
        else:
            inner = list(part)
            _append(parent, inner)
            last = parent[-1] if len(parent) else last


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""Forbids scripts and requests: what a task has written cannot do anything."""

COLOURS = 8
"""How many colours the lines of a picture may have: ``--c0`` to ``--c7``."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #d9dee5; --box: #f5f7f9;
  --good: #12733f; --bad: #b3261e; --fair: #8a5a00;
  --c0: #1f6fd1; --c1: #c2570c; --c2: #12805c; --c3: #b3266e;
  --c4: #6b46c1; --c5: #0b7285; --c6: #8a6d00; --c7: #a03b2a; --muted: #9aa5b1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181e; --ink: #e3e8ee; --soft: #a3adb9; --rule: #333b46; --box: #1c222a;
    --good: #58c98b; --bad: #ff8a80; --fair: #e5b454;
    --c0: #6cb0ff; --c1: #ff9e57; --c2: #4fd1a5; --c3: #ff86bd;
    --c4: #b9a0ff; --c5: #5bcbe0; --c6: #e3c34f; --c7: #ff9c8a; --muted: #66707c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem clamp(0.9rem, 4vw, 2.5rem); max-width: 76rem;
  background: var(--paper); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; }
h2 { font-size: 1.2rem; margin-top: 2.6rem; border-top: 1px solid var(--rule); }
a { color: inherit; }
nav ul, .legend {
  display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; padding: 0;
}
.soft, dt, small, caption, summary, footer { color: var(--soft); }
.state { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); } .fair { color: var(--fair); }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 1.2rem; }
dd { margin: 0; }
pre {
  background: var(--box); padding: 0.7rem 0.9rem; overflow: auto; max-height: 26rem;
}
.failure { border-left: 4px solid var(--bad); padding-left: 1rem; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
table {
  border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums;
}
caption { text-align: left; }
th, td {
  text-align: left; padding: 0.25rem 1.2rem 0.25rem 0; white-space: nowrap;
  border-bottom: 1px solid var(--rule); font-weight: normal;
}
.number { text-align: right; }
.pictures {
  display: grid; gap: 1.4rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
}
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
figcaption small { font-weight: 400; display: block; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure.wide svg { min-width: 38rem; }
svg text { font-family: system-ui, sans-serif !important; }
.legend { margin: 0.3rem 0 0; font-size: 0.85rem; }
.legend li { display: flex; align-items: center; gap: 0.4rem; }
.key { flex: none; width: 1.3rem; border-top: 3px solid; }
.key.dashed { border-top-style: dashed; }
.key.block { border-top-width: 0.7rem; }
@media print { pre { max-height: none; } details > * { display: block; } }
"""
