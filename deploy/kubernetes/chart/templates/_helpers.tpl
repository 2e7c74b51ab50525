{{- define "paged.labels" -}}
app.kubernetes.io/name: paged-llm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "paged.common" -}}
{{ include "paged.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The user of docker/Dockerfile, who may write to the volumes. */ -}}
{{- define "paged.user" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
{{- end }}

{{- define "paged.securityContext" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: ["ALL"]
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "paged.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{ include "paged.securityContext" . }}
{{- end }}

{{- define "paged.preStop" -}}
lifecycle:
  preStop:
    exec:
      command: ["sleep", {{ .Values.preStopSeconds | quote }}]
{{- end }}

{{- /* Settings of a pod with a server, and its volumes. */ -}}
{{- define "paged.pod" -}}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
{{ include "paged.user" . }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: models
    {{- toYaml .Values.modelVolume | nindent 4 }}
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.shmSize }}
  - name: compiled-kernels
    emptyDir: {}
{{- end }}

{{- define "paged.server" -}}
{{- $options := .Values.options }}
{{- if and .Values.dynamo.enabled (eq .Values.dynamo.routerMode "kv") }}
{{- $options = merge dict $options (dict "kv_events_config" (dict "enable_kv_cache_events" true)) }}
{{- end }}
name: server
{{ include "paged.container" . }}
args:
  - paged
  - serve
  - {{ .Values.model | quote }}
  - --name={{ .Values.name }}
  - --host=0.0.0.0
  - --verbose
  {{- range $name, $value := $options }}
  - {{ printf "--option=%s=%s" $name (toJson $value) | quote }}
  {{- end }}
env:
  - name: HF_HOME
    value: /models/.huggingface
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: http, containerPort: 8000}
  - {name: grpc, containerPort: 8001}
  - {name: metrics, containerPort: 8002}
# The probe generates a token: the server's own endpoints answer 200 after the engine's process has died.
startupProbe:
  exec:
    command: ["paged", "probe", "--timeout", "20", "--model", {{ .Values.name | quote }}]
  periodSeconds: 15
  timeoutSeconds: 30
  failureThreshold: {{ div .Values.startSeconds 15 }}
livenessProbe:
  exec:
    command: ["paged", "probe", "--timeout", "20", "--model", {{ .Values.name | quote }}]
  periodSeconds: 30
  timeoutSeconds: 30
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /v2/models/{{ .Values.name }}/ready
    port: http
  periodSeconds: 5
  timeoutSeconds: 5
resources:
  requests:
    {{- toYaml .Values.resources.requests | nindent 4 }}
  limits:
    {{- toYaml .Values.resources.limits | nindent 4 }}
    {{- if .Values.gpus }}
    nvidia.com/gpu: {{ .Values.gpus }}
    {{- end }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: shm, mountPath: /dev/shm}
  - {name: compiled-kernels, mountPath: /home/paged/.triton/cache}
{{- end }}
