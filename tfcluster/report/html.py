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
            name.rstrip("_").replace("_", "-"): _clean(value)
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


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""Forbids scripts and requests: what a task has written cannot do anything."""

COLOURS = 8
"""How many colours the lines of a picture may have: ``--c0`` to ``--c7``."""

STYLE = """
:root {
  --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #d9dee5; --box: #f5f7f9;
  --good: #12733f; --bad: #b3261e; --fair: #8a5a00; --link: #1a5fb4;
  --c0: #1f6fd1; --c1: #c2570c; --c2: #12805c; --c3: #b3266e;
  --c4: #6b46c1; --c5: #0b7285; --c6: #8a6d00; --c7: #a03b2a; --muted: #9aa5b1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181e; --ink: #e3e8ee; --soft: #a3adb9; --rule: #333b46; --box: #1c222a;
    --good: #58c98b; --bad: #ff8a80; --fair: #e5b454; --link: #7ab8ff;
    --c0: #6cb0ff; --c1: #ff9e57; --c2: #4fd1a5; --c3: #ff86bd;
    --c4: #b9a0ff; --c5: #5bcbe0; --c6: #e3c34f; --c7: #ff9c8a; --muted: #66707c;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 1.5rem clamp(0.9rem, 4vw, 2.5rem) 4rem; max-width: 76rem;
  background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 {
  font-size: 1.6rem; line-height: 1.25; margin: 0 0 0.4rem; overflow-wrap: anywhere;
}
h2 {
  font-size: 1.2rem; margin: 2.6rem 0 0.8rem; padding-top: 0.9rem;
  border-top: 1px solid var(--rule);
}
h3 { font-size: 1rem; margin: 1.4rem 0 0.5rem; overflow-wrap: anywhere; }
p { margin: 0.5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
a { color: var(--link); }
nav { margin: 0.9rem 0 0; }
nav ul {
  display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; list-style: none; padding: 0;
  margin: 0;
}
.soft, figcaption small { color: var(--soft); }
.state {
  display: inline-block; font-weight: 600; padding: 0 0.6rem; border-radius: 1rem;
  border: 1px solid currentColor;
}
.good { color: var(--good); } .bad { color: var(--bad); } .fair { color: var(--fair); }
dl {
  display: grid; grid-template-columns: max-content minmax(0, 1fr);
  gap: 0.25rem 1.2rem; margin: 0.9rem 0;
}
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
code, pre {
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: 0.86rem;
}
pre {
  background: var(--box); border: 1px solid var(--rule); border-radius: 6px;
  padding: 0.7rem 0.9rem; overflow: auto; max-height: 26rem; margin: 0.6rem 0;
}
.failure { border-left: 4px solid var(--bad); padding-left: 1rem; margin: 1.2rem 0; }
.scroll { overflow-x: auto; margin: 0.8rem 0; }
table {
  border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums;
}
caption { text-align: left; color: var(--soft); padding-bottom: 0.3rem; }
th, td {
  text-align: left; vertical-align: top; padding: 0.25rem 1.2rem 0.25rem 0;
  border-bottom: 1px solid var(--rule);
}
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
.pictures {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.4rem 2rem;
}
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figcaption { margin-bottom: 0.35rem; font-weight: 600; overflow-wrap: anywhere; }
figcaption small { font-weight: 400; display: block; font-size: 0.85rem; }
figure.wide svg { min-width: 38rem; }
td { white-space: nowrap; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text {
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif !important;
}
.legend {
  display: flex; flex-wrap: wrap; gap: 0.1rem 1rem; list-style: none; padding: 0;
  margin: 0.3rem 0 0; font-size: 0.85rem;
}
.legend li { display: flex; align-items: center; gap: 0.4rem; overflow-wrap: anywhere; }
.key { flex: none; width: 1.3rem; height: 0; border-top: 3px solid; }
.key.dashed { border-top-style: dashed; }
.key.block { height: 0.7rem; border: 0; background: currentColor; border-radius: 2px; }
details { margin: 0.5rem 0; } summary { cursor: pointer; color: var(--soft); }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 30rem) {
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 0.5rem; }
  body { font-size: 15px; }
}
@media print { pre { max-height: none; } details > * { display: block; } }
"""
