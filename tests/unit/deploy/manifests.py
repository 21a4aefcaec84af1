"""The manifests of `deploy/examples`, as the tests look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
EXAMPLES = DEPLOY / "examples"
NODE = "node-daemonset.yaml"
ENGINE = "vllm-deployment.yaml"
CLUSTER_NODE = "cluster-node-daemonset.yaml"
CLUSTER_INDEX = "cluster-index.yaml"
ROUTER = "router.yaml"
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
    found: list[str] = container(name)["args"][1:]
    for key, value in {"POD_IP": POD_IP, **variables}.items():
        found = [flag.replace(f"$({key})", value) for flag in found]
    assert not any("$(" in flag for flag in found), found
    return found
