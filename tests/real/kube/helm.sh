#!/usr/bin/env bash
# Builds the helm that the tests of the chart run, once, from one exact version, outside the repository.
set -euo pipefail
version=v3.20.2
cache=${GPUKEEPER_HELM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/helm}/$version

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice
printf 'helm %s ... ' "$version"
if [[ -x $cache/helm ]]; then
    echo "there, in $cache"
    exit
fi
command -v go >/dev/null || { echo "failed: it is compiled: install Go 1.25 or newer, then run it again" >&2; exit 1; }
began=$SECONDS
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
if ! (cd "$work" && CGO_ENABLED=0 GOBIN=$work go install -trimpath -ldflags "-s -w" "helm.sh/helm/v3/cmd/helm@$version") >"$cache/log" 2>&1; then
    echo "failed"
    tail -n 20 "$cache/log" >&2
    exit 1
fi
mv "$work/helm" "$cache/helm"
echo "$((SECONDS - began)) s"
