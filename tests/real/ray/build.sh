#!/usr/bin/env bash
# Installs the releases of Ray that the tests run, once, each in a virtual environment of its own outside the repository.
# What is there is not installed again; gpukeeper itself never needs Ray.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${GPUKEEPER_RAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/ray}
python=${PYTHON:-python3}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice

mapfile -t lines < <(grep -v '^#' "$here/versions.txt")
number=0
for line in "${lines[@]}"; do
    read -r version also <<<"$line"
    number=$((number + 1))
    folder=$cache/$version
    printf '[%s/%s] ray %s ... ' "$number" "${#lines[@]}" "$version"
    if [[ -e $folder/.installed ]]; then
        echo "there"
        continue
    fi
    began=$SECONDS
    rm -rf "$folder" # of a run that was killed: environments cannot be moved, so the mark at the end says that it is whole
    { # shellcheck disable=SC2086  # a list of requirements
        "$python" -m venv "$folder" &&
            "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "ray[default]==$version" $also
    } >"$cache/log" 2>&1 || {
        echo "failed"
        tail -n 30 "$cache/log" >&2
        exit 1
    }
    touch "$folder/.installed"
    echo "$((SECONDS - began)) s"
done
echo "in $cache"
