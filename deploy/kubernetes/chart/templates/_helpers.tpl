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

{{- /* The largest number of servers, for each of which the gateway has an address. */ -}}
{{- define "paged.servers" -}}
{{ ternary .Values.autoscaling.maxReplicas .Values.replicas .Values.autoscaling.enabled }}
{{- end }}

{{- /* The user of docker/Dockerfile, who may write to the volumes. */ -}}
{{- define "paged.user" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
{{- end }}

{{- define "paged.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: ["ALL"]
  seccompProfile:
    type: RuntimeDefault
{{- end }}
