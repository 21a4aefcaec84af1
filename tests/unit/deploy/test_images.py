"""The image recipes: they copy what the package needs, and start what exists."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from kvstore import __version__
from tests.docs.commands import node_config
from tests.unit.deploy.manifests import (
    CLUSTER,
    COMPONENTS,
    EXAMPLES,
    objects,
    pod,
    template,
    workloads,
)

ROOT = Path(__file__).resolve().parents[3]
IMAGE = ROOT / "deploy" / "images" / "Dockerfile"
IMAGES = sorted((ROOT / "deploy" / "images").iterdir())
TRANSFER = "requirements/transfer.txt"


def _copied(text: str) -> set[str]:
    lines = re.findall(r"^COPY (?!--from)(.+) /\S+$", text, re.MULTILINE)
    return {source for line in lines for source in line.split()}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_it_copies_all_that_an_installation_needs(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    linked = [entry.resolve() for entry in (ROOT / "kvstore").iterdir() if entry.is_symlink()]
    needed |= {"kvstore", *(folder.name for folder in linked)}
    copied = _copied(path.read_text())
    assert copied - {TRANSFER} == needed
    assert all((ROOT / name).exists() for name in copied)


def test_the_node_has_what_flags_of_a_cluster_need() -> None:
    (extras,) = re.findall(r"'/src\[(.+)\]'", IMAGE.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"node", "index", "redis", "events", "router", "cuda"} == set(extras.split(","))
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (pattern,) = re.findall(r"grep '(.+)' /src/requirements/transfer.txt", IMAGE.read_text())
    (line,) = re.findall(f"{pattern}.*$", (ROOT / TRANSFER).read_text(), re.MULTILINE)
    assert re.fullmatch(r"nixl-cu13==[\d.]+", line)


def test_the_node_starts_with_flags_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    text = IMAGE.read_text()
    (program,) = json.loads(re.findall(r"^ENTRYPOINT (.+)$", text, re.MULTILINE)[0])
    command, *flags = json.loads(re.findall(r"^CMD (.+)$", text, re.MULTILINE)[0])
    assert (program, command) == ("kvstore", "node")
    assert str(node_config(flags, monkeypatch).socket) == "/run/kvstore/node.sock"


def test_the_image_runs_as_the_user_of_the_manifest() -> None:
    text = IMAGE.read_text()
    (user,) = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
    for part in COMPONENTS:
        assert int(user) == pod(objects(CLUSTER), part)["securityContext"]["runAsUser"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_manifests_name_the_images_that_are_built(path: Path) -> None:
    (tag,) = re.findall(r"-t (\S+) \.$", path.read_text(), re.MULTILINE)
    assert tag.endswith(f":{__version__}")
    pods = [template(each) for name in EXAMPLES for each in workloads(objects(name))]
    used = {each["image"] for made in pods if made for each in made["spec"]["containers"]}
    assert tag in used
