{{- define "gpukeeper.name" -}}
{{- if .Values.nameOverride }}{{ .Values.nameOverride }}
{{- else if contains "gpukeeper" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-gpukeeper" (.Release.Name | trunc 30 | trimSuffix "-") }}
{{- end }}
{{- end }}

{{- define "gpukeeper.labels" -}}
app.kubernetes.io/name: gpukeeper
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "gpukeeper.selector" -}}
app.kubernetes.io/name: gpukeeper
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "gpukeeper.account" -}}
{{ .Values.serviceAccount.name | default (include "gpukeeper.name" .) }}
{{- end }}

{{- define "gpukeeper.image" -}}
{{- $tag := .Values.image.tag | default (.Chart.AppVersion | replace "+" "_") }}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ $tag }}
{{- end }}
{{- end }}

{{- define "gpukeeper.policy" -}}
{{ .Values.existingPolicy | default (printf "%s-policy" (include "gpukeeper.name" .)) }}
{{- end }}

{{/* The rules of one tier: those of the manifest in rbac/. In a namespace, without what only a ClusterRole can grant. */}}
{{- define "gpukeeper.rules" -}}
{{- $role := fromYaml (index (splitList "\n---" (.root.Files.Get (printf "rbac/%s.yaml" .tier))) 0) }}
{{- if .namespace }}
{{- $wide := list "nodes" "namespaces" "clustertrainingruntimes" }}
{{- $kept := list }}
{{- range $role.rules }}
{{- $resources := list }}
{{- range .resources }}{{- if not (has . $wide) }}{{- $resources = append $resources . }}{{- end }}{{- end }}
{{- $leases := has "coordination.k8s.io" .apiGroups }}
{{- if and $resources (not $leases) }}
{{- $kept = append $kept (dict "apiGroups" .apiGroups "resources" $resources "verbs" .verbs) }}
{{- end }}
{{- end }}
{{- if eq .tier "observe" }}
{{- $kept = append $kept (dict "apiGroups" (list "") "resources" (list "namespaces") "resourceNames" (list .namespace) "verbs" (list "get")) }}
{{- end }}
{{- toYaml $kept }}
{{- else }}
{{- toYaml $role.rules }}
{{- end }}
{{- end }}

{{/* Not empty if the admission policy is installed: from 1.30 on, if gpukeeper may write at all. A chart for named namespaces creates
nothing outside them unless it is told. */}}
{{- define "gpukeeper.admission" -}}
{{- $writes := or .Values.rights.stop .Values.rights.restore .Values.rights.finalizers }}
{{- $can := and (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version) (not .Values.namespaces) }}
{{- if and (ne .Values.mode "agent") $writes (or (eq .Values.admissionPolicy "always") (and (eq .Values.admissionPolicy "auto") $can)) }}yes{{ end }}
{{- end }}

{{/* root, args, component, policy (name of a ConfigMap), and claim (name of a claim; empty: nothing is kept, or a template has it) */}}
{{- define "gpukeeper.podSpec" -}}
{{- $values := .root.Values }}
serviceAccountName: {{ include "gpukeeper.account" .root }}
terminationGracePeriodSeconds: 120  # time to finish the current step and release the lease
securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
containers:
  - name: gpukeeper
    image: {{ include "gpukeeper.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args: {{ toJson .args }}
    env:
      - {name: GPUKEEPER_STATE, value: /var/lib/gpukeeper}
      {{- with $values.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- if .probes }}
    ports:
      - {name: health, containerPort: 8080}
    livenessProbe:
      httpGet: {path: /healthz, port: health}
      periodSeconds: 20
      failureThreshold: 3
    readinessProbe:
      httpGet: {path: /readyz, port: health}
      periodSeconds: 10
    {{- end }}
    resources: {{- toYaml $values.resources | nindent 6 }}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts:
      - {name: policy, mountPath: /etc/gpukeeper, readOnly: true}
      - {name: ledger, mountPath: /var/lib/gpukeeper}
      - {name: tmp, mountPath: /tmp}
      {{- with $values.volumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- with $values.volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  # A directory, not a subPath: only then a running pod gets changes of the ConfigMap.
  - {name: policy, configMap: {name: {{ .policy }}}}
  - {name: tmp, emptyDir: {}}
  {{- if .claim }}
  - {name: ledger, persistentVolumeClaim: {claimName: {{ .claim }}}}
  {{- else if .scratch }}
  - {name: ledger, emptyDir: {}}
  {{- end }}
{{- end }}

{{/* With podSpec of the values, whose fields win. */}}
{{- define "gpukeeper.pod" -}}
{{- mergeOverwrite (fromYaml (include "gpukeeper.podSpec" .)) (deepCopy .root.Values.podSpec) | toYaml }}
{{- end }}

{{- define "gpukeeper.podMeta" -}}
labels:
  {{- include "gpukeeper.selector" .root | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := deepCopy .root.Values.podAnnotations }}
{{- if and .probes .root.Values.metrics.annotations }}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" "8080" "prometheus.io/path" "/metrics") }}
{{- end }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "gpukeeper.claim" -}}
{{ .Values.ledger.existingClaim | default (printf "%s-ledger" (include "gpukeeper.name" .)) }}
{{- end }}

{{- define "gpukeeper.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .Values.ledger.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .Values.ledger.size }}}}
{{- end }}

{{- define "gpukeeper.agentSelector" -}}
app.kubernetes.io/name: gpukeeper
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: agent
{{- end }}

{{/* The agent of a node. Root, in the pid namespace of the node; everything of the node is mounted read-only. */}}
{{- define "gpukeeper.agentPodSpec" -}}
{{- $agent := .Values.agent }}
automountServiceAccountToken: false  # it never asks the API server
hostPID: true  # the driver lists pids of the node
{{- with $agent.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $agent.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $agent.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
# Root: the kubelet's record of devices is readable for root alone.
securityContext: {runAsUser: 0, runAsGroup: 0, seccompProfile: {type: RuntimeDefault}}
initContainers:
  # A new emptyDir is open to all users, and gpukeeper refuses such a directory.
  - name: state
    image: {{ include "gpukeeper.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [/opt/gpukeeper/bin/python, -I, -c, "import os; os.chmod('/var/lib/gpukeeper', 0o700)"]
    resources: {{- toYaml $agent.resources | nindent 6 }}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts:
      - {name: state, mountPath: /var/lib/gpukeeper}
containers:
  - name: gpukeeper
    image: {{ include "gpukeeper.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [serve, --metrics, "$(POD_IP):{{ $agent.port }}", --pods]
    env:
      - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      - {name: GPUKEEPER_STATE, value: /var/lib/gpukeeper}
      # The NVIDIA runtime adds the driver's library; `utility` is NVML without CUDA.
      - {name: NVIDIA_VISIBLE_DEVICES, value: all}
      - {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
      {{- with $agent.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - {name: metrics, containerPort: {{ $agent.port }}}
    readinessProbe:
      httpGet: {path: /metrics, port: metrics}
      periodSeconds: 15
      timeoutSeconds: 5
    livenessProbe:
      httpGet: {path: /metrics, port: metrics}
      periodSeconds: 60
      timeoutSeconds: 10
      failureThreshold: 3
    resources: {{- toYaml $agent.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL], add: {{ toJson $agent.capabilities }}}
    volumeMounts:
      - {name: policy, mountPath: /etc/gpukeeper, readOnly: true}
      - {name: state, mountPath: /var/lib/gpukeeper}
      - {name: devices, mountPath: /var/lib/kubelet/device-plugins, readOnly: true}
      - {name: pods, mountPath: /var/log/pods, readOnly: true}
      {{- if not (has "/tmp" $agent.hostPaths) }}
      - {name: tmp, mountPath: /tmp}
      {{- end }}
      {{- range $number, $path := $agent.hostPaths }}
      - {name: host-{{ $number }}, mountPath: {{ $path | quote }}, readOnly: true}
      {{- end }}
volumes:
  - {name: policy, configMap: {name: {{ include "gpukeeper.name" . }}-agent-policy}}
  - {name: state, emptyDir: {}}
  - {name: devices, hostPath: {path: {{ $agent.kubelet.devicePlugins | quote }}}}
  - {name: pods, hostPath: {path: {{ $agent.kubelet.podLogs | quote }}}}
  {{- if not (has "/tmp" $agent.hostPaths) }}
  - {name: tmp, emptyDir: {}}
  {{- end }}
  {{- range $number, $path := $agent.hostPaths }}
  - {name: host-{{ $number }}, hostPath: {path: {{ $path | quote }}}}
  {{- end }}
{{- end }}
