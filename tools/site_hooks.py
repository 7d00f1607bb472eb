"""Hooks for building the site (mkdocs.yml): generated pages, and links out of docs/.

The pages in docs/ are also read in the repository, so their links to other folders are
relative; on the site they lead to the repository.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tfcluster import __version__
from tools.cli_reference import CommandHelp, commands
from tools.format_tables import with_tables

_CLI_PAGE = "reference/cli.md"
_LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of the command line, made from the commands themselves."""
    from tfcluster.cli import cli

    text = cli_page(list(commands(cli, "tfcluster")))
    files.append(File.generated(config, _CLI_PAGE, content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Point links out of docs/ to the repository, and add tables of JSON formats."""
    below = page.file.src_uri.count("/")

    def outside(match: re.Match[str]) -> str:
        target = match[2]
        ups = target.count("../")
        if ups <= below:
            return match[0]
        place = target.replace("../", "")
        return f"{match[1]}{config.repo_url}/blob/v{__version__}/{place}{match[3]}"

    return _LINK.sub(outside, with_tables(markdown))


def cli_page(found: list[CommandHelp]) -> str:
    """The page of all commands as Markdown."""
    lines = ["# Command line", ""]
    for command in found:
        lines += [f"## `{command.name}`", "", "```text", command.usage, "```", ""]
        for block in command.blocks:
            lines += ["```text", block.text, "```"] if block.verbatim else [block.text]
            lines.append("")
        if command.options:
            lines += ["| option | meaning |", "| --- | --- |"]
            lines += [
                f"| `{names}` | {_cell(about)} |" for names, about in command.options
            ]
            lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
