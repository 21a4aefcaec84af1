"""The chart as the tests look at it: rendered by Helm, and its manifests in `deploy/examples`."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, Final

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from scripts import chart
from tests.unit.deploy.crds import CRDS

DEPLOY: Final = chart.ROOT / "deploy"
EXAMPLES: Final = tuple(path.stem for path in sorted((chart.CHART / "values").iterdir()))
COMPONENTS: Final = ("node", "index", "router")
CLUSTERS: Final = tuple(name for name in EXAMPLES if name != "one-node")
ONE_NODE: Final = "one-node"
CLUSTER: Final = "cluster"
POD_IP: Final = "10.0.0.7"
INSTANCE: Final = "app.kubernetes.io/instance"
COMPONENT: Final = "app.kubernetes.io/component"
Object = dict[str, Any]


ALL: Object = {
    "node": {"disk": {"size": "1TiB"}},
    "index": {"enabled": True},
    "router": {"enabled": True},
    "monitoring": {key: {"enabled": True} for key in ("serviceMonitors", "rules", "dashboard")},
    "engines": {
        "a": {"autoscaling": {"kind": "keda"}},
        "node": {"kind": "LeaderWorkerSet", "autoscaling": {"kind": "hpa"}},
        "p": {"role": "prefill", "autoscaling": {"kind": "hpa"}},
    },
    "gateway": {"kind": "gke", "className": "x", "modelArmor": {"enabled": True}},
    "namespace": {"create": True},
}
"""Values with which every template renders something."""


@cache
def _documents(text: str) -> str:
    found = [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]
    return json.dumps(found)


def parsed(text: str) -> list[Object]:
    """Objects of manifests, for the caller alone."""
    found: list[Object] = json.loads(_documents(text))
    return found


def objects(name: str) -> list[Object]:
    """All that an example has."""
    return parsed((chart.EXAMPLES / f"{name}.yaml").read_text())


def rendered(values: Object, **place: str) -> list[Object]:
    """All that the chart makes of values."""
    return parsed(chart.rendered(values, **place))


def merged(values: Object, more: Object) -> Object:
    """As Helm merges values."""
    found = dict(values)
    for key, value in more.items():
        old = found.get(key)
        found[key] = (
            merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return found


def example_values(name: str) -> Object:
    """Its values file."""
    found: Object = yaml.safe_load((chart.CHART / "values" / f"{name}.yaml").read_text())
    return found


def component(each: Object) -> str:
    """The part of a release to which an object or a pod belongs."""
    return str(each["metadata"].get("labels", {}).get(COMPONENT, ""))


def template(each: Object) -> Object | None:
    """Template of its pods; None: it has none."""
    spec = each.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found: Object | None = spec.get("template") or group.get("workerTemplate")
    return found


def workloads(found: list[Object]) -> list[Object]:
    """Objects that run pods."""
    return [each for each in found if template(each)]


def workload(found: list[Object], part: str) -> Object:
    """The one that runs pods of this part."""
    (only,) = (each for each in workloads(found) if component(each) == part)
    return only


def of_kind(found: list[Object], kind: str, name: str = "") -> list[Object]:
    """Objects of a kind, by the end of their names."""
    return [
        each
        for each in found
        if each["kind"] == kind and each["metadata"]["name"].endswith(name and f"-{name}")
    ]


def pod(found: list[Object], part: str) -> Object:
    """Specification of its pods."""
    made = template(workload(found, part))
    assert made is not None
    spec: Object = made["spec"]
    return spec


def container(found: list[Object], part: str) -> Object:
    """The one container of its pods, besides those that come before."""
    only: Object
    (only,) = pod(found, part)["containers"]
    return only


def flags(found: list[Object], part: str, **variables: str) -> list[str]:
    """Flags of its kvstore command, with the values that Kubernetes puts in."""
    command, *args = container(found, part)["args"]
    assert command == part
    known = {"POD_IP": POD_IP, "NODE_NAME": "gpu-1", "POD_NAME": f"kvstore-{part}-0", **variables}
    named = {each["name"] for each in container(found, part)["env"]}

    def expanded(text: str) -> str:
        for key in named & known.keys():
            text = text.replace(f"$({key})", known[key])
        assert "$(" not in text, text
        return text

    return [expanded(flag) for flag in args]


def connector(found: list[Object], part: str) -> Object:
    """--kv-transfer-config of its engines."""
    args = container(found, part)["args"]
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────


@cache
def _definitions(version: str) -> Registry[Any]:
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    resource: Resource[Any] = Resource.from_contents(
        schema_contents(f"{folder}/_definitions.json", version)
    )
    return (resource @ Registry()).crawl()


@cache
def _validator(kind: str, api_version: str, version: str) -> jsonschema.Draft202012Validator:
    """As kubernetes_validate makes one for each object, which takes most of its time."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{folder}/{kind.lower()}-{group}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


def validate(each: Object, version: str) -> None:
    """Raises ValidationError: a key is unknown, missing or of another kind."""
    if (schema := CRDS.get((each["apiVersion"], each["kind"]))) is None:
        _validator(each["kind"], each["apiVersion"], version).validate(each)
        return
    jsonschema.Draft202012Validator(schema).validate(each["spec"])
    metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": each["metadata"]}
    _validator("ConfigMap", "v1", version).validate(metadata)
    if pods := template(each):
        made = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": pods}
        _validator("PodTemplate", "v1", version).validate(made)


assert kubernetes_validate.latest_version() >= "1.37.0"
