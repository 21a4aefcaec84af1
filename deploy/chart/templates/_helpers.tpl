{{/* Names begin with the release, and no component ends another one's name behind a dash: two
     releases have none in common. */}}

{{/* (list $ component): what selects its pods. Nothing else may change it: selectors are immutable. */}}
{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ hasSuffix "-engine" (index . 1) | ternary "vllm" "kvstore" }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* (list $ component suffix), and a namespace if not the release's: name and labels of an object. */}}
{{- define "kvstore.metadata" -}}
{{- $ := index . 0 }}
{{- if gt (len $.Release.Name) 40 }}{{ fail (printf "release name %s has more than 40 characters" $.Release.Name) }}{{ end -}}
name: {{ $.Release.Name }}-{{ index . 2 }}
namespace: {{ gt (len .) 3 | ternary (last .) $.Release.Namespace }}
labels:
  {{- include "kvstore.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $.Release.Service }}
{{- end }}

{{/* (list $ component values port): labels and annotations of pods. */}}
{{- define "kvstore.podMetadata" -}}
{{- $ := index . 0 }}
{{- $values := index . 2 }}
{{- $annotations := $values.podAnnotations }}
{{- if $.Values.monitoring.scrapeAnnotations }}
{{- $annotations = merge (dict "prometheus.io/scrape" "true" "prometheus.io/port" (index . 3 | toString)) $annotations }}
{{- end -}}
labels:
  {{- include "kvstore.selector" . | nindent 2 }}
  {{- with $values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Values of a component: where its pods run. */}}
{{- define "kvstore.placing" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with index $ $key }}
{{ $key }}: {{ toYaml . | trim | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* (list $ image variant): reference of an image; its tag ends in the variant. One with a tag or digest
     of its own stays. */}}
{{- define "kvstore.image" -}}
{{- $ := index . 0 }}
{{- $image := index . 1 -}}
{{- if regexMatch "[:@][^/]+$" $image }}{{ $image }}{{ else -}}
{{- with $.Values.image.registry }}{{ . }}/{{ end }}{{ $image }}:{{ $.Values.image.tag | default $.Chart.AppVersion }}{{ index . 2 }}
{{- end }}
{{- end }}

{{/* The container may do nothing but its work. */}}
{{- define "kvstore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: ["ALL"]}
{{- end }}

{{- define "kvstore.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* (list env constants): variables of a container. Those of the operator's env come last, and
     replace the chart's: Kubernetes refuses a name that is there twice. */}}
{{- define "kvstore.env" -}}
{{- $env := index . 0 }}
{{- $own := list }}
{{- range $env }}{{ $own = append $own .name }}{{ end }}
{{- range $name, $field := dict "POD_IP" "status.podIP" "POD_NAME" "metadata.name" "NODE_NAME" "spec.nodeName" }}
{{- if not (has $name $own) }}
- name: {{ $name }}
  valueFrom: {fieldRef: {fieldPath: {{ $field }}}}
{{- end }}
{{- end }}
{{- range $name, $value := index . 1 }}
{{- if not (has $name $own) }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
{{- with $env }}{{ toYaml . | nindent 0 }}{{ end }}
{{- end }}

{{/* (list $ apiVersion kind name replicas isScaled): `replicas` of a workload. A scaler owns the count;
     an upgrade that leaves it out would set it to 1, so the live one is repeated. */}}
{{- define "kvstore.scale" -}}
{{- if not (index . 5) }}
replicas: {{ index . 4 }}
{{- else }}
{{- with lookup (index . 1) (index . 2) (index . 0).Release.Namespace (index . 3) }}
replicas: {{ .spec.replicas }}
{{- end }}
{{- end }}
{{- end }}

{{/* ── flags ── */}}

{{/* A map of flags and values: one flag a line, sorted. true is the flag alone, false none; a list
     repeats the flag, a map does so with NAME=VALUE. */}}
{{- define "kvstore.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}{{ if $value }}--{{ $flag }}
{{ end }}
{{- else if kindIs "slice" $value }}{{ range $value }}--{{ $flag }}={{ include "kvstore.text" . }}
{{ end }}
{{- else if kindIs "map" $value }}{{ range $name, $each := $value }}--{{ $flag }}={{ $name }}={{ include "kvstore.text" $each }}
{{ end }}
{{- else }}--{{ $flag }}={{ include "kvstore.text" $value }}
{{ end }}
{{- end }}
{{- end }}

{{/* Numbers of YAML arrive as floats: 10000000 must not become 1e+07. */}}
{{- define "kvstore.text" -}}
{{ if kindIs "float64" . }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* (list command flags): args of a container. */}}
{{- define "kvstore.args" -}}
{{- $lines := include "kvstore.flags" (index . 1) | trim | splitList "\n" }}
{{- prepend $lines (index . 0) | toYaml }}
{{- end }}

{{/* (list $ port): flags of the pages for probes and Prometheus. They are read-only, without prompts,
     tokens or keys. */}}
{{- define "kvstore.pages" -}}
{{ dict "metrics" (printf "$(POD_IP):%d" (index . 1)) "metrics-beyond-loopback" true | toJson }}
{{- end }}

{{/* Each replica by its own name: nodes publish to all of them. */}}
{{- define "kvstore.replicas" -}}
{{- $names := list }}
{{- range $i := until (int .Values.index.replicas) }}
{{- $names = append $names (printf "%s-index-%d.%s-index.%s:9470" $.Release.Name $i $.Release.Name $.Release.Namespace) }}
{{- end }}
{{- $names | toJson }}
{{- end }}

{{- define "kvstore.transport" -}}
{{ get .Values.node.args "transport" | default "tcp,port=9481" }}
{{- end }}

{{/* The port of block transfer; empty: the transport chooses its own. */}}
{{- define "kvstore.transferPort" -}}
{{ include "kvstore.transport" . | regexFind "port=[0-9]+" | trimPrefix "port=" }}
{{- end }}

{{/* ── certificates ── */}}

{{/* (list $ stem): flags of TLS. */}}
{{- define "kvstore.tls" -}}
{{- $ := index . 0 }}
{{- if $.Values.insecure }}{{ dict "insecure" true | toJson }}{{ else }}
{{- $stem := ternary "tls" (index . 1) (eq $.Values.certificates.mode "cert-manager") }}
{{- $of := "/etc/kvstore/pki/" }}
{{- dict "ca" (print $of "ca.crt") "cert" (print $of $stem ".crt") "key" (print $of $stem ".key") | toJson }}
{{- end }}
{{- end }}

{{/* (list $ component names): the volume, of a secret or of cert-manager's CSI driver. */}}
{{- define "kvstore.certificates" -}}
{{- $ := index . 0 }}
{{- $names := index . 2 }}
{{- if not $.Values.insecure -}}
- name: certificates
  {{- if eq $.Values.certificates.mode "secret" }}
  secret: {secretName: {{ $.Release.Name }}-{{ index . 1 }}-certificates, defaultMode: 0440}
  {{- else }}
  {{- with $.Values.certificates.certManager }}
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-name: {{ .issuerName }}
      csi.cert-manager.io/issuer-kind: {{ .issuerKind }}
      csi.cert-manager.io/dns-names: {{ $names }}
      csi.cert-manager.io/key-usages: digital signature,key encipherment,server auth,client auth
      csi.cert-manager.io/duration: {{ .duration }}
      csi.cert-manager.io/fs-group: "10001"
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "kvstore.certificatesMount" -}}
{{- if not .Values.insecure -}}
- {name: certificates, mountPath: /etc/kvstore/pki, readOnly: true}
{{- end }}
{{- end }}

{{/* ── scaling ── */}}

{{/* (list owner min max): fails where they are the wrong way round. */}}
{{- define "kvstore.checkRange" -}}
{{- if gt (index . 1 | int) (index . 2 | int) }}
{{- fail (printf "%s.autoscaling: minReplicas is above maxReplicas" (index . 0)) }}
{{- end }}
{{- end }}

{{/* (list scaling metricType query threshold): a trigger of KEDA. */}}
{{- define "kvstore.trigger" -}}
{{- $scaling := index . 0 -}}
- type: prometheus
  metricType: {{ index . 1 }}
  metadata:
    serverAddress: {{ $scaling.prometheus }}
    query: {{ index . 2 }}
    threshold: {{ index . 3 | toString | quote }}
    {{- if $scaling.minReplicas }}
    # No series: the count stays, instead of falling to the minimum.
    ignoreNullValues: "false"
    {{- end }}
{{- end }}

{{/* ── directories of the host ── */}}

{{/* (list $ name path): a mount of the node. The tier has a directory of its own below hostPath. */}}
{{- define "kvstore.directoryMount" -}}
{{- $ := index . 0 }}
{{- $isShared := and (eq (index . 1) "blocks") (not $.Values.node.disk.storageClassName) }}
{{- $below := ternary (printf ", subPath: %s/%s" $.Release.Namespace $.Release.Name) "" $isShared -}}
- {name: {{ index . 1 }}, mountPath: {{ index . 2 }}{{ $below }}}
{{- end }}

{{/* ── memory ── */}}

{{/* MiB of a size such as 64GiB. */}}
{{- define "kvstore.mib" -}}
{{- $n := regexFind "^[0-9]+" . | int64 }}
{{- if hasSuffix "TiB" . }}{{ mul $n 1048576 }}{{ else if hasSuffix "GiB" . }}{{ mul $n 1024 }}{{ else }}{{ $n }}{{ end }}
{{- end }}

{{/* Kubernetes' quantity of so many MiB. */}}
{{- define "kvstore.quantity" -}}
{{ if mod . 1024 }}{{ . }}Mi{{ else }}{{ div . 1024 }}Gi{{ end }}
{{- end }}

{{/* Memory of a node but for dram: overhead, and 233 bytes for each block of 256 KiB on disk, which
     are 932 for each of its MiB. */}}
{{- define "kvstore.tablesMib" -}}
{{- $disk := include "kvstore.mib" (.Values.node.disk.size | default "0MiB") | int64 }}
{{- add (include "kvstore.mib" .Values.node.overhead | int64) (div (add (mul $disk 932) 1048575) 1048576) }}
{{- end }}

{{/* ── engines ── */}}

{{- define "kvstore.socketDirectory" -}}
{{ .Values.node.socketDirectory | default (printf "/run/kvstore/%s/%s" .Release.Namespace .Release.Name) }}
{{- end }}

{{/* (list $ values): the value of --kv-transfer-config. */}}
{{- define "kvstore.transferConfig" -}}
{{- $engine := index . 1 }}
{{- $extra := dict "socket" "/run/kvstore/node.sock" "address" (printf "http://$(POD_IP):%d" (int $engine.port)) }}
{{- $role := get (dict "both" "kv_both" "prefill" "kv_producer" "decode" "kv_consumer") $engine.role }}
{{- dict "kv_connector" "KVStoreConnector" "kv_connector_module_path" "kvstore.connector" "kv_role" $role "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (merge $extra $engine.connector) | toJson }}
{{- end }}

{{/* $: engines by name, defaults filled in, as JSON. */}}
{{- define "kvstore.engines" -}}
{{- $all := dict }}
{{- range $name, $values := .Values.engines }}
{{- $_ := set $all $name (mergeOverwrite (deepCopy $.Values.engineDefaults) $values) }}
{{- end }}
{{- $all | toJson }}
{{- end }}

{{/* ── pods ── */}}

{{/* (list $ values): what pods of every component have. */}}
{{- define "kvstore.podCommon" -}}
{{- $ := index . 0 }}
{{- with $.Values.imagePullSecrets -}}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{ end -}}
{{ include "kvstore.placing" (index . 1) | trim }}
securityContext:
  {{- include "kvstore.podSecurity" $ | nindent 2 }}
{{- end }}

{{/* (list $ component): replicas on different machines where there are several. */}}
{{- define "kvstore.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvstore.selector" . | nindent 8 }}
{{- end }}
