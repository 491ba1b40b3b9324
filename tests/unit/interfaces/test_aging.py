"""Who ages out files of a living folder, read from the settings that real machines have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.interfaces.cli.doctor import aged_by

RAY = "/tmp/ray"
DEBIAN = "D /tmp 1777 root root -\n#q /var/tmp 1777 root root 30d\n"
SYSTEMD = "q /tmp 1777 root root 10d\nq /var/tmp 1777 root root 30d\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return tmp_path


def write(machine: Path, name: str, text: str) -> None:
    path = machine / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_a_cleaner_ages_nothing(machine: Path) -> None:
    assert aged_by(RAY, machine) == []


def test_systemds_own_settings_age_a_living_root(machine: Path) -> None:
    write(machine, "usr/lib/tmpfiles.d/tmp.conf", SYSTEMD)
    (words,) = aged_by(RAY, machine)
    assert "files below /tmp that were unused for 10d (/usr/lib/tmpfiles.d/tmp.conf)" in words
    assert "x /tmp/ray*" in words
    (words,) = aged_by("/var/tmp/ray", machine)
    assert "files below /var/tmp that were unused for 30d" in words
    assert aged_by("/data/ray", machine) == []


def test_debian_ages_nothing_below_tmp(machine: Path) -> None:
    write(machine, "usr/lib/tmpfiles.d/tmp.conf", DEBIAN)
    assert aged_by(RAY, machine) == []


@pytest.mark.parametrize(
    ("line", "ages"),
    [
        ("x /tmp/ray*", False),
        ("x /tmp/ray", False),
        ("x /tmp/*", False),
        ("x /tmp", False),
        ("x %T/ray*", False),
        ('x "/tmp/ray"', False),
        ("x! /tmp/ray*", True),  # for the boot only
        ("X /tmp/ray*", True),  # the folder itself, not what is in it
        ("x /tmp/ray/session_*", True),  # says nothing of the root
        ("x /tmp/other*", True),
        ("# x /tmp/ray*", True),
        ("d /tmp/ray 0777 root root -", False),  # a line of its own, without an age
        ("d /tmp/ray 0777 root root 3d", True),
        ("x", True),
    ],
)
def test_an_exclusion_counts_when_it_keeps_out_what_is_inside(machine: Path, line: str, ages: bool) -> None:
    write(machine, "usr/lib/tmpfiles.d/tmp.conf", SYSTEMD)
    write(machine, "etc/tmpfiles.d/ray.conf", f"{line}\n")
    assert bool(aged_by(RAY, machine)) is ages


def test_a_file_hides_those_of_its_name(machine: Path) -> None:
    write(machine, "usr/lib/tmpfiles.d/tmp.conf", SYSTEMD)
    write(machine, "etc/tmpfiles.d/tmp.conf", DEBIAN)
    assert aged_by(RAY, machine) == []
    (machine / "etc/tmpfiles.d/tmp.conf").unlink()
    (machine / "etc/tmpfiles.d/tmp.conf").symlink_to("/dev/null")
    assert aged_by(RAY, machine) == []


def test_tmpreaper_ages_what_its_settings_do_not_protect(machine: Path) -> None:
    write(machine, "etc/tmpreaper.conf", "# comment\nTMPREAPER_TIME=3d\nTMPREAPER_PROTECT_EXTRA=''\n")
    assert aged_by(RAY, machine) == [], "its daily program is not there"
    write(machine, "etc/cron.daily/tmpreaper", "#!/bin/sh\n")
    (words,) = aged_by(RAY, machine)
    assert "tmpreaper deletes files below /tmp that were not read for 3d" in words
    assert "TMPREAPER_PROTECT_EXTRA='/tmp/ray*'" in words
    assert aged_by("/data/ray", machine) == []


@pytest.mark.parametrize(
    "line", ["TMPREAPER_PROTECT_EXTRA='/tmp/ray*'", "SHOWWARNING=true", "TMPREAPER_DIRS=/scratch/."]
)
def test_tmpreaper_that_leaves_it_alone_is_not_named(machine: Path, line: str) -> None:
    write(machine, "etc/cron.daily/tmpreaper", "#!/bin/sh\n")
    write(machine, "etc/tmpreaper.conf", f"{line}\n")
    assert aged_by(RAY, machine) == []
