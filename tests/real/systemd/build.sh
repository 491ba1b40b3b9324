#!/usr/bin/env bash
# Makes the Debian root filesystem that the tests boot with systemd, once, outside the repository, and boots it once: a
# machine that does not allow that has no such tests.
set -euo pipefail
cache=${GPUKEEPER_SYSTEMD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/systemd}
release=bookworm
folder=$cache/$release-ssh # another name for other packages: a root filesystem of an older checkout stays as it is

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice
printf 'systemd root filesystem %s ... ' "$release"
if [[ -e $folder/.bootable ]]; then
    echo "there, in $cache"
    exit
fi
began=$SECONDS
fail() {
    echo "failed: $1"
    tail -n 20 "$cache/log" >&2
    exit 1
}
if [[ ! -e $folder/.made ]]; then
    rm -rf "$folder" # of a run that was killed
    mkdir -p "$folder"
    mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,dbus,python3,openssh-server,sudo "$release" "$folder/root" \
        >"$cache/log" 2>&1 || fail "mmdebstrap"
    touch "$folder/.made"
fi
timeout 60 systemd-nspawn --quiet --register=no --keep-unit --private-network --volatile=overlay --console=pipe \
    --directory="$folder/root" --boot systemd.unit=poweroff.target \
    >"$cache/log" 2>&1 </dev/null 9>&- || fail "it does not boot"
touch "$folder/.bootable"
echo "$((SECONDS - began)) s, in $cache"
