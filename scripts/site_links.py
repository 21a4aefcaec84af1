r"""Hook of mkdocs: pages and links that leave the documentation, and names in tables.

A page may link to SECURITY.md or deploy/README.md, and the link works on GitHub and in a clone. The
site has its own folder only, and nobody has published the repository: such a link becomes its text
and the file's path, and a picture is copied into the site. A link to a file that does not exist is
left as it is: mkdocs refuses it (`strict`). GitHub wants `\|` in a code span of a table, and
Python-Markdown a bare `|`. deploy/README.md and bench/REPORT.md are pages of the site, too. Code in
a table's cell may break behind its spaces and before its brackets, and nowhere else (site.css).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "kvstore" / "docs"
PICTURES: Final = "pictures"
ELSEWHERE: Final = {
    "deploy.md": ROOT / "deploy" / "README.md",
    "report.md": ROOT / "bench" / "REPORT.md",
}
"""Pages of the site whose source lies outside of the documentation."""
_CODE: Final = re.compile(r"`[^`\n]+`")
_CELL: Final = re.compile(r"<td.*?</td>", re.DOTALL)
_CELL_CODE: Final = re.compile(r"<code>([^<]*)</code>")
_BREAK: Final = re.compile(r"(?<= )|(?=\[,)")
_LINK: Final = re.compile(r"(!?)(\[[^\]]*\]\()([^)#\s:]+)(#[^)\s]*)?\)")


def rewrite(markdown: str, page: Path) -> tuple[str, set[Path]]:
    """The text without links that leave the documentation, and the pictures that it needs.

    `page`: its path below the documentation.
    """
    pictures: set[Path] = set()

    source, up = _source(page), "../" * len(page.parent.parts)

    def link(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        path = Path(os.path.normpath(source.parent / target))
        inside = next((name for name, one in ELSEWHERE.items() if one == path), "")
        if path.is_relative_to(DOCS) and not source.is_relative_to(DOCS):
            inside = str(path.relative_to(DOCS))
        if inside:
            return f"{text}{up}{inside}{anchor or ''})"
        if path.is_relative_to(DOCS) or not path.is_relative_to(ROOT) or not path.exists():
            return found[0]
        if mark:
            pictures.add(path)
            return f"!{text}{up}{PICTURES}/{path.name})"
        name, label = str(path.relative_to(ROOT)), text[1:-2]
        return label if label == name else f"{label} (`{name}`)"

    markdown = _CODE.sub(lambda span: span[0].replace("\\|", "|"), markdown)
    return _LINK.sub(link, markdown), pictures


def _source(page: Path) -> Path:
    return ELSEWHERE.get(str(page), DOCS / page)


def unbroken(html: str) -> str:
    """The page with places in code of table cells where a line may end."""

    def code(found: re.Match[str]) -> str:
        return f"<code>{_BREAK.sub('<wbr>', found[1])}</code>"

    return _CELL.sub(lambda cell: _CELL_CODE.sub(code, cell[0]), html)


def on_files(files: Any, config: Any) -> Any:
    """Pages that lie elsewhere and pictures of the repository become files of the site."""
    from mkdocs.structure.files import File

    for name, source in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(source)))
    for file in list(files.documentation_pages()):
        text = _source(Path(file.src_uri)).read_text()
        for picture in sorted(rewrite(text, Path(file.src_uri))[1]):
            name = f"{PICTURES}/{picture.name}"
            if name not in files.src_uris:
                files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page, with links that work in the site."""
    return rewrite(markdown, Path(page.file.src_uri))[0]


def on_page_content(html: str, **_: Any) -> str:
    """The page, with names in tables that do not break in the middle."""
    return unbroken(html)
