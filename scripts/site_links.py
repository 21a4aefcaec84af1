r"""Hook of mkdocs: links from the documentation to other files of the repository.

A page may link to SECURITY.md or deploy/README.md, and the link works on GitHub and in a clone. The
site has its own folder only, so that such a link leads to the repository, and a picture is copied
into the site. A link to a file that does not exist is left as it is: mkdocs refuses it (`strict`).
GitHub wants `\|` in a code span of a table, and Python-Markdown a bare `|`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "kvstore" / "docs"
PICTURES: Final = "pictures"
_CODE: Final = re.compile(r"`[^`\n]+`")
_LINK: Final = re.compile(r"(!?)(\[[^\]]*\]\()(\.\./[^)#\s]+)(#[^)\s]*)?\)")


def rewrite(markdown: str, page: Path, repository: str) -> tuple[str, set[Path]]:
    """The text with links that leave the documentation, and the pictures that it needs.

    `page`: its path below the documentation.
    """
    pictures: set[Path] = set()

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        path = Path(os.path.normpath(DOCS / page.parent / target))
        if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.exists():
            return found[0]
        if mark:
            pictures.add(path)
            up = "../" * len(page.parent.parts)
            return f"!{text}{up}{PICTURES}/{path.name})"
        kind = "tree" if path.is_dir() else "blob"
        return f"{text}{repository}/{kind}/main/{path.relative_to(ROOT)}{anchor or ''})"

    markdown = _CODE.sub(lambda span: span[0].replace("\\|", "|"), markdown)
    return _LINK.sub(link, markdown), pictures


def on_files(files: Any, config: Any) -> Any:
    """Pictures of the repository become files of the site."""
    from mkdocs.structure.files import File

    for file in list(files.documentation_pages()):
        text = (DOCS / file.src_uri).read_text()
        for picture in sorted(rewrite(text, Path(file.src_uri), "")[1]):
            name = f"{PICTURES}/{picture.name}"
            if name not in files.src_uris:
                files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page, with links that work in the site."""
    return rewrite(markdown, Path(page.file.src_uri), config.extra["repository"])[0]
