#!/usr/bin/env bash
# Builds the root filesystems of the images that the tests run (acceptance, operator), outside the repository. What changes with the pins
# (Debian, wheels, packages) is kept in a folder named after its inputs: two minutes, once. gpukeeper itself is installed
# again when its source has changed: seconds. PyTorch is not in it unless TORCH=VERSION is set: the tests mount that of
# `make torch`. Prints the path of the acceptance image last; that of the operator is beside it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../../.." && pwd)
steps=$repository/deploy/acceptance
caches=${GPUKEEPER_IMAGE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/image}
TORCH=${TORCH-}
export TORCH
export PYTHON=${PYTHON:-python3}

hash_of() { # file…, and what is on its input
    (cd "$repository" && { sha256sum -- "$@" && cat; } | sha256sum | cut -c1-12)
}
pins=$(hash_of deploy/acceptance/{install,rootfs,context}.sh requirements.txt </dev/null)
source=$(cd "$repository" && find src deploy/share -name '*.py[cod]' -prune -o -type f -print | LC_ALL=C sort)
mapfile -t files < <(printf '%s\n' pyproject.toml README.md "$source")
folder=$caches/$pins${TORCH:+-torch-$TORCH}
commit=$(git -C "$repository" describe --tags --always --dirty 2>/dev/null || true) # the version of the wheel has it
key=$(hash_of "${files[@]}" <<<"$commit")
image=$folder/image-$key.tar
operator=$folder/operator-$key.tar

mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9 # two at once would do the same work twice
printf 'root filesystems of the images ... ' >&2
began=$SECONDS

build() { # every line counts: `set -e` has no effect in what is tested
    { [[ -e $folder/base.tar ]] || { "$steps/rootfs.sh" base "$folder/base.new" && mv "$folder/base.new" "$folder/base.tar"; }; } &&
        { [[ -e $image && $(cat "$folder/context/key") == "$key" ]] || "$steps/context.sh" "$folder/context"; } &&
        echo "$key" >"$folder/context/key" &&
        { [[ -e $folder/packages.tar ]] || steps "$folder/base.tar" "$folder/packages.tar" packages; } &&
        { [[ -e $image ]] || steps "$folder/packages.tar" "$image" gpukeeper nccl-tests finish; } &&
        { [[ -e $operator ]] || steps "$folder/packages.tar" "$operator" gpukeeper operator; } &&
        touch "$image" "$operator" &&
        find "$folder" -maxdepth 1 \( -name 'image-*.tar*' -o -name 'operator-*.tar*' \) -mmin +2880 -exec rm -rf --one-file-system {} + # of other sources
}

steps() { # in out step…
    "$steps/rootfs.sh" steps "$1" "$folder/context" "${@:2}"
}

if ! build >"$folder/log" 2>&1; then
    echo "failed" >&2
    tail -n 30 "$folder/log" >&2
    exit 1
fi
echo "$((SECONDS - began)) s" >&2
echo "$image"
