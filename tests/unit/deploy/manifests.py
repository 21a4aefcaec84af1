"""The manifests of `deploy/examples`, as the tests look at them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
EXAMPLES = DEPLOY / "examples"
NODE = "single/node.yaml"
ENGINE = "engine/vllm.yaml"
CLUSTER_NODE = "cluster/node.yaml"
CLUSTER_INDEX = "cluster/index.yaml"
ROUTER = "cluster/router.yaml"
WORKLOADS = (NODE, ENGINE, CLUSTER_NODE, CLUSTER_INDEX, ROUTER)
POD_IP = "10.0.0.7"


def documents(name: str) -> list[dict[str, Any]]:
    """All that an example has."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def workload(name: str) -> dict[str, Any]:
    """What of it runs pods."""
    (found,) = (each for each in documents(name) if "template" in each["spec"])
    return found


def pod(name: str) -> dict[str, Any]:
    """Its pods' specification."""
    found: dict[str, Any] = workload(name)["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    """The one container of it, besides those that come before."""
    found: dict[str, Any]
    (found,) = pod(name)["containers"]
    return found


def flags(name: str, **variables: str) -> list[str]:
    """Of a kvstore command in it, with what Kubernetes puts in."""
    return flags_of(container(name), **variables)


def flags_of(made: dict[str, Any], **variables: str) -> list[str]:
    """The same of a container, with its own variables in their order."""
    known = {"POD_IP": POD_IP, **variables}

    def expanded(text: str) -> str:
        for key, value in known.items():
            text = text.replace(f"$({key})", value)
        assert "$(" not in text, text
        return text

    for each in made["env"]:
        if "value" in each:
            known[each["name"]] = expanded(each["value"])
    return [expanded(flag) for flag in made["args"][1:]]


def applied_together() -> list[list[str]]:
    """The folders of each `kubectl apply` that README.md has."""
    lines = re.findall(r"^kubectl apply (.+)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    return [line.removeprefix("-f ").split(" -f ") for line in lines]
