"""What no text of the repository contains: paths of one machine, hosts of package registries."""

from __future__ import annotations

import re

from tests.style.tree import ROOT, files

# Written in pieces, so that this file does not find itself.
PLACES = [
    "/" + "work/",
    "/" + "root/",
    "/" + "home/",
    "/" + "Users/",
    "/" + "opt/pypi",
    "py" + "pi.org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "hugging" + "face.co",
    "crates" + ".io",
    "npm" + "js.org",
]
_PLACES = re.compile("|".join(map(re.escape, PLACES)))


def test_no_machine_and_no_registry_is_named() -> None:
    found = []
    for file in files():
        try:
            text = (ROOT / file).read_text()
        except UnicodeDecodeError:
            continue  # a picture
        found += [
            f"{file}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if _PLACES.search(line)
        ]
    assert not found, "\n" + "\n".join(found)


def test_each_place_is_seen() -> None:
    assert all(_PLACES.search(f"see {place}x") for place in PLACES)
