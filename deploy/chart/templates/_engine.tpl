{{/* (list $ component values): the pods of an engine; of a LeaderWorkerSet leader and workers alike,
     since each serves the ranks of its own machine. */}}
{{- define "kvstore.enginePod" -}}
{{- $ := index . 0 }}
{{- $engine := index . 2 }}
{{- $port := int $engine.port }}
{{- $isGroup := eq $engine.kind "LeaderWorkerSet" }}
{{- $constants := dict "HOME" "/tmp" }}
{{- if $engine.modelsClaim }}{{ $_ := set $constants "HF_HUB_OFFLINE" "1" }}{{ end }}
{{- $resources := mergeOverwrite (dict "nvidia.com/gpu" (toString $engine.gpus) "memory" $engine.memory) $engine.resources -}}
metadata:
  {{- include "kvstore.podMetadata" (list $ (index . 1) $engine $port) | nindent 2 }}
spec:
  {{- include "kvstore.podCommon" (list $ $engine) | nindent 2 }}
  automountServiceAccountToken: false
  {{- with $engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $engine.terminationGracePeriodSeconds }}
  containers:
    - name: vllm
      image: {{ $engine.image }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      {{- if $isGroup }}
      # The ranks of this pod follow those of the pods before it.
      command: ["/bin/sh", "-c", "exec vllm serve \"$@\" --data-parallel-start-rank $((LWS_WORKER_INDEX * {{ $engine.gpus }}))", "vllm"]
      {{- else }}
      command: ["vllm", "serve"]
      {{- end }}
      args:
        - {{ $engine.model }}
        - --port={{ $port }}
        - --prefix-caching-hash-algo=sha256_cbor
        # Of the grace period: preStop, then time for requests in flight, then 5 s to end.
        - --shutdown-timeout={{ sub $engine.terminationGracePeriodSeconds 10 }}
        # /render, with which routers make tokens of text prompts: without it the engine answers 403,
        # and the index is not used for them.
        - --enable-scale-out
        {{- if $isGroup }}
        - --enable-expert-parallel
        - --data-parallel-size={{ mul $engine.gpus $engine.group.size }}
        - --data-parallel-size-local={{ $engine.gpus }}
        - --data-parallel-address=$(LWS_LEADER_ADDRESS)
        - --data-parallel-rpc-port=13345
        - --data-parallel-hybrid-lb
        {{- end }}
        - --kv-transfer-config
        - {{ include "kvstore.transferConfig" (list $ $engine) | squote }}
        {{- with $engine.args }}{{ toYaml . | nindent 8 }}{{ end }}
      env:
        {{- include "kvstore.env" (list $engine.env $constants) | trim | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ $port }}}
      resources:
        requests: {{ merge (dict "cpu" (toString $engine.cpu)) $resources | toYaml | nindent 10 }}
        limits: {{ toYaml $resources | nindent 10 }}
      lifecycle:
        preStop:
          sleep: {seconds: 5}  # until routers and load balancers know that the pod terminates
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        failureThreshold: 720
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      securityContext:
        allowPrivilegeEscalation: false
        capabilities: {drop: ["ALL"]}
      volumeMounts:
        # Read-only: an engine may connect to the socket, but not put another in its place.
        - {name: kvstore, mountPath: /run/kvstore, readOnly: true}
        {{- if $engine.modelsClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- with $engine.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  {{- if get $.Values.node.args "hbm" }}
  hostIPC: true  # CUDA shares the node's memory within one IPC namespace
  {{- end }}
  volumes:
    - name: kvstore
      hostPath: {path: {{ include "kvstore.socketDirectory" $ }}, type: DirectoryOrCreate}
    {{- with $engine.modelsClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engine.sharedMemory }}}
    - name: tmp
      emptyDir: {}
    {{- with $engine.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}
