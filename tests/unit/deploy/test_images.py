"""The image recipes: they copy what the package needs, start what exists, and manifests name them.

Does not cover: what the built images do (`tests/integration/deploy/test_images.py`).
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from kvstore import __version__
from tests.docs.commands import node_config, parse
from tests.unit.deploy.manifests import (
    CLUSTER,
    COMPONENTS,
    EXAMPLES,
    Object,
    component,
    flags,
    merged,
    objects,
    pod,
    rendered,
    template,
    workloads,
)

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = ROOT / "deploy" / "images"
RECIPE: Final = FOLDER / "Dockerfile"
RECIPES: Final = sorted(FOLDER.iterdir())
TRANSFER: Final = "requirements/transfer.txt"
GPU_TAG: Final = f"kvstore-node:{__version__}-gpu"
ROLES: Final = {
    "node": {"node", "events", "trace"},
    "index": {"node", "index", "redis"},
    "router": {"node", "router", "trace"},
}
"""Target → extras of its image."""
LABELS: Final = {
    *("title", "description", "version", "licenses", "source", "revision"),
    *("base.name", "base.digest"),
}


@cache
def stages() -> dict[str, list[tuple[str, str]]]:
    """Of the recipe, by name: instructions and what follows them; "" has those before the first."""
    text = re.sub(r"^#.*\n", "", RECIPE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in filter(None, text.splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parent, name = rest.split(" AS ")
            found[name] = [("FROM", parent)]
        else:
            found[name].append((instruction, rest))
    return found


def lines(stage: str, instruction: str) -> list[str]:
    return [rest for name, rest in stages()[stage] if name == instruction]


def labels(stage: str) -> dict[str, str]:
    pairs = re.findall(
        r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', str(lines(stage, "LABEL"))
    )
    return dict(pairs)


def _copied(text: str) -> set[str]:
    lines = re.findall(r"^COPY (?!--from)(.+) /\S+$", text, re.MULTILINE)
    return {source for line in lines for source in line.split()}


def _tags(path: Path) -> list[str]:
    return re.findall(r"-t (\S+) \.$", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_it_copies_all_that_an_installation_needs(path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    linked = [entry.resolve() for entry in (ROOT / "kvstore").iterdir() if entry.is_symlink()]
    needed |= {"kvstore", *(folder.name for folder in linked)}
    copied = _copied(path.read_text())
    assert copied - {TRANSFER} == needed
    assert all((ROOT / name).exists() for name in copied)


def test_what_is_copied_is_sent_to_the_builder_and_nothing_else() -> None:
    ignored, *sent, caches = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert (ignored, caches) == ("*", "**/__pycache__")
    wanted = set().union(*(_copied(path.read_text()) for path in RECIPES))
    assert set(sent) == {f"!{name}" for name in wanted}
    assert not fnmatch.filter(wanted, "*__pycache__*")


# ── stages ───────────────────────────────────────────────────────────────────────────────────────


def test_each_role_has_a_target_and_nothing_of_its_build() -> None:
    assert {"", "source", "common", *ROLES, *(f"{role}-build" for role in ROLES)} == set(stages())
    assert set(ROLES) == set(COMPONENTS)
    for role in ROLES:
        assert lines(role, "FROM") == ["common"]
        assert lines(role, "COPY") == [f"--from={role}-build /opt/kvstore /opt/kvstore"]
        assert lines(f"{role}-build", "FROM") == ["source"]
    assert "pip" not in str([stages()[stage] for stage in ("common", *ROLES)])


@pytest.mark.parametrize("role", ROLES)
def test_an_image_has_the_extras_of_its_role(role: str) -> None:
    (recipe,) = lines(f"{role}-build", "RUN")
    (found,) = re.findall(r"['\"]/src\[([\w,]+)(?:\$cuda)?\]['\"]", recipe)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(found.split(",")) == ROLES[role] <= project["optional-dependencies"].keys()
    assert "pip uninstall -y pip setuptools" in recipe


def test_the_node_has_nixl_without_what_it_does_not_need() -> None:
    (recipe,) = lines("node-build", "RUN")
    (pattern,) = re.findall(r"grep '(.+)' /src/requirements/transfer.txt", recipe)
    (line,) = re.findall(f"{pattern}.*$", (ROOT / TRANSFER).read_text(), re.MULTILINE)
    assert re.fullmatch(r"nixl-cu13==[\d.]+", line)
    assert "pip install --no-deps -r /tmp/nixl.txt" in recipe


# ── what an image says of itself ─────────────────────────────────────────────────────────────────


def test_the_base_is_named_by_its_digest() -> None:
    image, digest = (each.partition("=")[2] for each in lines("", "ARG"))
    assert re.fullmatch(r"docker\.io/library/python:3\.1[12]-slim-\w+", image)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    bases = [lines(stage, "FROM") for stage in ("source", "common")]
    assert bases == [["${PYTHON_IMAGE}@${PYTHON_DIGEST}"]] * 2


@pytest.mark.parametrize("role", ROLES)
def test_an_image_has_labels_of_oci(role: str) -> None:
    found = labels("common") | labels(role)
    assert found.keys() == LABELS
    assert (found["title"], found["version"]) == (f"kvstore-{role}", __version__)
    assert found["licenses"] == "Apache-2.0"
    assert (found["base.name"], found["base.digest"]) == ("$PYTHON_IMAGE", "$PYTHON_DIGEST")
    declared = {each.partition("=")[0] for each in lines("common", "ARG")}
    used = {value[1:] for value in found.values() if value.startswith("$")}
    assert declared == used, "an ARG before the first FROM is not known in a stage"


def test_images_run_as_the_user_of_the_manifest() -> None:
    (user,) = lines("common", "USER")
    assert user == "10001:10001"
    for part in COMPONENTS:
        assert lines(part, "USER") == []
        security = pod(objects(CLUSTER), part)["securityContext"]
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"


def test_what_is_written_to_belongs_to_the_user() -> None:
    (recipe,) = lines("common", "RUN")
    made = re.findall(r"install -d -o 10001 -g 10001 -m (\d+) (\S+)", recipe)
    assert {path: mode for mode, path in made} == {
        "/run/kvstore": "0711",
        "/var/lib/kvstore": "0700",
    }
    assert "-perm /6000 -exec chmod a-s" in recipe


def test_each_starts_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = json.loads(*lines("common", "ENTRYPOINT"))
    assert program == "kvstore"
    for role in ROLES:
        name, *given = json.loads(*lines(role, "CMD"))
        assert name == role == parse([name, *given])[0]
        if role == "node":
            assert str(node_config(given, monkeypatch).socket) == "/run/kvstore/node.sock"
        else:
            assert given == []


# ── manifests ────────────────────────────────────────────────────────────────────────────────────


def test_manifests_name_the_images_that_are_built() -> None:
    built = {tag for path in RECIPES for tag in _tags(path)}
    images = {f"kvstore-{role}:{__version__}" for role in ROLES}
    assert built == {*images, GPU_TAG, f"vllm-kvstore:{__version__}"}
    pods = [template(each) for name in EXAMPLES for each in workloads(objects(name))]
    used = {each["image"] for made in pods if made for each in made["spec"]["containers"]}
    assert built == {image for image in used if "kvstore" in image}
    for role in ROLES:
        assert f"--target {role} -t kvstore-{role}:{__version__} .\n" in RECIPE.read_text()
    assert f"--target node --build-arg GPU=1 -t {GPU_TAG} .\n" in RECIPE.read_text()


def _images(found: list[Object], part: str) -> set[str]:
    """Of all containers of a component."""
    made = [each for each in workloads(found) if component(each) == part]
    (spec,) = [(template(each) or {})["spec"] for each in made]
    return {each["image"] for each in (*spec["containers"], *spec.get("initContainers", []))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_component_has_its_own_image(name: str) -> None:
    found = objects(name)
    for part in {component(each) for each in workloads(found)} & set(COMPONENTS):
        has_hbm = part == "node" and any("--hbm" in flag for flag in flags(found, part))
        wanted = GPU_TAG if has_hbm else f"kvstore-{part}:{__version__}"
        assert {image for image in _images(found, part) if "envoy" not in image} == {wanted}


ALL_ROLES: Final[Object] = {"index": {"enabled": True}, "router": {"enabled": True}}
DIGEST: Final = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"image": {"registry": "r.example:5000/a"}}, "r.example:5000/a/kvstore-{}:" + __version__),
        ({"image": {"registry": "r.example", "tag": "7"}}, "r.example/kvstore-{}:7"),
        (
            {
                "image": {"registry": "r.example", "tag": "7"},
                **{role: {"image": f"s:5000/kvstore-{role}@{DIGEST}"} for role in ROLES},
            },
            f"s:5000/kvstore-{{}}@{DIGEST}",
        ),
        ({role: {"image": f"s:5000/kvstore-{role}:8"} for role in ROLES}, "s:5000/kvstore-{}:8"),
        ({role: {"image": f"s:5000/x-{role}"} for role in ROLES}, "s:5000/x-{}:" + __version__),
    ],
)
def test_a_registry_a_tag_and_a_digest_are_taken(values: Object, wanted: str) -> None:
    found = rendered(merged(ALL_ROLES, values))
    for role in ROLES:
        assert _images(found, role) == {wanted.format(role)}


@pytest.mark.parametrize(
    ("image", "wanted"),
    [("kvstore-node", "kvstore-node:7-gpu"), ("kvstore-node:8", "kvstore-node:8")],
)
def test_a_node_with_gpu_memory_has_the_image_for_it(image: str, wanted: str) -> None:
    values: Object = {"image": {"tag": "7"}, "node": {"image": image, "args": {"hbm": "8GiB"}}}
    assert _images(rendered(values), "node") == {wanted}
