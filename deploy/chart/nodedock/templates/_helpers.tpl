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
{{- with .Values.drivers -}}
{{- $images := list -}}
{{- range . -}}
{{- $images = append $images (dict "name" .name "directory" (printf "/drivers/%s" .name)) -}}
{{- end -}}
{{- $_ := set $config "driverImages" $images -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* Refuses drivers that the schema cannot refuse. */ -}}
{{- define "nodedock.checkDrivers" -}}
{{- $names := dict -}}
{{- range $index, $driver := .Values.drivers -}}
{{- if hasKey $names .name -}}
{{- fail (printf "drivers[%d].name: two drivers are named %s" $index .name) -}}
{{- end -}}
{{- $_ := set $names .name true -}}
{{- if not (or .allowTag (regexMatch "@sha256:[0-9a-f]{64}$|@sha512:[0-9a-f]{128}$" .image)) -}}
{{- fail (printf "drivers[%d].image: image %s of driver %s is not pinned by digest, so each node could run another driver: write it as REPOSITORY@sha256:DIGEST, or set drivers[%d].allowTag to true" $index .image .name $index) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A side file of a driver, given as an object or as a text. */ -}}
{{- define "nodedock.sideFile" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toYaml . }}{{ end -}}
{{- end -}}
