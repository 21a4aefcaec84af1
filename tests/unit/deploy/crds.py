"""Keys of custom resources that the chart may use: schemas of their `spec`.

Written by hand from the published definitions, as far as the chart goes: unknown keys are refused,
which neither an API server (it drops them) nor the published models do. The manifests of
`deploy/examples` were validated once with @kubernetes-models: prometheus-operator 6.0.0, keda
2.0.0, istio 3.0.1, cert-manager 6.0.0, gateway-api 2.0.0.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]
TEXT: Final[Schema] = {"type": "string", "minLength": 1}
WHOLE: Final[Schema] = {"type": "integer", "minimum": 0}
PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Final[Schema] = {"type": "string", "pattern": "^[0-9.]+(ms|s|m|h)$"}
MAP: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
LABELS: Final[Schema] = {
    "type": "object",
    "properties": {"matchLabels": MAP},
    "required": ["matchLabels"],
    "additionalProperties": False,
}


def _object(*needed: str, **keys: Schema) -> Schema:
    assert set(needed) <= keys.keys()
    return {
        "type": "object",
        "properties": keys,
        "required": list(needed),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _one_of(*values: object) -> Schema:
    return {"enum": list(values)}


_TARGET = _object("group", "kind", "name", group={"type": "string"}, kind=TEXT, name=TEXT)

CRDS: Final[dict[tuple[str, str], Schema]] = {
    # github.com/prometheus-operator/prometheus-operator: servicemonitors and podmonitors of its
    # monitoring.coreos.com
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        *("selector", "endpoints"),
        selector=LABELS,
        endpoints=_list(_object("port", port=TEXT, interval=SECONDS)),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        *("selector", "podMetricsEndpoints"),
        selector=LABELS,
        podMetricsEndpoints=_list(
            _object(
                "port",
                port=TEXT,
                interval=SECONDS,
                relabelings=_list(_object("targetLabel", targetLabel=TEXT, replacement=TEXT)),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups",
        groups=_list(
            _object(
                *("name", "rules"),
                name=TEXT,
                rules=_list(
                    _object(
                        *("alert", "expr"),
                        alert=TEXT,
                        expr=TEXT,
                        **{"for": SECONDS},
                        labels=MAP,
                        annotations=MAP,
                    )
                ),
            )
        ),
    ),
    # github.com/kedacore/keda: keda.sh_scaledobjects.yaml; the trigger: its scaler for Prometheus
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        *("scaleTargetRef", "triggers"),
        scaleTargetRef=_object("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=WHOLE,
        maxReplicaCount=WHOLE,
        cooldownPeriod=WHOLE,
        triggers=_list(
            _object(
                *("type", "metadata"),
                type=_one_of("prometheus"),
                metricType=_one_of("AverageValue", "Value"),
                metadata=_object(
                    *("serverAddress", "query", "threshold"),
                    serverAddress=TEXT,
                    query=TEXT,
                    threshold=TEXT,
                    ignoreNullValues=_one_of("true", "false"),
                ),
            )
        ),
    ),
    # github.com/kubernetes-sigs/lws: leaderworkerset.x-k8s.io_leaderworkersets.yaml; the template
    # is validated as one of Kubernetes' own
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _object(
        "leaderWorkerTemplate",
        replicas=WHOLE,
        leaderWorkerTemplate=_object(
            *("workerTemplate", "size"),
            size=PORT,
            restartPolicy=_one_of("RecreateGroupOnPodRestart", "None", "Default"),
            workerTemplate={"type": "object"},
        ),
    ),
    # github.com/kubernetes-sigs/gateway-api-inference-extension: its chart `inferencepool`, v1
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        *("selector", "targetPorts", "endpointPickerRef"),
        selector=LABELS,
        targetPorts={**_list(_object("number", number=PORT)), "maxItems": 8},
        endpointPickerRef=_object(
            *("name", "port"),
            name=TEXT,
            port=_object("number", number=PORT),
            failureMode=_one_of("FailOpen", "FailClose"),
        ),
    ),
    # github.com/kubernetes-sigs/gateway-api: gateway.networking.k8s.io_{httproutes,gateways}.yaml
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        *("parentRefs", "rules"),
        parentRefs=_list(_object("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
        hostnames=_list(TEXT),
        rules=_list(
            _object(
                "backendRefs",
                backendRefs=_list(_TARGET),
                matches={
                    **_list(
                        _object(
                            "path",
                            path=_object(
                                *("type", "value"),
                                type=_one_of("Exact", "PathPrefix"),
                                value=TEXT,
                            ),
                        )
                    ),
                    "maxItems": 64,
                },
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): _object(
        *("gatewayClassName", "listeners"),
        gatewayClassName=TEXT,
        listeners=_list(
            _object(
                *("name", "port", "protocol"),
                name=TEXT,
                port=PORT,
                protocol=_one_of("HTTP", "HTTPS"),
                tls=_object("certificateRefs", certificateRefs=_list(_object("name", name=TEXT))),
            )
        ),
    ),
    # cloud.google.com/kubernetes-engine: "Customize GKE Inference Gateway configuration"
    ("networking.gke.io/v1", "HealthCheckPolicy"): _object(
        *("targetRef", "default"),
        targetRef=_TARGET,
        default=_object(
            "config",
            config=_object(
                *("type", "httpHealthCheck"),
                type=_one_of("HTTP"),
                httpHealthCheck=_object(
                    *("requestPath", "port"),
                    requestPath=TEXT,
                    port=PORT,
                    portSpecification=_one_of("USE_FIXED_PORT"),
                ),
            ),
        ),
    ),
    ("networking.gke.io/v1", "GCPBackendPolicy"): _object(
        *("targetRef", "default"),
        targetRef=_TARGET,
        default=_object("timeoutSec", timeoutSec=WHOLE),
    ),
    # cloud.google.com/service-extensions: "Configure an extension to call a Google service"
    ("networking.gke.io/v1", "GCPTrafficExtension"): _object(
        *("targetRefs", "extensionChains"),
        targetRefs=_list(_TARGET),
        extensionChains=_list(
            _object(
                *("name", "matchCondition", "extensions"),
                name=TEXT,
                matchCondition=_object(
                    "celExpressions",
                    celExpressions=_list(_object("celMatcher", celMatcher=TEXT)),
                ),
                extensions=_list(
                    _object(
                        *("name", "googleAPIServiceName", "supportedEvents", "timeout"),
                        name=TEXT,
                        googleAPIServiceName=TEXT,
                        failOpen={"type": "boolean"},
                        timeout=SECONDS,
                        supportedEvents=_list(
                            _one_of(
                                *("RequestHeaders", "RequestBody", "RequestTrailers"),
                                *("ResponseHeaders", "ResponseBody", "ResponseTrailers"),
                            )
                        ),
                        metadata=MAP,
                    )
                ),
            )
        ),
    ),
    # github.com/istio/api: networking.istio.io_destinationrules.yaml
    ("networking.istio.io/v1", "DestinationRule"): _object(
        *("host", "trafficPolicy"),
        host=TEXT,
        trafficPolicy=_object(
            "tls",
            tls=_object(
                "mode",
                mode=_one_of("DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"),
                credentialName=TEXT,
                sni=TEXT,
                subjectAltNames=_list(TEXT),
            ),
        ),
    ),
    # github.com/cert-manager/cert-manager: cert-manager.io_certificates.yaml
    ("cert-manager.io/v1", "Certificate"): _object(
        *("secretName", "issuerRef", "dnsNames"),
        secretName=TEXT,
        dnsNames=_list(TEXT),
        usages=_list(_one_of("digital signature", "key encipherment", "client auth")),
        duration=SECONDS,
        issuerRef=_object("name", name=TEXT, kind=_one_of("Issuer", "ClusterIssuer")),
    ),
}
"""(apiVersion, kind) → schema of `spec`."""
