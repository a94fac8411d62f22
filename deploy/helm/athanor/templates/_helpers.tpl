{{/* The configuration as data; a text that the pods could not serve by ends the rendering. */}}
{{- define "athanor.configuration" -}}
{{- $read := fromYaml .Values.configuration -}}
{{- if hasKey $read "Error" }}{{ fail (printf "configuration is no YAML: %s" $read.Error) }}{{ end -}}
{{- $listen := $read.listen | default dict -}}
{{- range $name := list "http" "grpc" "metrics" -}}
{{- if not (regexMatch "^0\\.0\\.0\\.0:[0-9]+$" (get $listen $name | toString)) -}}
{{- fail (printf "configuration: listen.%s must be 0.0.0.0:PORT, since probes, Service and routers ask the pod's address" $name) -}}
{{- end -}}
{{- end -}}
{{- if not (and (dig "tls" "certificate" "" $listen) (dig "tls" "key" "" $listen)) -}}
{{- fail "configuration: listen.tls must name certificate and key: probes and routers ask over TLS" -}}
{{- end -}}
{{- if not (regexMatch "^([12]?[0-9]|30)$" (dig "drain_notice_s" "" $listen | toString)) -}}
{{- fail "configuration: listen.drain_notice_s must be whole seconds, 30 at most: how long the supervisor stays follows from it" -}}
{{- end -}}
{{- if not (hasPrefix "unix:" (dig "admin" "" $listen | toString)) -}}
{{- fail "configuration: listen.admin must be unix:PATH: who may forward a port of the pod could stop it by another" -}}
{{- end -}}
{{- if not (dig "metrics_token" "" $listen) -}}
{{- fail "configuration: listen.metrics_token must name a file: that port shows the figures of all tenants" -}}
{{- end -}}
{{- toYaml $read -}}
{{- end }}

{{- define "athanor.port" -}}
{{- $read := include "athanor.configuration" .root | fromYaml -}}
{{- get $read.listen .name | splitList ":" | last -}}
{{- end }}

{{/* Notice, 20 s for running answers, and 5 s more: until then the sandboxes stay. */}}
{{- define "athanor.stays" -}}
{{- $read := include "athanor.configuration" . | fromYaml -}}
{{- add (int $read.listen.drain_notice_s) 25 -}}
{{- end }}

{{- define "athanor.image" -}}
{{- with .Values.image }}{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}{{ end -}}
{{- end }}

{{/* Environment of both processes; the number is how many freed pieces of memory malloc keeps unwiped. */}}
{{- define "athanor.environment" -}}
- {name: PYTHONMALLOC, value: malloc}
- {name: GLIBC_TUNABLES, value: "glibc.malloc.perturb=165:glibc.malloc.tcache_count={{ .kept }}"}
{{- if (.root.Values.fleet | default dict).hostFromNode }}
- name: ATHANOR_FLEET__HOST
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end }}
{{- end }}
