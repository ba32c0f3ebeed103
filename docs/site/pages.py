"""Pages of the site that lie outside of docs/: README, CONTRIBUTING, CHANGELOG and LICENSE, their links made to fit.

`mkdocs.yml` names this file as a hook. GitHub shows the same files where they lie, so nothing is written twice.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
}
"""File of the repository -> page of the site."""

LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


def moved(text: str, before: str, after: str) -> str:
    """A page with its relative links as they must be at `after` (in docs/) if they were right at `before` (from the
    root of the repository)."""

    def target(match: re.Match[str]) -> str:
        path = normpath(PurePosixPath(before).parent / match[1])
        path = OUTSIDE.get(path, path.removeprefix("docs/"))
        return relpath(path, PurePosixPath(after).parent)

    return LINK.sub(target, text)


def on_files(files: Any, config: Any) -> Any:
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        content = moved(text, name, page) if name.endswith(".md") else f"# License\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the pages of docs/ that lead out of it."""
    source = page.file.src_uri
    return markdown if source in OUTSIDE.values() else moved(markdown, f"docs/{source}", source)
