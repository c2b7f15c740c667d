{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tandem.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "tandem.secret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" .Release.Name) }}
{{- end }}

{{- /* Root without capabilities: key files are readable by their owner alone, or refused. */ -}}
{{- define "tandem.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tandem.keyVolume" -}}
- name: keys
  secret:
    secretName: {{ include "tandem.secret" . }}
    defaultMode: 0400
{{- end }}

{{- define "tandem.modelVolume" -}}
{{- with .Values.model.claim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ . }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "tandem.modelMount" -}}
{{- if .Values.model.claim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- end }}

{{- /* HF_TOKEN, for a model that asks for a login. */ -}}
{{- define "tandem.modelToken" -}}
{{- with .Values.model.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: token
{{- end }}
{{- end }}

{{- define "tandem.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The control address of each router. */ -}}
{{- define "tandem.routers" -}}
{{- $addresses := list }}
{{- range $number := until (int .Values.routers.count) }}
{{- $addresses = append $addresses (printf "tcp://%s-router-%d:8001" $.Release.Name $number) }}
{{- end }}
{{- join "," $addresses }}
{{- end }}
