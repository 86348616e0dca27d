{{- define "troupe.labels" -}}
app.kubernetes.io/name: troupe
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
troupe.pool: {{ . }}
{{- end }}
{{- end }}

{{- define "troupe.metadata" -}}
labels:
  {{- include "troupe.labels" . | nindent 2 }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The labels by which Kueue admits a workload. */}}
{{- define "troupe.queue" -}}
{{- with .root.Values.kueue }}
{{- if .queue }}
kueue.x-k8s.io/queue-name: {{ .queue }}
{{- with .priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "troupe.image" -}}
{{ printf "%s-%s:%s" .root.Values.image.repository .service .root.Values.image.tag | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/* Names of objects that the chart makes or the user gives. */}}
{{- define "troupe.tokenSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-token" .Release.Name) }}
{{- end }}
{{- define "troupe.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" .Release.Name) }}
{{- end }}
{{- define "troupe.dataClaim" -}}
{{ .Values.storage.data.existingClaim | default (printf "%s-data" .Release.Name) }}
{{- end }}

{{/* A pool's settings, which override the settings of all pools, as JSON. */}}
{{- define "troupe.pool" -}}
{{ mergeOverwrite (deepCopy .root.Values.pool) .settings | toJson }}
{{- end }}

{{/* Settings of every pod: an unprivileged user without the cluster's own credentials. */}}
{{- define "troupe.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 65534 }}
  runAsGroup: {{ .group | default 65534 }}
  fsGroup: {{ .group | default 65534 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: {{ .seccompProfile | default "RuntimeDefault" }}}
terminationGracePeriodSeconds: {{ include "troupe.grace" (.drain | default .root.Values.drainSeconds) }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- with .placement }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "runtimeClassName" "priorityClassName" }}
{{- with index $.placement $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A stopping service lets its calls end, takes as long again to end its own work, and then ends its ranks. */}}
{{- define "troupe.grace" -}}
{{ add (mul 2 .) 30 }}
{{- end }}

{{- define "troupe.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "troupe.probes" -}}
startupProbe:
  exec: {command: [python, -m, services.chassis.probe, {{ .address | quote }}]}
  periodSeconds: 5
  timeoutSeconds: 15
  failureThreshold: 120
readinessProbe:
  exec: {command: [python, -m, services.chassis.probe, {{ .address | quote }}]}
  periodSeconds: 15
  timeoutSeconds: 15
livenessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- define "troupe.ports" -}}
ports:
  - {name: grpc, containerPort: 50051}
  - {name: metrics, containerPort: 9090}
{{- end }}

{{/* Variables of every service: .address is the address at which it is reached. */}}
{{- define "troupe.environment" -}}
{{- $root := .root -}}
{{- $name := $root.Release.Name -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: TROUPE_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "troupe.tokenSecret" $root }}, key: token}}
- {name: TROUPE_ADVERTISE_ADDRESS, value: {{ .address | quote }}}
- {name: TROUPE_ORCHESTRATOR_ADDRESS, value: "{{ $name }}-orchestrator:50051"}
- {name: TROUPE_EXPERIENCE_STORE_ADDRESS, value: "{{ $name }}-experience-store:50051"}
- {name: TROUPE_REWARD_ADDRESS, value: "{{ $name }}-reward:50051"}
- {name: TROUPE_LOG_LEVEL, value: {{ $root.Values.logLevel }}}
- {name: TROUPE_DRAIN_SECONDS, value: {{ .drain | default $root.Values.drainSeconds | quote }}}
{{- if .redis }}
{{- with $root.Values.redis }}
{{- if .enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $name }}-redis, key: password}}
- {name: TROUPE_REDIS_URL, value: "redis://:$(REDIS_PASSWORD)@{{ $name }}-redis:6379/0"}
{{- else if .external.existingSecret }}
- name: TROUPE_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .external.existingSecret | quote }}, key: url}}
{{- else }}
- {name: TROUPE_REDIS_URL, value: {{ .external.url | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if $root.Values.tls.enabled }}
- {name: TROUPE_TLS_CERT, value: /tls/tls.crt}
- {name: TROUPE_TLS_KEY, value: /tls/tls.key}
- {name: TROUPE_TLS_CA, value: /tls/ca.crt}
- {name: TROUPE_TLS_NAME, value: {{ $root.Values.tls.name | quote }}}
{{- end }}
{{- if and .hub $root.Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ $root.Values.hub.existingSecret | quote }}, key: token}}
{{- end }}
{{- range $key, $value := $root.Values.environment }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- range $key, $value := .more }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* Mounts and volumes of every pod: scratch, and the certificate. */}}
{{- define "troupe.mounts" -}}
- {name: scratch, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- if and .models .root.Values.storage.modelsClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- define "troupe.volumes" -}}
- {name: scratch, emptyDir: {}}
{{- if .root.Values.tls.enabled }}
- {name: tls, secret: {secretName: {{ include "troupe.tlsSecret" .root }}, defaultMode: 0440}}
{{- end }}
{{- if and .models .root.Values.storage.modelsClaim }}
- {name: models, persistentVolumeClaim: {claimName: {{ .root.Values.storage.modelsClaim | quote }}, readOnly: true}}
{{- end }}
{{- end }}

{{/* Mounts and volumes of workers: data, /transfer and /dev/shm. */}}
{{- define "troupe.workerMounts" -}}
{{ include "troupe.mounts" (dict "root" .root "models" true) }}
- {name: data, mountPath: /data}
- {name: transfer, mountPath: /transfer}
- {name: memory, mountPath: /dev/shm}
{{- end }}
{{- define "troupe.workerVolumes" -}}
{{ include "troupe.volumes" (dict "root" .root "models" true) }}
{{- if .root.Values.storage.data.shared }}
- {name: data, persistentVolumeClaim: {claimName: {{ include "troupe.dataClaim" .root }}}}
{{- else }}
- {name: data, emptyDir: {sizeLimit: {{ .pool.dataSize }}}}
{{- end }}
- {name: transfer, emptyDir: {medium: Memory, sizeLimit: {{ .pool.transferSize }}}}
- {name: memory, emptyDir: {medium: Memory, sizeLimit: {{ .pool.sharedMemory }}}}
{{- end }}

{{/* Requests and limits, with devices. */}}
{{- define "troupe.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $limits := merge (dict "nvidia.com/gpu" (toString .gpus)) ($resources.limits | default dict) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{ toJson $resources }}
{{- end }}

{{/* One container of a worker: .service, .command, .probed, .more (variables). */}}
{{- define "troupe.worker" -}}
name: {{ .service }}
image: {{ include "troupe.image" . }}
command: {{ toJson .command }}
{{ include "troupe.container" . }}
env:
  {{- include "troupe.environment" (dict "root" .root "address" "$(POD_IP):50051" "hub" true "more" (merge (dict "TROUPE_TRANSFER_PORT" "50061" "TROUPE_TRANSFER_FALLBACK_DIR" "/tmp/transfer") .more (.pool.environment | default dict))) | nindent 2 }}
{{ include "troupe.ports" . }}
{{- if .probed }}
{{ include "troupe.probes" (dict "address" "127.0.0.1:50051" "port" 50051) }}
{{- end }}
resources: {{ include "troupe.resources" (dict "resources" .pool.resources "gpus" .pool.gpus) }}
volumeMounts:
  {{- include "troupe.workerMounts" . | nindent 2 }}
{{- end }}
