"""Reading mountinfo."""

from __future__ import annotations

import os

import pytest

from gpukeeper.disk.mounts import MountEntry, has_mount_inside, own_mounts, parse_mounts, source_of, unparsed

TEXT = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 254:1 /scratch /tmp rw shared:3 - ext4 /dev/vdb rw
41 40 0:44 / /tmp/with\040blank/point rw - tmpfs tmpfs rw
42 27 254:0 /srv/one.conf /tmp/tree/one.conf rw - ext4 /dev/vda rw
"""


def test_blanks_in_names_are_read_back() -> None:
    assert parse_mounts(TEXT)[2] == MountEntry(
        "0:44", "/", "/tmp/with blank/point", "tmpfs", options=("rw",), number=41
    )


def test_a_mount_inside_a_tree_is_seen_even_of_a_single_file() -> None:
    mounts = parse_mounts(TEXT)
    assert has_mount_inside("/tmp/with blank", mounts)
    assert has_mount_inside("/tmp/tree", mounts)
    assert not has_mount_inside("/tmp/tr", mounts)
    assert not has_mount_inside("/tmp/tree/other", mounts)


def test_a_directory_is_named_as_its_filesystem_names_it() -> None:
    mounts = parse_mounts(TEXT)
    assert source_of("/tmp/pip-1", mounts) == ("254:1", "/scratch/pip-1")
    assert source_of("/var/tmp/pip-1", mounts) == ("254:0", "/var/tmp/pip-1")
    assert source_of("/tmp", mounts) == ("254:1", "/scratch")
    assert source_of("/tmp", ()) is None


def test_of_two_mounts_on_one_point_the_later_counts() -> None:
    assert source_of("/m/x", (MountEntry("1:1", "/", "/m"), MountEntry("2:2", "/", "/m"))) == ("2:2", "/x")


def test_this_machine_has_a_root() -> None:
    assert any(mount.point == "/" for mount in own_mounts())


def test_the_layers_of_an_overlay_are_read_back() -> None:
    options = r"rw,lowerdir=/a\134:1:/b\0401::/data,upperdir=/up\054per,workdir=/work,index=off"
    (mount,) = parse_mounts(f"9 1 0:60 / /merged rw - overlay overlay {options}")
    assert mount.layers == ("/a:1", "/b 1", "/data", "/up,per", "/work")
    (newer,) = parse_mounts("9 1 0:60 / /merged rw - overlay none rw,lowerdir+=/a:1,datadir+=/b,upperdir=/c")
    assert newer.layers == ("/a:1", "/b", "/c")
    (other,) = parse_mounts("9 1 0:60 / /merged rw - ext4 /dev/vda rw,upperdir=/c")
    assert other.layers == ()


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0b", "\x1c", "\r", "\u3000"])
def test_only_what_the_kernel_writes_ends_a_line_or_a_field(sign: str) -> None:
    line = f"9 1 0:60 / /a{sign}b rw - tmpfs x{sign}y rw\n"
    for text in (line, os.fsencode(line)):
        (mount,) = parse_mounts(text)
        assert (mount.point, mount.kind) == (f"/a{sign}b", "tmpfs")
        assert unparsed(text) == 0


def test_a_line_that_is_not_the_kernels_is_counted_and_no_error() -> None:
    text = b"9 1 0:60 / /a rw - tmpfs x rw\nnonsense\n\xff\xfe 1\n9 1 0:60 / /b\\777\\\n"
    assert [mount.number for mount in parse_mounts(text)] == [9, 9]
    assert unparsed(text) == 2
