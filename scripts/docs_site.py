"""What the documentation site needs beyond mkdocs: formulas as MathML, and the log of results as a page.

Formulas stand in the Markdown as GitHub reads them, between dollar signs, one for those within a line; browsers
render MathML without scripts. Files of the repository that are no pages of the site (records, data) keep their name but
lose their link.
"""

from __future__ import annotations

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE_DOCS = {
    "results/LOG.md": "log.md",
    "magicdec/data/embedded/README.md": "embedded-model.md",
}
FORMULA = re.compile(r"^\$\$\n?(.+?)\n?\$\$$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<![$\\w`])\$([^$\n`]+?)\$(?![$\w`])")
"""A formula within a line; a price ("$2") has no second sign right after its text."""
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in BESIDE_DOCS.items():
        files.append(
            File.generated(
                config, name, content=(ROOT / source).read_text(encoding="utf-8")
            )
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        return (
            f"[{text}]({BESIDE_DOCS[target]}{anchor or ''})"
            if target in BESIDE_DOCS
            else f"`{text.strip('`')}`"
        )

    formulas = FORMULA.sub(
        lambda match: convert(match.group(1), display="block"), markdown
    )
    formulas = INLINE.sub(
        lambda match: convert(match.group(1), display="inline"), formulas
    )
    return OUTSIDE.sub(link, formulas)
