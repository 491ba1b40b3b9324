"""What other machines may use is kept: filesystems not known to be of one machine, and what this one exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.disk.mounts import parse_mounts
from gpukeeper.disk.open_files import exported, parse_exports, why_unseen

MOUNTS = parse_mounts("""1 0 254:0 / / rw - ext4 /dev/vda rw
2 1 0:50 / /net rw - nfs4 server:/net rw
3 2 0:51 / /net/local\\040disk rw shared:1 - xfs /dev/vdb rw
5 1 254:3 / /data rw - xfs /dev/vdc rw
6 1 254:3 /scratch /srv/nfs/scratch rw - xfs /dev/vdc rw
""")


def test_a_filesystem_that_other_machines_may_use_is_told_by_the_innermost_mount() -> None:
    paths = ("/tmp", "/net", "/net/me/x", "/net/local disk/x")
    assert [why_unseen(path, MOUNTS, ()) is None for path in paths] == [True, False, False, True]


@pytest.mark.parametrize(
    "kind",
    [
        *("weka", "wekafs", "ocfs2", "gfs2", "panfs", "orangefs", "vboxsf", "nfs", "nfs4", "cifs", "smb3", "lustre"),
        *("ceph", "gpfs", "beegfs", "9p", "virtiofs", "fuse.sshfs", "fuse", "fuseblk", "afs", "pvfs2", "somethingnew"),
    ],
)
def test_what_is_not_known_to_be_of_one_machine_is_kept_and_its_type_is_named(kind: str) -> None:
    why = why_unseen("/x/tmp-a", parse_mounts(f"1 0 0:9 / / rw - {kind} source rw"), ())
    assert why is not None
    assert f"type {kind}," in why.why


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs"])
def test_the_usual_filesystems_of_one_machine_are_known(kind: str) -> None:
    assert why_unseen("/x/tmp-a", parse_mounts(f"1 0 0:9 / / rw - {kind} source rw"), ()) is None


@pytest.mark.parametrize("mounts", ["", "1 0 254:0 / / rw"])
def test_of_a_path_on_no_known_mount_it_is_not_said_that_nobody_else_uses_it(mounts: str) -> None:
    assert why_unseen("/tmp", parse_mounts(mounts), ()) is not None


# Exports

ETC = """# comment
/srv/nfs 10.0.0.0/8(rw,fsid=0,crossmnt) \\
    gss/krb5i(rw)
"/srv/shared files"  *(ro,no_subtree_check)
/with\\040blank *(rw)
"""


def test_exports_are_read_with_blanks_and_continued_lines() -> None:
    found = [("/srv/nfs", True), ("/srv/shared files", False), ("/with blank", False)]
    assert list(parse_exports(ETC)) == found
    assert list(parse_exports("# Version 1.1\n# Path Client(Flags) # IPs\n/a\t*(rw,nohide)\n\n\x85x")) == [("/a", True)]


@pytest.mark.parametrize(
    ("line", "unseen"),
    [
        ("/tmp *(rw)", ["/tmp/a", "/tmp/a/b"]),
        ("/tmp/a *(rw)", ["/tmp/a", "/tmp/a/b"]),
        ("/tmp/a/b *(rw)", ["/tmp/a", "/tmp/a/b"]),
        ("/tmp/ab *(rw)", []),
        ("/ *(rw)", ["/tmp/a", "/tmp/a/b"]),
        ("/ *(rw,crossmnt)", ["/tmp/a", "/tmp/a/b", "/data/scratch/a"]),
        ("/srv/nfs/scratch *(rw)", ["/data/scratch/a"]),  # the same folder by another name
        ("/srv *(rw)", []),
    ],
)
def test_what_is_exported_at_above_or_below_is_out_of_sight(tmp_path: Path, line: str, unseen: list[str]) -> None:
    (tmp_path / "exports").write_text(line + "\n")
    found = exported(MOUNTS, [str(tmp_path / "exports"), str(tmp_path / "none")])
    paths = ("/tmp/a", "/tmp/a/b", "/data/scratch/a")
    assert [path for path in paths if why_unseen(path, MOUNTS, found) is not None] == unseen


def test_a_directory_of_exports_is_read_and_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.exports").write_text("/tmp *(rw)\n")
    (tmp_path / "other").write_text("/data *(rw)\n")
    (found,) = exported(MOUNTS, [str(tmp_path)])
    why = why_unseen("/tmp/a", MOUNTS, [found])
    assert why is not None
    assert why.why.startswith(f"/tmp is exported over NFS ({tmp_path}/one.exports)")
