"""Ids of filesystems that do not change with the device number: after a reboot, or on another loop device, a filesystem
may get another number, and everything on it another `st_dev`. Reads only.

Relies on `f_fsid` of statfs(2) where the kernel derives it from the UUID of the filesystem, and otherwise on the links
that udev creates in /dev/disk/by-uuid. Filesystems without either have no such id.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from gpukeeper.disk import unresponsive
from gpukeeper.disk.mounts import MountEntry, covering, own_mounts
from gpukeeper.model.subject import Subject

BY_UUID = "/dev/disk/by-uuid"
FSID_IS_LASTING = frozenset(("ext2", "ext3", "ext4", "btrfs", "zfs", "bcachefs"))
FSID_IS_DEVICE = frozenset(("xfs", "f2fs"))  # f_fsid is derived from the device number


def lasting_ids(mounts: Iterable[MountEntry] | None = None, by_uuid: str = BY_UUID) -> dict[int, str]:
    """By device number, as in stat(2): the id of each mounted filesystem that has one. Two copies of one filesystem
    have the same id.
    """
    known = own_mounts() if mounts is None else tuple(mounts)
    wanted = [mount for mount in known if mount.kind in FSID_IS_LASTING | FSID_IS_DEVICE]
    found: dict[int, str] = {}
    done: set[tuple[str, str]] = set()
    uuids = _uuids(by_uuid) if any(mount.kind in FSID_IS_DEVICE for mount in wanted) else {}
    for mount in wanted:
        # Each subvolume of btrfs has a number and an id of its own; other filesystems are read once.
        which = (mount.device, mount.source if mount.kind == "btrfs" else "")
        if which in done or unresponsive.leads_through_silent(mount.point, known):
            continue
        if covering(mount.point, known) is not mount:
            continue  # hidden by a later mount
        with suppress(OSError):
            device, fsid = _status_of(mount.point)
            if mount.kind == "btrfs" or device == _number(mount.device):
                done.add(which)
                name = uuids.get(device) if mount.kind in FSID_IS_DEVICE else f"fsid-{fsid:016x}" if fsid else None
                found |= {} if name is None else {device: name}
    return found


def identified(trees: Iterable[Subject]) -> tuple[Subject, ...]:
    """The same trees, each with the uid that outlasts its device number. OSError: the mounts could not be listed."""
    ids = lasting_ids()
    return tuple(msgspec.structs.replace(one, lasting=lasting_uid(one.ref.uid, ids)) for one in trees)


def lasting_uid(uid: str, ids: Mapping[int, str]) -> str | None:
    """A uid that begins with a device number, with the id of the filesystem in its place. None: it has none."""
    device, _, rest = uid.partition(":")
    name = ids.get(int(device)) if device.isdecimal() and rest else None
    return None if name is None else f"{name}:{rest}"


def _status_of(point: str) -> tuple[int, int]:
    fd = os.open(point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.fstat(fd).st_dev, os.fstatvfs(fd).f_fsid & (2**64 - 1)
    finally:
        os.close(fd)


def _number(device: str) -> int | None:
    major, _, minor = device.partition(":")
    return os.makedev(int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _uuids(directory: str) -> dict[int, str]:
    """By the number of the block device."""
    found: dict[int, str] = {}
    with suppress(OSError), os.scandir(directory) as listing:
        for link in listing:
            with suppress(OSError):
                found[link.stat().st_rdev] = f"uuid-{link.name}"
    return found
