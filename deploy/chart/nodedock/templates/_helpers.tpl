{{- define "nodedock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "nodedock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "nodedock.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "nodedock.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* What is not in a namespace may be there for several releases. */ -}}
{{- define "nodedock.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "nodedock.fullname" .) -}}
{{- end -}}

{{- define "nodedock.selector" -}}
app.kubernetes.io/name: {{ include "nodedock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nodedock.labels" -}}
{{ include "nodedock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "nodedock.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "nodedock.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "cdiDir" .Values.cdiDir -}}
{{- if .Values.metrics.enabled -}}
{{- $_ := set $config "admin" (dict "listen" (printf "0.0.0.0:%d" (int .Values.metrics.port))) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}
