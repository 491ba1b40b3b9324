"""Until when a tree may have been read, by what is on record, by its mounts, and by what was watched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpukeeper.disk.access_times import ReadRecording, Reads, WatchRecord, last_use, reads_of, recorded
from gpukeeper.disk.measure import TreeMeasurement
from gpukeeper.disk.mounts import parse_mounts
from gpukeeper.model.unknown import Unknown

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
ALWAYS, DAILY, NEVER = (Reads(kind, "/scratch") for kind in ReadRecording)


def tree(newest: datetime | Unknown, read: datetime | None = None) -> TreeMeasurement:
    return TreeMeasurement(
        device=1, inode=2, uid=0, size=1, entries=1, newest=newest, ctime_ns=1, problems=(), read=read, content=newest
    )


CHANGED, READ = tree(NOW - 3 * HOUR), tree(NOW - 3 * HOUR, NOW - 3 * HOUR)
READ_THEN_CHANGED = tree(NOW - 3 * HOUR, NOW - 20 * HOUR)


@pytest.mark.parametrize(
    ("found", "reads", "at"),
    [
        (CHANGED, ALWAYS, NOW - 3 * HOUR),
        (READ, ALWAYS, NOW - 3 * HOUR),
        # A read after the change would have been recorded: relatime writes the first one down.
        (CHANGED, DAILY, NOW - 3 * HOUR),
        (READ, DAILY, NOW + 21 * HOUR),
        (READ_THEN_CHANGED, DAILY, NOW + 4 * HOUR),
        (tree(NOW - 30 * HOUR, NOW - 40 * HOUR), DAILY, NOW - 16 * HOUR),
        (tree(NOW - 3 * HOUR, NOW - 90 * HOUR), DAILY, NOW - 3 * HOUR),
    ],
)
def test_a_recorded_read_may_be_followed_by_a_day_of_others(found: TreeMeasurement, reads: Reads, at: datetime) -> None:
    assert last_use(found, reads, None, NOW).at == at


@pytest.mark.parametrize("found", [CHANGED, READ])
def test_where_reads_leave_no_trace_nothing_is_known(found: TreeMeasurement) -> None:
    answer = last_use(found, NEVER, None, NOW).at
    assert isinstance(answer, Unknown)
    assert "but reads are not recorded on /scratch" in answer.why
    assert "gpukeeper serve" in answer.why


@pytest.mark.parametrize("reads", [ALWAYS, DAILY, NEVER])
@pytest.mark.parametrize(
    ("watched", "at"),
    [
        (WatchRecord(NOW - 10 * HOUR), NOW - 3 * HOUR),
        (WatchRecord(NOW - 10 * HOUR, NOW - HOUR), NOW - HOUR),
        (WatchRecord(NOW - 10 * HOUR, NOW - 9 * HOUR), NOW - 3 * HOUR),
    ],
)
def test_what_was_watched_all_the_time_is_known_on_any_mount(reads: Reads, watched: WatchRecord, at: datetime) -> None:
    assert last_use(READ, reads, watched, NOW).at == at


def test_what_was_before_the_watch_is_known_as_without_it() -> None:
    watched = WatchRecord(NOW - HOUR)
    assert last_use(READ, ALWAYS, watched, NOW).at == NOW - 3 * HOUR
    assert last_use(CHANGED, DAILY, watched, NOW).at == NOW - 3 * HOUR
    assert last_use(READ, DAILY, watched, NOW).at == NOW - HOUR
    assert last_use(CHANGED, NEVER, watched, NOW).at == NOW - HOUR


def test_the_evidence_is_reported() -> None:
    assert last_use(CHANGED, DAILY, None, NOW).how == "last change 3h ago"
    assert last_use(READ, DAILY, None, NOW).how == (
        "last recorded read 3h ago; reads in the 24h after that are not recorded on /scratch"
    )
    assert last_use(READ, NEVER, WatchRecord(NOW - 2 * HOUR, NOW - HOUR), NOW).how == (
        "last recorded read 3h ago; watched for 2h, last use 1h ago"
    )
    assert last_use(tree(NOW + HOUR), ALWAYS, None, NOW).how == "last change 1h ahead"


def test_what_was_not_measured_stays_unknown() -> None:
    why = Unknown("contains a mount point")
    assert last_use(tree(why), ALWAYS, WatchRecord(NOW), NOW).at == recorded(tree(why), NOW).at == why


# Mounts

OWN = parse_mounts("""1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw
2 1 8:2 / /scratch rw,noatime - xfs /dev/sdb rw
3 1 8:3 / /strict rw - ext4 /dev/sdc rw
4 1 8:4 / /frozen rw,relatime - ext4 /dev/sdd ro,errors=remount-ro
""")


@pytest.mark.parametrize(
    ("folder", "kind", "words"),
    [
        ("/tmp", ReadRecording.DAILY, "/ (relatime)"),
        ("/scratch/tmp", ReadRecording.NEVER, "/scratch (noatime)"),
        ("/strict", ReadRecording.ALWAYS, "/strict (strictatime)"),
        ("/frozen", ReadRecording.NEVER, "/frozen (read-only)"),
    ],
)
def test_the_options_of_a_mount_say_how_reads_are_recorded(folder: str, kind: ReadRecording, words: str) -> None:
    assert reads_of(folder, OWN, [OWN]) == Reads(kind, words)


def container(*lines: str) -> tuple[object, ...]:
    return parse_mounts("\n".join(("9 0 0:50 / / rw,relatime - overlay overlay rw", *lines)))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("10 9 8:1 /tmp /in rw,noatime - ext4 /dev/sda1 rw", ReadRecording.NEVER),
        ("10 9 8:1 /tmp /in ro,relatime - ext4 /dev/sda1 rw", ReadRecording.NEVER),
        ("10 9 8:1 / /in ro,relatime - ext4 /dev/sda1 rw", ReadRecording.NEVER),
        ("10 9 8:1 /tmp /in rw,relatime - ext4 /dev/sda1 rw", ReadRecording.DAILY),
        ("10 9 8:1 /var /in rw,noatime - ext4 /dev/sda1 rw", ReadRecording.DAILY),  # another folder
        ("10 9 8:2 /tmp /in rw,noatime - ext4 /dev/sda1 rw", ReadRecording.DAILY),  # another filesystem
        ("10 9 8:1 /tmp/one /in rw,noatime - ext4 /dev/sda1 rw", ReadRecording.DAILY),  # that one is in use
    ],
)
def test_the_weakest_way_to_a_directory_counts_in_whatever_namespace(line: str, kind: ReadRecording) -> None:
    assert reads_of("/tmp", OWN, [OWN, container(line)]).recorded is kind  # type: ignore[list-item]


def test_what_is_hidden_by_another_mount_is_no_way() -> None:
    lines = ("10 9 8:1 / /in ro - ext4 /dev/sda1 rw", "11 10 0:60 / /in/tmp rw,relatime - tmpfs tmpfs rw")
    assert reads_of("/tmp", OWN, [container(*lines)]).recorded is ReadRecording.DAILY  # type: ignore[list-item]
    assert reads_of("/var", OWN, [container(*lines)]).recorded is ReadRecording.NEVER  # type: ignore[list-item]


def test_a_service_that_sees_the_machine_read_only_does_not_make_everything_unknown() -> None:
    sandbox = parse_mounts("9 0 8:1 / / ro,relatime - ext4 /dev/sda1 rw")
    assert reads_of("/tmp", OWN, [OWN, sandbox]).recorded is ReadRecording.DAILY
    unrecorded = parse_mounts("9 0 8:1 / / rw,noatime - ext4 /dev/sda1 rw")
    assert reads_of("/tmp", OWN, [OWN, unrecorded]).recorded is ReadRecording.NEVER


def test_a_directory_on_no_known_mount_is_not_recorded() -> None:
    assert reads_of("/tmp", (), ()).recorded is ReadRecording.NEVER
    assert reads_of("/tmp", parse_mounts("1 0 8:1 / / - ext4 /dev/sda1 rw"), ()).recorded is ReadRecording.NEVER
