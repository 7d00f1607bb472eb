"""Makes the README for a package index, which has no other files."""

from __future__ import annotations

import re

_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


def with_absolute_links(readme: str, source: str, version: str) -> str:
    """The README with links to this version's files in the repository at ``source``."""
    base = f"{source.rstrip('/')}/blob/v{version}/"
    return _LINK.sub(lambda match: f"{match[1]}{base}{match[2]}{match[3]}", readme)
