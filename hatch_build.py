"""Hooks of the build: the README's links, and files that are made from the sources.

A wheel has the man page and the completion scripts. They are made here, so that they
cannot differ from the code.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parent))

_COMPLETIONS = {
    "bash": "share/bash-completion/completions/tfcluster",
    "zsh": "share/zsh/site-functions/_tfcluster",
    "fish": "share/fish/vendor_completions.d/tfcluster.fish",
}


class ReadmeHook(MetadataHookInterface):
    """Sets the README, with links that work outside the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        from tfcluster import __version__
        from tools.index_readme import with_absolute_links

        written = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(written, metadata["urls"]["Source"], __version__)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class FilesHook(BuildHookInterface[Any]):
    """Adds the files to a wheel that are made from the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        for place, text in _generated().items():
            file = Path(self._folder.name) / Path(place).name
            if file.exists():
                raise RuntimeError(f"two files are called {file.name}")
            file.write_text(text, encoding="utf-8")
            kind = "shared_data" if place.startswith("share/") else "force_include"
            build_data[kind][str(file)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact: str) -> None:
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _generated() -> dict[str, str]:
    """The files by their place in the wheel."""
    from tfcluster import __version__, cli
    from tfcluster.commands.completion import SCRIPTS
    from tools.cli_reference import commands
    from tools.man_page import man_page

    return {
        "share/man/man1/tfcluster.1": man_page(
            list(commands(cli.cli, "tfcluster")), __version__
        ),
        **{place: SCRIPTS[shell] for shell, place in _COMPLETIONS.items()},
    }
