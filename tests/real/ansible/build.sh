#!/usr/bin/env bash
# Installs what the tests of the role need, once, outside the repository: ansible-core for the Python of the Debian machine
# of `make systemd`, which runs it, and ansible-lint for this machine. gpukeeper itself never uses them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${GPUKEEPER_ANSIBLE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/ansible}
python=${PYTHON:-python3}
core=$(grep '^ansible-core==' "$here/versions.txt")
lint=$(grep '^ansible-lint==' "$here/versions.txt")
folder=$cache/${core#*==}-${lint#*==}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice
printf '%s, %s ... ' "$core" "$lint"
if [[ -e $folder/.installed ]]; then
    echo "there, in $cache"
    exit
fi
began=$SECONDS
rm -rf "$folder" # of a run that was killed
quietly=(--quiet --disable-pip-version-check --only-binary :all:)
{
    "$python" -m pip install "${quietly[@]}" --target "$folder/core" --python-version 3.11 "$core" &&
        "$python" -m venv "$folder/lint" &&
        "$folder/lint/bin/pip" install "${quietly[@]}" "$core" "$lint"
} >"$cache/log" 2>&1 || {
    echo "failed"
    tail -n 30 "$cache/log" >&2
    exit 1
}
touch "$folder/.installed"
echo "$((SECONDS - began)) s, in $cache"
