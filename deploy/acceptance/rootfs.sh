#!/usr/bin/env bash
# The acceptance image without a base image: a root filesystem of Debian packages, with the steps of install.sh.
#
#     rootfs.sh base OUT.tar    Debian and Python. With TORCH=2.15.0: and that PyTorch, by the pip of this machine
#     rootfs.sh steps IN.tar CONTEXT OUT.tar [STEP…]    the steps of the Containerfile (default: all), by chroot
#
# What differs from the Containerfile: the base. Python is Debian's; without TORCH, PyTorch has to be mounted where Debian's
# python3 finds what is not Debian's ($site). Needs root; the first command needs mmdebstrap.
set -euo pipefail
suite=bookworm
site=/usr/local/lib/python3.11/dist-packages

base() { # out
    local options=() one
    for one in doc man info locale; do options+=(--dpkgopt="path-exclude=/usr/share/$one/*"); done
    if [[ ${TORCH-} ]]; then
        options+=(--customize-hook="${PYTHON:-python3} -I -m pip install --quiet --disable-pip-version-check \
            --only-binary=:all: --python-version 3.11 --target \"\$1$site\" torch==$TORCH numpy")
    fi
    mmdebstrap --quiet --format=tar --variant=minbase --include=python3,python3-venv,ca-certificates "${options[@]}" $suite "$1"
}

steps() { # in context out step…
    local out=$3 one words
    root=$(mktemp -d "$out.XXXXXX")
    trap 'rm -rf --one-file-system "$root"' EXIT
    tar -C "$root" --numeric-owner -xf "$1"
    cp -r "$2" "$root/context"
    shift 3
    # Nothing is mounted in it, so that removing it removes nothing else.
    (($#)) || set -- packages gpukeeper nccl-tests finish
    for one; do
        words=/context
        if [[ $one == finish ]]; then words=$([[ -d $root$site/torch ]] && echo inside || echo mounted); fi
        env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            chroot "$root" sh /context/install.sh "$one" "$words"
    done
    rm -rf "$root/context"
    tar -C "$root" --numeric-owner -cf "$out.new" .
    mv "$out.new" "$out"
}

case "${1-}" in
base) base "$2" ;;
steps) steps "${@:2}" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
