{{- define "kvpool.name" -}}
{{- if contains "kvpool" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvpool" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvpool.selector" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvpool.labels" -}}
{{ include "kvpool.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvpool.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* A size such as 64GiB in MiB. */ -}}
{{- define "kvpool.mib" -}}
{{- $unit := regexFind "[KMGT]iB$" . -}}
{{- mul (trimSuffix $unit . | int64) (get (dict "MiB" 1 "GiB" 1024 "TiB" 1048576) $unit | int64) -}}
{{- end }}

{{- /* The container's memory: the arena counts toward its limit. */ -}}
{{- define "kvpool.memory" -}}
{{- $arena := include "kvpool.mib" .Values.memory | int64 -}}
{{- $overhead := add 1024 (div $arena 64) -}}
{{- if .Values.memoryOverhead }}{{ $overhead = include "kvpool.mib" .Values.memoryOverhead | int64 }}{{ end -}}
{{- printf "%dMi" (add $arena $overhead) -}}
{{- end }}

{{- define "kvpool.tlsSecret" -}}
{{ .Values.tls.secretName | default (printf "%s-server-tls" (include "kvpool.name" .)) }}
{{- end }}

{{- define "kvpool.metricsSecret" -}}
{{ .Values.serviceMonitor.tlsSecretName | default (printf "%s-metrics-tls" (include "kvpool.name" .)) }}
{{- end }}

{{- define "kvpool.peersTlsSecret" -}}
{{ .Values.peers.tlsSecretName | default (printf "%s-peer-tls" (include "kvpool.name" .)) }}
{{- end }}

{{- define "kvpool.tierPath" -}}
{{- if and .Values.tier.size (ne .Values.mode "sidecar") }}/var/lib/kvpool/tier{{ end }}
{{- end }}

{{- /* Names that a client may expect in the server's certificate. */ -}}
{{- define "kvpool.dnsNames" -}}
{{- $name := include "kvpool.name" . -}}
{{- $namespace := .Release.Namespace -}}
{{- range list $name (printf "*.%s-nodes" $name) }}
- {{ printf "%s.%s.svc" . $namespace | quote }}
- {{ printf "%s.%s.svc.%s" . $namespace $.Values.tls.clusterDomain | quote }}
{{- end }}
- {{ $name | quote }}
- {{ printf "%s.%s" $name $namespace | quote }}
- localhost
{{- end }}

{{- define "kvpool.check" -}}
{{- with .Values }}
{{- if and (eq .network "tls") (not .tls.secretName) (not .tls.issuer.name) }}
{{- fail "network: tls needs certificates: name a Secret in tls.secretName, or an issuer of cert-manager's in tls.issuer.name" }}
{{- end }}
{{- if and (ne .network "tls") (or .tls.secretName .tls.issuer.name) }}
{{- fail (printf "tls has no effect with network: %s; set network: tls, or leave tls.secretName and tls.issuer.name empty" .network) }}
{{- end }}
{{- if and .tls.secretName .tls.issuer.name }}
{{- fail "tls.secretName and tls.issuer.name are both set; give one of them" }}
{{- end }}
{{- if and (eq .mode "memory") (eq .network "none") }}
{{- fail "mode: memory with network: none reaches no engine; set network: tls (or insecure, where all on the network are trusted)" }}
{{- end }}
{{- if and .serviceMonitor.enabled (eq .network "none") }}
{{- fail "serviceMonitor.enabled with network: none: Prometheus cannot reach the server; set network: tls, or insecure" }}
{{- end }}
{{- if and .serviceMonitor.enabled (eq .network "tls") .tls.secretName (not .serviceMonitor.tlsSecretName) }}
{{- fail "serviceMonitor.tlsSecretName is empty: with tls.secretName, name a Secret with the certificate of role metrics" }}
{{- end }}
{{- if and .peers.secretName (eq .network "none") }}
{{- fail "peers.secretName with network: none: servers cannot reach one another; set network: tls, or insecure" }}
{{- end }}
{{- if and .peers.secretName .tls.secretName (not .peers.tlsSecretName) }}
{{- fail "peers.tlsSecretName is empty: with tls.secretName, name a Secret with the certificate of role peer" }}
{{- end }}
{{- if and (or .peers.secretName .serviceMonitor.enabled) (eq .network "tls") (or .settings.tokens .settings.oidc_issuer) }}
{{- fail "peers.secretName and serviceMonitor.enabled need servers that ask for certificates; leave settings.tokens and settings.oidc_issuer out" }}
{{- end }}
{{- if and (eq .mode "sidecar") (not .engine.model) }}
{{- fail "engine.model is empty: mode: sidecar starts an engine, which needs a model" }}
{{- end }}
{{- if and (eq .mode "sidecar") (semverCompare "<1.29.0-0" $.Capabilities.KubeVersion.Version) }}
{{- fail (printf "mode: sidecar needs Kubernetes 1.29, whose pods have sidecar containers; this is %s: choose mode: node" $.Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and (eq .mode "sidecar") .tier.size }}
{{- fail "tier.size is for the modes node and memory; leave it empty with mode: sidecar" }}
{{- end }}
{{- if and (eq .mode "node") .tier.size (not .tier.hostPath) }}
{{- fail "tier.hostPath is empty: mode: node keeps its tier in a directory of the node's disk; name it" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The probe of a server. The kubelet speaks gRPC's health protocol in plaintext alone. */ -}}
{{- define "kvpool.probe" -}}
{{- if eq .Values.network "insecure" }}
grpc: {port: 50051}
{{- else if eq .Values.network "tls" }}
httpGet: {path: /healthz, port: http, scheme: HTTPS}
{{- else }}
exec:
  command: [python3, -c, "import urllib.request; urllib.request.urlopen('http://127.0.0.1:50052/healthz', timeout=4)"]
{{- end }}
timeoutSeconds: 5
{{- end }}

{{- define "kvpool.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* The server's container: its command, probes, sizes and mounts. */ -}}
{{- define "kvpool.server" -}}
name: kvpool-server
image: {{ include "kvpool.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - kvpool-server
args:
  - --config=/etc/kvpool/server.toml
  - --memory={{ .Values.memory }}
  - --drain-ms={{ .Values.drainMs }}
  - --log-format=json
{{- if eq .Values.network "none" }}
  - --listen=127.0.0.1:50051
  - --http-listen=127.0.0.1:50052
  - --data-listen=
{{- else }}
  - --listen=0.0.0.0:50051
  - --http-listen=0.0.0.0:50052
  # The pod's own address: a Service may lead a client's next connection to another server.
  - --data-listen=$(POD_IP):50053
{{- end }}
{{- if eq .Values.network "insecure" }}
  - --insecure-network
{{- else if eq .Values.network "tls" }}
  - --tls-cert=/etc/kvpool/tls/tls.crt
  - --tls-key=/etc/kvpool/tls/tls.key
{{- if not (or .Values.settings.tokens .Values.settings.oidc_issuer) }}
  - --tls-client-ca=/etc/kvpool/tls/ca.crt
  - --trust-domain={{ .Values.tls.trustDomain }}
{{- end }}
{{- end }}
{{- if ne .Values.mode "memory" }}
  - --unix-listen=/run/kvpool/kvpool.sock
  - --unix-mode={{ .Values.socket.mode }}
{{- end }}
{{- with include "kvpool.tierPath" . }}
  - --tier=file:{{ . }},size={{ $.Values.tier.size }},name=$({{ if eq $.Values.mode "node" }}NODE_NAME{{ else }}POD_NAME{{ end }}){{ if eq $.Values.mode "memory" }},create=yes{{ end }}
{{- end }}
{{- if .Values.peers.secretName }}
  # By the pod's address, which no certificate names: all servers' certificates have the Service's name.
  - --tier=peers:directory=$(PEERS_DIRECTORY),key_file=/etc/kvpool/peers/key,advertise=$(POD_IP):50051{{ with .Values.peers.handover }},handover={{ . }}{{ end }}
    {{- if eq .Values.network "tls" }},ca=/etc/kvpool/peers/ca.crt,cert=/etc/kvpool/peers/tls.crt,key=/etc/kvpool/peers/tls.key,name={{ include "kvpool.name" . }}.{{ .Release.Namespace }}.svc{{ end }}
{{- end }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with .Values.peers.secretName }}
  - name: PEERS_DIRECTORY
    valueFrom: {secretKeyRef: {name: {{ . }}, key: directory}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- if ne .Values.network "none" }}
ports:
  - {name: grpc, containerPort: 50051}
  - {name: http, containerPort: 50052}
  - {name: data, containerPort: 50053}
{{- end }}
# A server that waits for its predecessor's tier directory, or opens a large tier, is not ready meanwhile.
startupProbe:
  {{- include "kvpool.probe" . | nindent 2 }}
  periodSeconds: 2
  failureThreshold: 300
readinessProbe:
  {{- include "kvpool.probe" . | nindent 2 }}
  periodSeconds: 10
livenessProbe:
  {{- include "kvpool.probe" . | nindent 2 }}
  periodSeconds: 20
  failureThreshold: 3
{{- /* Kubernetes runs a sidecar's hook when the pod begins to stop, and sends SIGTERM once the engine has stopped: a
sidecar has the hook only to hand its blocks over, which SIGTERM does not. */}}
{{- if or (ne .Values.mode "sidecar") .Values.peers.handover }}
lifecycle:
  preStop:
    exec:
      # SIGUSR2 drains: loads and stores under way finish, then the server ends, and with it the container and this hook.
      command: [sh, -c, "sleep 2; kill -USR2 1; while kill -0 1; do sleep 0.1; done"]
{{- end }}
resources:
  requests:
    cpu: {{ .Values.cpu | quote }}
    memory: {{ include "kvpool.memory" . }}
  limits:
    memory: {{ include "kvpool.memory" . }}
securityContext:
  {{- include "kvpool.restricted" . | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/kvpool/server.toml, subPath: server.toml, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- if eq .Values.network "tls" }}
  - {name: tls, mountPath: /etc/kvpool/tls, readOnly: true}
{{- end }}
{{- if .Values.peers.secretName }}
  - {name: peers, mountPath: /etc/kvpool/peers, readOnly: true}
{{- end }}
{{- if ne .Values.mode "memory" }}
  - {name: socket, mountPath: /run/kvpool}
{{- end }}
{{- with include "kvpool.tierPath" . }}
  - {name: tier, mountPath: {{ if eq $.Values.mode "node" }}{{ . }}{{ else }}{{ dir . }}{{ end }}}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end }}

{{- define "kvpool.volumes" -}}
- name: config
  configMap: {name: {{ include "kvpool.name" . }}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if eq .Values.network "tls" }}
- name: tls
  secret: {secretName: {{ include "kvpool.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- if .Values.peers.secretName }}
- name: peers
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ .Values.peers.secretName }}, items: [{key: key, path: key}]}
      {{- if eq .Values.network "tls" }}
      - secret: {name: {{ include "kvpool.peersTlsSecret" . }}}
      {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What all pods have. */ -}}
{{- define "kvpool.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add 30 (div (add .Values.drainMs 999) 1000) }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . | indent 2 }}
{{- end }}
{{- $isNode := eq .Values.mode "node" }}
{{- with .Values.nodeSelector | default (ternary (dict "nvidia.com/gpu.present" "true") dict $isNode) }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations | default (ternary (list (dict "key" "nvidia.com/gpu" "operator" "Exists")) list $isNode) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.user }}
  fsGroup: {{ .Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvpool.podMetadata" -}}
labels:
  {{- include "kvpool.labels" . | nindent 2 }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  kvpool/settings: {{ .Values.settings | toJson | sha256sum | quote }}
  {{- with .Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
