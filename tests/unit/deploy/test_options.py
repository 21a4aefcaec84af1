"""Patches of `deploy/options`: what they make is valid for Kubernetes and taken by a node."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvstore.cli.main import cli
from kvstore.units import GIB, TIB, parse_size
from tests.docs.commands import node_config
from tests.unit.deploy.manifests import CLUSTER_NODE, DEPLOY, NODE, POD_IP, flags_of, workload

OPTIONS = DEPLOY / "options"
FOR_BOTH = ("disk.yaml", "hbm.yaml", "hugepages.yaml")
CASES = [*((option, node) for option in FOR_BOTH for node in (NODE, CLUSTER_NODE))]
CASES.append(("cert-manager.yaml", CLUSTER_NODE))


MERGE_KEYS = {"containers": "name", "volumes": "name", "env": "name"}
"""List → field by which Kubernetes merges its entries; other lists are replaced."""


def patched(option: str, name: str) -> Any:
    """As kubectl and kustomize do it."""
    made, patch = copy.deepcopy(workload(name)), yaml.safe_load((OPTIONS / option).read_text())
    if isinstance(patch, dict):
        assert [patch["kind"], patch["metadata"]] == [made["kind"], {"name": "kvstore-node"}]
        return merged(made, patch)
    for change in patch:
        *way, last = change["path"].strip("/").split("/")
        target: Any = made
        for step in way:
            target = target[int(step)] if isinstance(target, list) else target[step]
        if last == "-":
            target.append(change["value"])
        elif change["op"] == "test":
            assert target[last] == change["value"]
        else:
            assert (change["op"] == "replace") == (last in target)
            target[last] = change["value"]
    return made


def merged(target: Any, patch: Any, name: str = "") -> Any:
    """A strategic merge: entries of a list by their names, null deletes."""
    if isinstance(patch, dict):
        made = {**target, **{key: merged(target.get(key, {}), patch[key], key) for key in patch}}
        return {key: value for key, value in made.items() if value is not None}
    if name in MERGE_KEYS:
        key = MERGE_KEYS[name]
        changes = {each[key]: each for each in patch}
        assert changes.keys() <= {each[key] for each in target}, "of entries that are there"
        return [merged(each, changes.get(each[key], {})) for each in target]
    return patch


@pytest.mark.parametrize("option", FOR_BOTH)
def test_a_patch_by_position_finds_the_container_by_its_name_first(option: str) -> None:
    first, *changes = yaml.safe_load((OPTIONS / option).read_text())
    place = "/spec/template/spec/containers/0/"
    assert first == {"op": "test", "path": f"{place}name", "value": "node"}
    assert not [each for each in changes if re.search(r"/\d", each["path"].removeprefix(place))]


def container(made: Any) -> Any:
    return made["spec"]["template"]["spec"]["containers"][0]


def test_every_option_is_looked_at() -> None:
    assert {option for option, _ in CASES} == {path.name for path in OPTIONS.iterdir()}


@pytest.mark.parametrize(("option", "name"), CASES)
def test_what_comes_out_is_valid_for_kubernetes(option: str, name: str) -> None:
    made = patched(option, name)
    assert kubernetes_validate.validate(made, "1.34", strict=True) == "1.34"
    its = made["spec"]["template"]["spec"]
    volumes = {each["name"] for each in its["volumes"]}
    for each in [*its["containers"], *its["initContainers"]]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_node_takes_its_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    made = patched("disk.yaml", NODE)
    args = [flag.replace("$(POD_IP)", POD_IP) for flag in container(made)["args"][1:]]
    file = node_config(args, monkeypatch).file
    assert file is not None
    assert file.capacity_bytes == TIB
    mounts = {each["mountPath"]: each["name"] for each in container(made)["volumeMounts"]}
    volumes = {each["name"]: each for each in made["spec"]["template"]["spec"]["volumes"]}
    host = volumes[mounts[str(file.directory)]]["hostPath"]
    assert host["type"] == "Directory", "of a disk that is not mounted nothing is made"


@pytest.mark.parametrize("name", [NODE, CLUSTER_NODE])
def test_the_slab_is_a_flag_that_the_node_takes(name: str) -> None:
    made = patched("hbm.yaml", name)
    (flag,) = [arg for arg in container(made)["args"] if arg.startswith("--hbm=")]
    assert parse_size(flag.removeprefix("--hbm=")) == 8 * GIB
    assert "--hbm" in {option for each in cli.commands["node"].params for option in each.opts}
    spec = made["spec"]["template"]["spec"]
    assert (spec["hostIPC"], spec["runtimeClassName"]) == (True, "nvidia")


def test_huge_pages_are_as_many_as_dram() -> None:
    made = container(patched("hugepages.yaml", NODE))
    assert (
        made["resources"]["requests"] == made["resources"]["limits"]
        or "cpu" not in (made["resources"]["limits"])
    )
    limits = made["resources"]["limits"]
    assert f"--dram={limits['hugepages-2Mi']}B" in made["args"]
    assert parse_size(limits["memory"] + "B") == 2 * GIB


def test_each_node_gets_its_own_certificate() -> None:
    made = patched("cert-manager.yaml", CLUSTER_NODE)
    flags = dict(flag.partition("=")[::2] for flag in flags_of(container(made), NODE_NAME="gpu-1"))
    place = "/etc/kvstore/pki"
    files = {name: flags[f"--{name}"] for name in ("ca", "cert", "key")}
    assert files == {
        "ca": f"{place}/ca.crt",
        "cert": f"{place}/tls.crt",
        "key": f"{place}/tls.key",
    }
    volumes = {each["name"]: each for each in made["spec"]["template"]["spec"]["volumes"]}
    assert volumes["certificates"].keys() == {"name", "csi"}, "and no secret"
    assert volumes["socket"]["hostPath"]["path"] == "/run/kvstore", "others stay"
    told = volumes["certificates"]["csi"]["volumeAttributes"]
    assert told["csi.cert-manager.io/dns-names"] == "${POD_NAME}.node.kvstore"
