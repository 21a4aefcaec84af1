{{/* The container in front of the picker, for gateways that show no certificate. */}}
{{- define "kvstore.terminator" -}}
- name: terminator
  image: {{ .Values.gateway.envoyImage }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always  # a sidecar: it ends after the router has drained
  args: ["-c", "/etc/envoy/envoy.yaml", "--disable-hot-restart", "--concurrency", "1"]
  ports:
    - {name: picker, containerPort: 9002}
  resources:
    requests: {cpu: 250m, memory: 128Mi}
    limits: {memory: 128Mi}
  securityContext:
    {{- include "kvstore.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: terminator, mountPath: /etc/envoy, readOnly: true}
    {{- include "kvstore.certificatesMount" . | nindent 4 }}
{{- end }}

{{- define "kvstore.terminatorConfig" -}}
{{- $stem := ternary "tls" "client-router" (eq .Values.certificates.mode "cert-manager") -}}
{{- $chain := printf "{filename: /etc/kvstore/pki/%s.crt}" $stem -}}
{{- $key := printf "{filename: /etc/kvstore/pki/%s.key}" $stem -}}
static_resources:
  listeners:
    - name: picker
      address: {socket_address: {address: 0.0.0.0, port_value: 9002}}
      filter_chains:
        - transport_socket:
            name: envoy.transport_sockets.tls
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
              common_tls_context:
                alpn_protocols: [h2]
                tls_certificates:
                  - {certificate_chain: {{ $chain }}, private_key: {{ $key }}}
          filters:
            - name: envoy.filters.network.tcp_proxy
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
                stat_prefix: picker
                cluster: picker
                idle_timeout: 0s
  clusters:
    - name: picker
      connect_timeout: 1s
      load_assignment:
        cluster_name: picker
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9474}}}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: router.client.kvstore
          common_tls_context:
            alpn_protocols: [h2]
            tls_certificates:
              - {certificate_chain: {{ $chain }}, private_key: {{ $key }}}
            validation_context:
              trusted_ca: {filename: /etc/kvstore/pki/ca.crt}
{{- end }}
