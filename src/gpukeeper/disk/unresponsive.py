"""Which filesystems may not answer: what asks them anything about a file may hang for ever.

An allow-list: whatever is not named here (FUSE, NFS, a filesystem nobody heard of) is not asked by a look that concerns
everybody's processes.
"""

from __future__ import annotations

ON_DISKS = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "vfat", "exfat"),
    *("msdos", "ntfs", "ntfs3", "iso9660", "udf", "squashfs", "erofs", "cramfs", "overlay"),
)
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
OF_THE_KERNEL = (
    *("proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "configfs", "bpf"),
    *("pstore", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "pipefs", "sockfs", "anon_inodefs", "selinuxfs", "bdev"),
)
_ANSWERS = frozenset((*ON_DISKS, *IN_MEMORY, *OF_THE_KERNEL))


def may_hang(kind: str) -> bool:
    """Of a filesystem of that kind, as mount(8) calls it."""
    return kind not in _ANSWERS
