#!/bin/sh
# The steps of the images (acceptance, operator), for their Containerfiles and for rootfs.sh: as root, in the root filesystem
# that becomes the image. Needs no network: the context has every wheel.
set -eu

packages() { # context: what gpukeeper needs, pinned, in an environment of its own; PyTorch's packages stay as they are
    python3 -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' ||
        { echo "gpukeeper needs Python 3.11 or newer; this base has $(python3 --version)" >&2; exit 1; }
    python3 -I -m venv /opt/gpukeeper
    pip install --no-index --find-links "$1/wheels" --require-hashes -r "$1/requirements.txt"
}

gpukeeper() { # context: the wheel; afterwards nothing more can be installed
    pip install --no-index --no-deps "$1"/gpukeeper-*.whl
    pip uninstall --yes setuptools pip
}

pip() {
    /opt/gpukeeper/bin/python -I -m pip --quiet --disable-pip-version-check --no-cache-dir "$@"
}

nccl_tests() { # context: built where their source is in the context; else the check is reported as not run
    mkdir -p /opt/nccl-tests/build
    if [ -e "$1/nccl-tests/Makefile" ]; then
        make -C "$1/nccl-tests" -j "$(nproc)" BUILDDIR=/opt/nccl-tests/build
        test -x /opt/nccl-tests/build/all_reduce_perf
    fi
}

finish() { # inside|mounted: the user, its directories, the command
    # Not by useradd, which a small base does not have.
    grep -q '^accept:' /etc/passwd || echo 'accept:x:10001:10001:gpukeeper:/var/lib/accept:/bin/sh' >>/etc/passwd
    grep -q '^accept:' /etc/group || echo 'accept:x:10001:' >>/etc/group
    mkdir -p /var/lib/accept /app/reports
    chown 10001:10001 /var/lib/accept /app /app/reports
    chmod 700 /var/lib/accept
    ln -sf /opt/gpukeeper/bin/gpukeeper /usr/local/bin/gpukeeper
    /usr/local/bin/gpukeeper --version
    # The interpreter that gpukeeper will find; PyTorch itself is not loaded: that takes gigabytes.
    [ "$1" = mounted ] || python3 -I -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
        { echo "the python3 of this base has no PyTorch: use another BASE" >&2; exit 1; }
}

operator() { # the command, and the directory of the ledger; a volume is mounted there
    mkdir -p /var/lib/gpukeeper /etc/gpukeeper
    chown 65532:65532 /var/lib/gpukeeper
    chmod 700 /var/lib/gpukeeper
    ln -sf /opt/gpukeeper/bin/gpukeeper /usr/local/bin/gpukeeper
    /usr/local/bin/gpukeeper --version
}

case "${1-}" in
packages) packages "$2" ;;
gpukeeper) gpukeeper "$2" ;;
nccl-tests) nccl_tests "$2" ;;
finish) finish "$2" ;;
operator) operator ;;
*) echo "usage: install.sh packages|gpukeeper CONTEXT | nccl-tests CONTEXT | finish inside|mounted | operator" >&2; exit 2 ;;
esac
