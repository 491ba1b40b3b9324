"""Reports: which of them stay, saving them, bringing them back."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.disk.mounts import MountEntry
from gpukeeper.disk.open_files import OpenFiles
from gpukeeper.lifecycle.decide import decide
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import Accepted, Action, Changed, Evidence, NothingToCapture, Refused, Verdict, View
from gpukeeper.model.policy import Kept, PlaceScope, Policy, Reports
from gpukeeper.model.subject import Category, Gone, Shape, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.acts import ARCHIVE_LIMIT, PRIVATE_FOLDER, private_folder
from gpukeeper.platforms.host.connect import opened
from tests.unit.platforms.host.machine import Machine, a_tick, everything_seen, held_open

WEEK = timedelta(days=7)


def machine(root: Path, **given: Any) -> Machine:
    return Machine(root, reports=Reports(roots=(str(root),), **({"keep_last": 0} | given)))


def report(root: Path, name: str) -> Path:
    (root / name / "plots").mkdir(parents=True)
    (root / name / "summary.txt").write_text(name * 100)
    (root / name / "plots" / "loss.svg").write_text("<svg/>")
    a_tick()
    return root / name


def saved(on: Machine, name: str) -> Evidence:
    taken = on.run(on.platform.capture(on.observe()[name], ()))
    assert isinstance(taken, Evidence), taken
    return taken


def test_each_entry_of_a_root_is_a_report_but_no_link_and_no_hidden_name(tmp_path: Path) -> None:
    report(tmp_path, "run-1")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "latest").symlink_to("nowhere")
    found = machine(tmp_path).observe()
    assert sorted(found) == ["notes.txt", "run-1"]
    one = found["run-1"]
    assert (one.ref.kind, one.shape, one.category) == ("report", Shape.TREE, Category.REPORT)
    assert isinstance(one.size, int)
    assert one.together is None


def test_an_old_report_is_due_by_its_newest_file_and_a_young_one_waits(tmp_path: Path) -> None:
    report(tmp_path, "run-1")
    on = machine(tmp_path)
    policy = Policy(scope={"host": PlaceScope()}, kept={"report": Kept(older_than=WEEK)})
    for ahead, action in ((WEEK - timedelta(hours=1), Action.KEEP), (WEEK + timedelta(hours=1), Action.REMOVE)):
        on.clock.by = ahead
        decision = decide(View(on.observe()["run-1"]), Rulebook(policy), on.clock.now())
        assert decision.action is action, decision
        assert "a report of" in decision.reason


# What stays


def test_the_newest_ones_stay_however_old_they_are(tmp_path: Path) -> None:
    for number in range(4):
        report(tmp_path, f"run-{number}")
    on = machine(tmp_path, keep_last=2)
    on.clock.by = timedelta(days=100)
    stay = {name: one.kept for name, one in on.observe().items()}
    among = "it is among the 2 newest of its root"
    assert stay == {"run-0": None, "run-1": None, "run-2": among, "run-3": among}


def test_a_read_alone_knows_the_newest_too(tmp_path: Path) -> None:
    report(tmp_path, "run-0"), report(tmp_path, "run-1")
    seen = machine(tmp_path).observe()
    on = machine(tmp_path, keep_last=1)
    assert on.read(seen["run-1"]).kept == "it is the newest of its root"
    assert on.read(seen["run-0"]).kept is None


def test_when_newer_ones_go_meanwhile_an_older_one_becomes_one_of_the_newest(tmp_path: Path) -> None:
    older, newer = report(tmp_path, "run-0"), report(tmp_path, "run-1")
    on = machine(tmp_path, keep_last=1)
    seen = on.observe()
    assert seen["run-0"].kept is None
    newer.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    assert on.read(seen["run-0"]).kept == "it is the newest of its root"
    assert older.exists()


@pytest.mark.parametrize("to", ["run-0", "run-0/plots", "{root}/run-0", "other"])
def test_what_a_link_leads_to_stays(tmp_path: Path, to: str) -> None:
    report(tmp_path, "run-0"), report(tmp_path, "run-1")
    (tmp_path / "other").symlink_to("run-0/plots")
    on = machine(tmp_path)
    before = on.observe()
    (tmp_path / "latest").symlink_to(to.format(root=tmp_path))
    seen = on.observe()
    assert str(seen["run-0"].kept).endswith("points to it")
    assert seen["run-1"].kept is None
    assert isinstance(on.remove(before["run-0"]), Changed), "the link came after the look"


def test_a_name_to_be_kept_and_a_keep_file_keep_a_report(tmp_path: Path) -> None:
    report(tmp_path, "baseline-3"), report(tmp_path, "run-1")
    (tmp_path / "run-1" / ".keep").touch()
    seen = machine(tmp_path, keep=("baseline*",)).observe()
    assert seen["baseline-3"].kept == "the policy keeps entries with its name"
    assert seen["run-1"].kept == "it contains a file named .keep"
    assert isinstance(seen["run-1"].size, int), "reports are shown with their size, whether they stay or not"


def test_a_kept_report_is_protected_by_the_rule(tmp_path: Path) -> None:
    report(tmp_path, "run-1")
    on = machine(tmp_path, keep_last=1)
    on.clock.by = 2 * WEEK
    policy = Policy(scope={"host": PlaceScope()}, kept={"report": Kept(older_than=WEEK)})
    decision = decide(View(on.observe()["run-1"]), Rulebook(policy), on.clock.now())
    assert (decision.action, decision.verdict) == (Action.KEEP, Verdict.PROTECT)
    assert decision.reason == "it stays: it is the newest of its root"


def test_a_report_that_was_taken_and_put_back_is_no_newer_for_it(tmp_path: Path) -> None:
    older = report(tmp_path, "run-0")
    report(tmp_path, "run-1")
    on = machine(tmp_path, keep_last=1)
    before, changed = on.observe(), older.stat().st_ctime_ns
    a_tick()
    with held_open(older / "summary.txt"):
        assert isinstance(on.remove(before["run-0"]), Changed)
    assert older.stat().st_ctime_ns > changed, "it was moved"
    for looking in (on, machine(tmp_path, keep_last=1)):
        after = looking.observe()
        assert {name: one.kept for name, one in after.items()} == {name: one.kept for name, one in before.items()}
        assert looking.read(after["run-0"]).kept is None


@pytest.mark.parametrize("kind", ["nfs4", "lustre", ""])
def test_what_other_machines_may_use_is_never_known_to_be_free(tmp_path: Path, kind: str) -> None:
    def scan() -> OpenFiles:
        found = everything_seen()
        there = MountEntry("0:99", "/", str(tmp_path), kind)
        return msgspec.structs.replace(found, own_mounts=(*found.own_mounts, there))

    report(tmp_path, "tmp-1")
    results = Machine(tmp_path, reports=Reports(roots=(str(tmp_path),), keep_last=0), scan=scan)
    for on, says in ((results, True), (Machine(tmp_path, scan=scan), False)):
        one = on.observe()["tmp-1"]
        assert isinstance(one.in_use, Unknown)
        assert one.in_use.why.startswith("it is on a")
        assert any("no policy setting changes that" in words for words in one.findings) is says
        assert isinstance(on.remove(one), Refused)
    assert on.names() == ["tmp-1"]


# There and back


def snapshot(path: Path) -> dict[str, tuple[object, ...]]:
    found = {}
    for one in (path, *sorted(path.rglob("*"))):
        status = one.lstat()
        content = str(one.readlink()) if one.is_symlink() else one.read_bytes() if one.is_file() else None
        owner = (status.st_uid, status.st_gid) if os.geteuid() == 0 else ()
        rest = () if one.is_symlink() else (status.st_mode, status.st_mtime)
        found[str(one.relative_to(path.parent))] = (content, *rest, *owner)
    return found


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    path = report(tmp_path, "run-1")
    (path / "plots" / "best").symlink_to("loss.svg")
    os.link(path / "summary.txt", path / "again.txt")
    (path / os.fsdecode(b"odd\n\xff")).write_text("x")
    (path / "summary.txt").chmod(0o664)
    if os.geteuid() == 0:
        os.chown(path / "plots" / "loss.svg", 12345, 23456)
    for number, one in enumerate((*sorted(path.rglob("*"), reverse=True), path)):
        if not one.is_symlink():  # whole seconds: of their fractions an archive keeps a few digits
            os.utime(one, (1_600_000_000 + number,) * 2)
    before = snapshot(path)
    on = machine(tmp_path)
    evidence, seen = saved(on, "run-1"), on.observe()["run-1"]
    assert isinstance(on.remove(on.read(seen)), Accepted)
    assert isinstance(on.read(seen), Gone)
    assert on.run(on.platform.restore(seen.ref, evidence)) == Accepted()
    assert snapshot(path) == before
    assert (path / "again.txt").stat().st_ino == (path / "summary.txt").stat().st_ino
    assert on.names() == ["run-1"]


def test_a_plain_file_comes_back_too(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words")
    on = machine(tmp_path)
    evidence, seen = saved(on, "notes.txt"), on.observe()["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    assert on.run(on.platform.restore(seen.ref, evidence)) == Accepted()
    assert (tmp_path / "notes.txt").read_text() == "words"


def test_a_name_that_is_taken_is_not_touched(tmp_path: Path) -> None:
    path = report(tmp_path, "run-1")
    on = machine(tmp_path)
    evidence, seen = saved(on, "run-1"), on.observe()["run-1"]
    (path / "summary.txt").write_text("newer")
    answer = on.run(on.platform.restore(seen.ref, evidence))
    assert isinstance(answer, Refused)
    assert "move it away" in answer.why
    assert (path / "summary.txt").read_text() == "newer"
    assert on.names() == ["run-1"]


def test_nothing_is_saved_when_the_policy_wants_no_copies(tmp_path: Path) -> None:
    report(tmp_path, "run-1")
    on = machine(tmp_path, archive=False)
    seen = on.observe()["run-1"]
    assert isinstance(on.run(on.platform.capture(seen, ())), NothingToCapture)
    assert isinstance(on.run(on.platform.restore(seen.ref, None)), Refused)


def test_a_report_that_is_too_large_to_be_saved_shows_what_to_do(tmp_path: Path) -> None:
    path = report(tmp_path, "run-1")
    with (path / "huge").open("wb") as file:
        file.truncate(ARCHIVE_LIMIT)  # a hole: no room is needed for it, and an archive would still be read through it
    on = machine(tmp_path)
    taken = on.run(on.platform.capture(on.observe()["run-1"], ()))
    assert isinstance(taken, Unknown)
    assert "reports.archive: false" in taken.why


def test_a_socket_cannot_be_saved_so_the_report_stays(tmp_path: Path) -> None:
    path = report(tmp_path, "run-1")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "s"))
        on = machine(tmp_path)
        taken = on.run(on.platform.capture(on.observe()["run-1"], ()))
    assert isinstance(taken, Unknown)
    assert "socket" in taken.why


def test_what_became_another_thing_is_not_saved(tmp_path: Path) -> None:
    path = report(tmp_path, "run-1")
    on = machine(tmp_path)
    seen = on.observe()["run-1"]
    path.rename(tmp_path.parent / f"{tmp_path.name}-moved")
    report(tmp_path, "run-1")
    assert isinstance(on.run(on.platform.capture(seen, ())), Unknown)


def test_a_link_to_elsewhere_is_saved_as_a_link_and_never_read_through(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("nobody else's business")
    root = tmp_path / "reports"
    path = report(root, "run-1")
    (path / "link").symlink_to(secret)
    on = machine(root)
    with tarfile.open(fileobj=io.BytesIO(saved(on, "run-1").files["report.tar.gz"])) as tar:
        assert tar.getmember("run-1/link").linkname == str(secret)
        assert tar.getmember("run-1/link").issym()


def test_what_took_the_name_of_our_private_directory_is_not_removed(tmp_path: Path) -> None:
    """Where everybody may rename, anything may have that name when we are done."""
    thesis = report(tmp_path, "thesis")
    with opened(str(tmp_path)) as folder, private_folder(folder) as private:
        (ours,) = tmp_path.glob(f"{PRIVATE_FOLDER}*")
        os.mkdir("half", dir_fd=private)
        os.close(os.open("half/file", os.O_CREAT, dir_fd=private))
        ours.rename(tmp_path / "moved")
        thesis.rename(ours)
    assert (ours / "summary.txt").exists()
    assert list((tmp_path / "moved").iterdir()) == []


def forged(*members: tuple[str, bytes, str]) -> Evidence:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, kind, to in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, to
            tar.addfile(member)
    return Evidence({"report.tar.gz": content.getvalue()})


@pytest.mark.parametrize(
    "evidence",
    [
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/../../out", tarfile.REGTYPE, "")),
        forged(("run-1", tarfile.DIRTYPE, ""), ("other", tarfile.REGTYPE, "")),
        forged(
            ("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.SYMTYPE, "/etc"), ("run-1/l/x", tarfile.REGTYPE, "")
        ),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.SYMTYPE, "../../out")),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.LNKTYPE, "../out")),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.SYMTYPE, "..")),
        forged(("run-1", tarfile.SYMTYPE, "../out")),
        forged(
            ("run-1", tarfile.DIRTYPE, ""),
            ("run-1/a", tarfile.DIRTYPE, ""),
            ("run-1/a/b", tarfile.DIRTYPE, ""),
            ("run-1/l", tarfile.SYMTYPE, "a/b"),
            ("run-1/m", tarfile.SYMTYPE, "l/../../../out"),
        ),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.SYMTYPE, "d"), ("run-1/l/x", tarfile.REGTYPE, "")),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/l", tarfile.SYMTYPE, "d"), ("run-1/l", tarfile.REGTYPE, "")),
        forged(("run-1", tarfile.DIRTYPE, ""), ("run-1/d", tarfile.CHRTYPE, "")),
        forged(("run-2", tarfile.DIRTYPE, "")),
        forged(),
        Evidence({"report.tar.gz": b"no archive"}),
    ],
)
def test_an_archive_that_would_lead_out_of_the_report_is_refused(tmp_path: Path, evidence: Evidence) -> None:
    root = tmp_path / "reports"
    path = report(root, "run-1")
    (tmp_path / "out").write_text("safe")
    on = machine(root)
    seen = on.observe()["run-1"]
    path.rename(tmp_path / "moved")
    answer = on.run(on.platform.restore(seen.ref, evidence))
    assert isinstance(answer, Refused), answer
    assert on.names() == []
    assert (tmp_path / "out").read_text() == "safe"


def test_a_report_of_a_root_that_is_no_longer_named_does_not_come_back(tmp_path: Path) -> None:
    report(tmp_path, "run-1")
    on = machine(tmp_path)
    evidence, seen = saved(on, "run-1"), on.observe()["run-1"]
    on.platform.follow(Policy())
    assert isinstance(on.run(on.platform.restore(seen.ref, evidence)), Refused)


def test_a_report_root_wins_over_a_temporary_one(tmp_path: Path) -> None:
    from gpukeeper.model.policy import Temporary

    report(tmp_path, "tmp-1")
    on = machine(tmp_path)
    both = Policy(temporary=(Temporary(root=str(tmp_path), names=("tmp*",)),), reports=Reports(roots=(str(tmp_path),)))
    on.platform.follow(both)
    (one,) = [subject for subject in on.all() if subject.shape is Shape.TREE]
    assert isinstance(one, Subject)
    assert one.category is Category.REPORT
