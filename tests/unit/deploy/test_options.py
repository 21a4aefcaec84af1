"""JSON patches of `deploy/options`: what they make is valid for Kubernetes and taken by a node."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kvstore.cli.main import cli
from kvstore.units import GIB, TIB, parse_size
from tests.docs.commands import node_config
from tests.unit.deploy.manifests import CLUSTER_NODE, DEPLOY, NODE, POD_IP, workload

OPTIONS = DEPLOY / "options"
FOR_BOTH = ("disk.yaml", "hbm.yaml", "hugepages.yaml")
CASES = [*((option, node) for option in FOR_BOTH for node in (NODE, CLUSTER_NODE))]
CASES.append(("cert-manager.yaml", CLUSTER_NODE))


def patched(option: str, name: str) -> Any:
    """As kubectl and kustomize do it: additions at the end, replacements of what is there."""
    made = copy.deepcopy(workload(name))
    for change in yaml.safe_load((OPTIONS / option).read_text()):
        *way, last = change["path"].strip("/").split("/")
        target: Any = made
        for step in way:
            target = target[int(step)] if isinstance(target, list) else target[step]
        if last == "-":
            target.append(change["value"])
            continue
        place = int(last) if isinstance(target, list) else last
        if change["op"] == "replace":
            assert target[place] is not None
        else:
            assert (change["op"], place in target) == ("add", False)
        target[place] = change["value"]
    return made


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
    flags = dict(flag.partition("=")[::2] for flag in container(made)["args"])
    place = "/etc/kvstore/pki"
    files = {name: flags[f"--{name}"] for name in ("ca", "cert", "key")}
    assert files == {
        "ca": f"{place}/ca.crt",
        "cert": f"{place}/tls.crt",
        "key": f"{place}/tls.key",
    }
    assert not any("NODE_NAME" in flag for flag in container(made)["args"])
    volumes = {each["name"]: each for each in made["spec"]["template"]["spec"]["volumes"]}
    told = volumes["certificates"]["csi"]["volumeAttributes"]
    assert told["csi.cert-manager.io/dns-names"] == "${POD_NAME}.node.kvstore"
