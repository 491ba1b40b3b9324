#!/usr/bin/env bash
# Makes the build context of the images: context.sh DIRECTORY. All downloads happen here, with the pip of this
# machine and its settings (index, proxy, certificates); the build itself needs no network.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
context=$1
python=${PYTHON:-python3}
pip() { "$python" -I -m pip --disable-pip-version-check "$@"; }

mkdir -p "$context/wheels"
cp "$here/Containerfile" "$here/install.sh" "$here/.containerignore" "$repository/requirements.txt" "$context/"
cp "$here/../operator/Containerfile" "$context/Containerfile.operator"
cp "$here/.containerignore" "$context/.dockerignore" # docker reads only this name
rm -f "$context"/gpukeeper-*.whl
pip wheel --quiet --no-deps --wheel-dir "$context" "$repository"

# A base may have any of these; most wheels fit all. The stamp spares the downloads while the pins are the same.
versions=${PYTHON_VERSIONS:-3.11 3.12 3.13}
stamp="$(sha256sum <"$repository/requirements.txt") $versions"
if [[ $(cat "$context/wheels/.stamp" 2>/dev/null) != "$stamp" ]]; then
    rm -f "$context"/wheels/*.whl
    for version in $versions; do
        pip download --quiet --require-hashes --no-deps --only-binary=:all: --python-version "$version" \
            --dest "$context/wheels" --requirement "$repository/requirements.txt"
    done
    echo "$stamp" >"$context/wheels/.stamp"
fi

# Optional: a directory with the source of nccl-tests; an empty one builds nothing.
rm -rf "$context/nccl-tests"
mkdir "$context/nccl-tests"
if [[ ${NCCL_TESTS-} ]]; then cp -r "$NCCL_TESTS/." "$context/nccl-tests/"; fi
