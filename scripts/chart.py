"""Makes schema, alerts and dashboard of the chart from the code, `deploy/examples` from the chart.

    python scripts/chart.py         # rewrites them; needs the extra `dev` for Helm

    deploy/chart/values.schema.json   structure: values.yaml; flags: `config.settings`; the policy
                                      of routers and the connector's keys: their own classes
    deploy/chart/files                `scripts.alerts`, `scripts.dashboard`
    deploy/examples/NAME.yaml         `helm template kvstore` with deploy/chart/values/NAME.yaml

A key of values.yaml has the kind of its default; `_KINDS` and `_schema` name those that need more.
Does not cover: templates (`deploy/chart/templates`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from kvstore.config.settings import (
    IndexSettings,
    NodeSettings,
    RouterSettings,
    Setting,
    Settings,
    table,
)
from kvstore.connector.config import ConnectorConfig
from kvstore.routing.policy import RoutingPolicy
from scripts import alerts, dashboard

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = ROOT / "deploy" / "chart"
EXAMPLES: Final = ROOT / "deploy" / "examples"
RELEASE: Final = "kvstore"
NOTE: Final = "# Made by scripts/chart.py from deploy/chart/values/{}: change it there.\n"
Schema = dict[str, Any]

SET_BY_THE_CHART: Final[Mapping[type[Settings], frozenset[str]]] = {
    NodeSettings: frozenset(
        {"socket", "metrics", "metrics-beyond-loopback", "file", "node-name", "index", "ca", "cert"}
        | {"key", "insecure", "index-listen", "index-entries", "peer-listen"}
    ),
    IndexSettings: frozenset(
        {"listen", "metrics", "metrics-beyond-loopback", "ca", "cert", "key", "insecure"}
    ),
    RouterSettings: frozenset(
        {"listen", "route-listen", "picker-listen", "peer-router", "index", "policy", "api-keys"}
        | {"metrics", "metrics-beyond-loopback", "ca", "cert", "key", "insecure"}
    ),
}
"""Flags that follow from other values."""

_SIZE: Final = r"[0-9]+(\.[0-9]+)? ?([KMGTkmgt][Ii]?)?[Bb]?"
_FORMS: Final = {
    "SIZE": rf"^{_SIZE}$",
    "SIZE|auto": rf"^({_SIZE}|auto)$",
    "SIZE[,gpu=N]": rf"^{_SIZE}(,gpu=[0-9]{{1,3}})?$",
    "NAMESPACE/SERVICE:PORT[,KEY=VALUE…]": "^[a-z0-9-]+/[a-z0-9-]+:[A-Za-z0-9-]+(,[a-z]+=[^,]+)*$",
    "auto|SIZE|off": rf"^({_SIZE}|auto|off)$",
}
"""Name of a form → pattern of its text."""
_WHOLE: Final = "[1-9][0-9]*(MiB|GiB|TiB)"
"""Sizes that the chart adds up."""

_TEXT: Final[Schema] = {"type": "string"}
_NAME: Final[Schema] = {"type": "string", "minLength": 1}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 1}
_OBJECTS: Final[Schema] = {"type": "array", "items": {"type": "object"}}
_TEXTS: Final[Schema] = {"type": "array", "items": _NAME}
_QUANTITY: Final[Schema] = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|[KMGTP]i?)?$"}
_SHARE: Final[Schema] = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"}
_PATH: Final[Schema] = {"type": "string", "pattern": "^/."}
_OWN_LABELS: Final[Schema] = {  # selectors never change
    "type": "object",
    "propertyNames": {"not": {"pattern": "^app\\.kubernetes\\.io/"}},
    "additionalProperties": _TEXT,
}
_MAP: Final[Schema] = {"type": "object", "additionalProperties": _TEXT}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_KINDS: Final[Mapping[str, Schema]] = {
    "pullPolicy": _one_of("Always", "IfNotPresent", "Never"),
    "imagePullSecrets": _OBJECTS,
    "overhead": {"type": "string", "pattern": f"^{_WHOLE}$"},
    "cpu": _QUANTITY | {"type": ["string", "number"], "exclusiveMinimum": 0},
    "memory": _QUANTITY,
    "sharedMemory": _QUANTITY,
    "registry": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._:/-]*[A-Za-z0-9])?$"},
    "hostPath": _PATH,
    "socketDirectory": {"type": "string", "pattern": "^(/.+)?$"},
    "resources": {
        "type": "object",
        "propertyNames": {"pattern": "/"},
        "additionalProperties": {"type": ["integer", "string"]},
    },
    "nodeSelector": _MAP,
    "tolerations": _OBJECTS,
    "affinity": {"type": "object"},
    "podLabels": _OWN_LABELS,
    "podAnnotations": _MAP,
    "annotations": _MAP,
    "labels": _OWN_LABELS,
    "env": _OBJECTS,
    "volumes": _OBJECTS,
    "volumeMounts": _OBJECTS,
    "clients": _OBJECTS,
    "routerClients": _OBJECTS,
    "engineClients": _OBJECTS,
    "hostnames": _TEXTS,
    "cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "minReplicas": {"type": "integer", "minimum": 0},
    "replicas": {"type": "integer", "minimum": 0},
    "timeoutSeconds": _COUNT,
    "terminationGracePeriodSeconds": {"type": "integer", "minimum": 10},  # preStop, and 5 s to end
    "maxSurge": _SHARE,
    "maxUnavailable": _SHARE,
    "gpus": _COUNT,
    "size": _COUNT,
    "maxReplicas": _COUNT,
    "ttftSeconds": {"type": "number", "exclusiveMinimum": 0},
    "success": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "saturation": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
    "timeout": {"type": "string", "pattern": "^[0-9]+(ms|s)$"},
    "duration": {"type": "string", "pattern": "^[0-9]+(h|m)$"},
}
"""Schema of a key, wherever it stands."""


def schema() -> Schema:
    """values.schema.json."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    made = _of_default("", values)
    parts = made["properties"]
    for name, kind in (
        ("node", NodeSettings),
        ("index", IndexSettings),
        ("router", RouterSettings),
    ):
        parts[name]["properties"] |= {"args": flags_of(kind), "image": _NAME}
    node, router, engine = (
        parts[name]["properties"] for name in ("node", "router", "engineDefaults")
    )
    node["args"]["properties"]["dram"] |= {"type": "string", "pattern": f"^{_WHOLE}$"}
    node["args"]["required"] = ["dram"]
    node["disk"]["properties"]["size"] = {"type": "string", "pattern": f"^({_WHOLE})?$"}
    node["updateStrategy"]["properties"]["type"] = _one_of("RollingUpdate", "OnDelete")
    parts["index"]["properties"]["replicas"] = {"type": "integer", "minimum": 1, "maximum": 16}
    router["args"]["properties"]["body-max"] |= {"type": "string", "pattern": f"^{_WHOLE}$"}
    router["service"]["properties"]["type"] = _one_of("ClusterIP", "NodePort", "LoadBalancer")
    router["policy"] = {"$ref": "#/$defs/RoutingPolicy"}
    engine["kind"] = _one_of("Deployment", "LeaderWorkerSet")
    engine["image"] = engine["model"] = _NAME
    engine["role"] = _one_of("both", "prefill", "decode")
    engine["args"] = _TEXTS
    engine["connector"] = {"$ref": "#/$defs/ConnectorConfig"}
    engine["autoscaling"]["properties"]["kind"] = _one_of("", "keda", "hpa")
    parts["certificates"]["properties"]["mode"] = _one_of("secret", "cert-manager")
    issuer = parts["certificates"]["properties"]["certManager"]["properties"]
    issuer["issuerKind"] = _one_of("Issuer", "ClusterIssuer")
    gateway = parts["gateway"]["properties"]
    gateway["kind"] = _one_of("", "gke", "istio")
    gateway["failureMode"] = _one_of("", "FailClose", "FailOpen")
    gateway["modelArmor"]["properties"]["settings"] = _OBJECTS
    definitions = _definitions() | {"Engine": parts["engineDefaults"]}
    parts["engineDefaults"] = {"$ref": "#/$defs/Engine"}
    parts["engines"] = {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z][a-z0-9]{0,14}$"},
        "additionalProperties": {"$ref": "#/$defs/Engine"},
    }
    parts["global"] = {"type": "object"}  # of charts that have this one as a part
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made, "$defs": definitions}


def _of_default(key: str, value: Any) -> Schema:
    """What may replace a value of values.yaml."""
    if key in _KINDS:
        return dict(_KINDS[key])
    match value:
        case dict():
            properties = {name: _of_default(name, each) for name, each in value.items()}
            return {"type": "object", "properties": properties, "additionalProperties": False}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": 0}
        case list():
            return {"type": "array"}
    return dict(_TEXT)


def flags_of(kind: type[Settings]) -> Schema:
    """Flags of a program, without those that the chart sets."""
    rows = {row.key: row for row in table(kind) if row.key not in SET_BY_THE_CHART[kind]}
    properties = {
        key: {**_flag(row), "description": row.meaning} for key, row in sorted(rows.items())
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _flag(row: Setting) -> Schema:
    if row.choices:
        return _one_of(*row.choices)
    if row.within is not None:
        return {"type": "integer", "minimum": row.within[0], "maximum": row.within[1]}
    if pattern := _FORMS.get(row.form.metavar):
        return {"type": ["string", "integer"], "pattern": pattern}
    if row.form.metavar == "UID":
        user: Schema = {"type": "integer", "minimum": 0}
        return {"type": ["integer", "array"], "minimum": 0, "items": user}
    if row.holds(dict):
        return {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
    if row.holds(list) or row.holds(tuple):
        return _TEXTS
    return {"type": "boolean"} if row.kind is bool else dict(_NAME)


def _definitions() -> Schema:
    """Of the policy file and the connector; defaults left out, since Helm fills in none."""
    kinds, found = msgspec.json.schema_components(
        [RoutingPolicy, ConnectorConfig], ref_template="#/$defs/{name}"
    )
    assert len(kinds) == 2
    for name in ("socket", "address"):  # of the pod
        del found["ConnectorConfig"]["properties"][name]
    made: Schema = _without_defaults(found)
    return made


def _without_defaults(part: Any) -> Any:
    if isinstance(part, dict):
        is_schema = "type" in part or "$ref" in part or "enum" in part or "anyOf" in part
        left_out = {"default", "title"} if is_schema else set()
        return {key: _without_defaults(each) for key, each in part.items() if key not in left_out}
    return [_without_defaults(each) for each in part] if isinstance(part, list) else part


def files() -> dict[str, str]:
    """Of deploy/chart/files, by name."""
    return {"alerts.yaml": alerts.text(), "dashboard.json": dashboard.text()}


def rendered(values: Mapping[str, Any], *, release: str = RELEASE, namespace: str = RELEASE) -> str:
    """All manifests, the namespace first. Raises HelmError."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        made = chart.render(dict(values), name=release, namespace=namespace)
    texts = [text for name, text in sorted(made.items()) if name.endswith(".yaml")]
    parts = [_tidy(part) for text in texts for part in re.split(r"(?m)^---$", text)]
    parts = sorted(filter(None, parts), key=lambda part: "\nkind: Namespace\n" not in part)
    return "\n---\n".join(parts) + "\n"


def _tidy(text: str) -> str:
    """Without the blanks that templates leave."""
    return re.sub(r"\n\s*\n", "\n", re.sub(r"(?m)[ \t]+$", "", text)).strip()


def examples() -> dict[str, str]:
    """Manifests of each values file, by its name."""
    return {path.name: example(path) for path in sorted((CHART / "values").glob("*.yaml"))}


def example(path: Path) -> str:
    """Manifests of a values file, with their namespace."""
    values = yaml.safe_load(path.read_text()) | {"namespace": {"create": True}}
    return NOTE.format(path.name) + rendered(values)


def main() -> None:
    """Write all files."""
    (CHART / "values.schema.json").write_text(json.dumps(schema(), indent=1) + "\n")
    for name, text in files().items():
        (CHART / "files" / name).write_text(text)
    for name, text in examples().items():
        (EXAMPLES / name).write_text(text)


if __name__ == "__main__":
    main()
