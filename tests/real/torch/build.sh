#!/usr/bin/env bash
# Installs the PyTorch that the tests run, once, in a virtual environment of its own outside the repository. Probes run
# in whatever interpreter has PyTorch; gpukeeper itself never imports it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${GPUKEEPER_TORCH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/torch}
python=${PYTHON:-python3}
version=$(grep -v '^#' "$here/version.txt")
folder=$cache/$version

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice
printf 'torch %s ... ' "$version"
if [[ -e $folder/.installed ]]; then
    echo "there, in $cache"
    exit
fi
began=$SECONDS
rm -rf "$folder" # of a run that was killed
{
    "$python" -m venv "$folder" &&
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" numpy
} >"$cache/log" 2>&1 || {
    echo "failed"
    tail -n 30 "$cache/log" >&2
    exit 1
}
touch "$folder/.installed"
echo "$((SECONDS - began)) s, in $cache"
