"""For mkdocs: links from the documentation to files beside it lead to the repository.

The pages are read in the repository as well, where these links work as they stand; the site holds
only `kvstore/docs`. A file that is not there ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "kvstore" / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page, with the path of a file instead of a link that leads out of the site."""
    folder = (DOCS / page.file.src_uri).parent

    def lead(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {match[2]}, which is not there")
        path = f"`{target.relative_to(ROOT)}`"
        text = match[1].strip("`")
        return path if text.endswith((".md", "/")) else f"{match[1]} ({path})"

    return _LINK.sub(lead, markdown)
