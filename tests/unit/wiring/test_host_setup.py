"""Setting up one server: what was written is recorded, and only that is taken back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from gpukeeper.config.load import SITE_FILE, load_text
from gpukeeper.config.timers import (
    CRON,
    PASS,
    SERVICE,
    TIMER,
    TMPFILES,
    HostAnswers,
    host_files,
    unit_to_enable,
)
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.policy import Mode, Schedule
from gpukeeper.wiring.host_setup import RECORD, Change, HostSetup, need_systemd

UNIT = "gpukeeper.service"
ANSWERS = HostAnswers(program="/opt/gpukeeper/bin/gpukeeper", admins=("root", "eve"), platforms=("host", "docker"))
FILES = host_files(ANSWERS)


class Systemd:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""

    def __call__(self, arguments: Sequence[str]) -> str:
        self.calls.append(" ".join(arguments))
        if self.fails and arguments[0] == self.fails:
            raise KeeperError("systemctl failed")
        return "active\n" if arguments[0] == "is-active" else ""


class Machine:
    def __init__(self, root: Path) -> None:
        self.root, self.systemd = root, Systemd()
        self.booted = root / "run/systemd/system"
        self.booted.mkdir(parents=True)
        self.setup = HostSetup(root / "state", root=root, run=self.systemd)

    def at(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def files(self) -> set[str]:
        return {f"/{path.relative_to(self.root)}" for path in self.root.rglob("*") if path.is_file()}

    def state(self, path: Path) -> Change:
        return {one.path: one.change for one in self.setup.changes(FILES)}[str(path)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    tmp_path.chmod(0o755)
    return Machine(tmp_path)


def test_it_writes_starts_and_records(machine: Machine) -> None:
    done = machine.setup.write(FILES, UNIT)
    assert {one.change for one in done} == {Change.CREATE}
    assert machine.files() == {*map(str, FILES), f"/state/{RECORD}"}
    assert machine.systemd.calls == ["daemon-reload", f"enable {UNIT}", f"restart {UNIT}"]
    assert machine.setup.is_active(UNIT)


def test_again_changes_nothing(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    assert {one.change for one in machine.setup.write(FILES, UNIT)} == {Change.SAME}


def test_remove_leaves_nothing_but_the_state_directory(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    assert {one.change for one in machine.setup.remove()} == {Change.REMOVE}
    assert machine.files() == set()
    assert not machine.at(SITE_FILE.parent).exists()
    assert machine.systemd.calls[-2:] == [f"disable --now {UNIT}", "daemon-reload"]
    assert machine.setup.removals() == ()


def test_a_file_of_a_person_is_neither_overwritten_nor_removed(machine: Machine) -> None:
    policy = machine.at(SITE_FILE)
    policy.parent.mkdir(parents=True)
    policy.write_text("preset: ci\n")
    assert machine.state(SITE_FILE) is Change.KEEP
    machine.setup.write(FILES, UNIT)
    assert policy.read_text() == "preset: ci\n"
    machine.setup.remove()
    assert machine.files() == {str(SITE_FILE)}


def test_a_file_that_was_changed_since_is_kept_on_removal_and_named(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    machine.at(SITE_FILE).write_text("mode: enforce\n")
    kept = [one for one in machine.setup.remove() if one.change is Change.KEEP]
    assert [one.path for one in kept] == [str(SITE_FILE)]
    assert machine.at(SITE_FILE).read_text() == "mode: enforce\n"
    assert not machine.at(SERVICE).exists()


def test_a_new_version_updates_what_it_wrote_itself(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    newer = {**FILES, SERVICE: FILES[SERVICE] + "# newer\n"}
    changes = {one.path: one.change for one in machine.setup.write(newer, UNIT)}
    assert changes[str(SERVICE)] is Change.UPDATE
    assert machine.at(SERVICE).read_text().endswith("# newer\n")


def test_from_daemon_to_timer_the_daemon_is_disabled_and_its_unit_removed(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    timer = host_files(HostAnswers(program=ANSWERS.program, every=Schedule(every=timedelta(hours=1))))
    machine.setup.write(timer, TIMER.name)
    assert f"disable --now {UNIT}" in machine.systemd.calls
    assert not machine.at(SERVICE).exists()
    assert machine.at(PASS).exists()
    assert machine.at(TIMER).exists()


def test_killed_in_the_middle_everything_written_is_still_removed(machine: Machine) -> None:
    machine.systemd.fails = "daemon-reload"
    with pytest.raises(KeeperError):
        machine.setup.write(FILES, UNIT)
    machine.systemd.fails = ""
    machine.setup.remove()
    assert machine.files() == set()


def test_an_update_killed_before_its_first_file_still_knows_the_old_files(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    newer = {path: f"{text}# newer\n" for path, text in FILES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.setup, "_put", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            machine.setup.write(newer, UNIT)
    assert {one.change for one in machine.setup.changes(newer)} == {Change.UPDATE}
    machine.setup.remove()
    assert machine.files() == set()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_without_its_record_nothing_is_guessed(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    (machine.root / "state" / RECORD).write_bytes(b"{broken")
    with pytest.raises(KeeperError, match="Nothing was changed"):
        machine.setup.remove()
    (machine.root / "state" / RECORD).unlink()
    assert machine.setup.removals() == ()
    assert machine.state(SERVICE) is Change.SAME


def of_all(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)


def of_all_and_sticky(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o1777)


def of_nobody(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a directory away")
    directory.mkdir(parents=True, exist_ok=True)
    os.chown(directory, 65534, 65534)


def linked_to_nobodys(directory: Path) -> None:
    """The link is root's, and what it leads to is not."""
    target = directory.with_name("elsewhere")
    of_nobody(target)
    directory.rmdir() if directory.exists() else directory.parent.mkdir(parents=True, exist_ok=True)
    directory.symlink_to(target)


def linked_by_nobody(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a link away")
    directory.with_name("own").mkdir(parents=True)
    directory.symlink_to(directory.with_name("own"))
    os.chown(directory, 65534, 65534, follow_symlinks=False)


MAKERS = [of_all, of_nobody, linked_to_nobodys, linked_by_nobody]


@pytest.mark.parametrize("make", [*MAKERS, of_all_and_sticky])
@pytest.mark.parametrize("directory", [SITE_FILE.parent, SERVICE.parent, TMPFILES.parent])
def test_with_one_directory_that_others_can_change_nothing_at_all_is_written(
    machine: Machine, directory: Path, make: Callable[[Path], None]
) -> None:
    make(machine.at(directory))
    before = sorted(machine.root.rglob("*"))
    with pytest.raises(KeeperError, match=r"Nothing was written.*Fix: ch(mod|own)") as refused:
        machine.setup.write(FILES, UNIT)
    named = machine.at(directory).with_name("elsewhere") if make is linked_to_nobodys else machine.at(directory)
    assert str(named) in str(refused.value)
    assert sorted(machine.root.rglob("*")) == before
    assert machine.systemd.calls == []


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("above", ["etc", "var"])
def test_nor_with_one_above_them_or_above_the_ledger(tmp_path: Path, above: str, make: Callable[[Path], None]) -> None:
    tmp_path.chmod(0o755)
    make(tmp_path / above)
    machine = Machine(tmp_path)
    machine.setup = HostSetup(tmp_path / "var/lib/gpukeeper", root=tmp_path, run=machine.systemd)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeeperError, match=r"Nothing was written.*Fix: ch(mod|own)"):
        machine.setup.write(FILES, UNIT)
    assert sorted(tmp_path.rglob("*")) == before
    assert machine.systemd.calls == []


def test_a_unit_that_an_admin_masked_is_kept_and_no_mode_of_dev_null_is_complained_about(machine: Machine) -> None:
    machine.at(SERVICE).parent.mkdir(parents=True)
    machine.at(SERVICE).symlink_to("/dev/null")
    done = {one.path: one.change for one in machine.setup.write(FILES, UNIT)}
    assert done[str(SERVICE)] is Change.KEEP
    assert machine.at(SERVICE).is_symlink()


def test_a_policy_of_another_user_is_not_taken_for_one_of_root(machine: Machine) -> None:
    machine.at(SITE_FILE).parent.mkdir(parents=True)
    machine.at(SITE_FILE).write_text("mode: enforce\n")
    machine.at(SITE_FILE).chmod(0o666)
    with pytest.raises(KeeperError, match=r"Nothing was written.*policy\.yaml.*Fix: chmod go-w"):
        machine.setup.write(FILES, UNIT)
    assert machine.files() == {str(SITE_FILE)}


def test_the_first_policy_is_valid_and_dry() -> None:
    policy = load_text(FILES[SITE_FILE]).policy
    assert policy.mode is Mode.PLAN
    assert set(policy.admins) == {"root", "eve"}
    assert set(policy.scope) == {"host", "docker"}


def test_a_program_that_a_unit_file_cannot_name_is_refused() -> None:
    with pytest.raises(UsageError, match="Install gpukeeper in /opt/gpukeeper"):
        host_files(HostAnswers(program="/opt/my tools/gpukeeper"))


def test_the_units_in_the_repository_are_those_that_setup_writes() -> None:
    directory = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
    timer = host_files(HostAnswers(program=ANSWERS.program, every=Schedule(every=timedelta(hours=1))))
    wanted = {path.name: text for path, text in {**FILES, **timer}.items() if path not in (SITE_FILE, TMPFILES)}
    assert {path.name: path.read_text() for path in directory.iterdir()} == wanted


def test_cron_needs_no_systemd_and_is_taken_back(machine: Machine) -> None:
    by_cron = msgspec.structs.replace(ANSWERS, every=Schedule(every=timedelta(hours=1)), cron=True)
    files = host_files(by_cron)
    assert unit_to_enable(by_cron) == ""
    machine.setup.write(files, "")
    assert machine.at(CRON).read_text().splitlines()[-1] == (
        f"0 * * * * root {ANSWERS.program} apply --yes --policy {SITE_FILE}"
    )
    assert machine.setup.is_active("")
    assert {one.change for one in machine.setup.changes(files)} == {Change.SAME}
    machine.setup.remove()
    assert machine.systemd.calls == []
    assert not machine.at(CRON).exists()


def test_from_systemd_to_cron_the_unit_ends(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    machine.systemd.calls.clear()
    machine.setup.write(host_files(msgspec.structs.replace(ANSWERS, every=Schedule(), cron=True)), "")
    assert machine.systemd.calls == [f"disable --now {UNIT}", "daemon-reload"]
    assert not machine.at(SERVICE).exists()


def test_units_of_an_older_setup_are_taken_back_where_systemd_does_not_run(machine: Machine) -> None:
    """As when an image of a server starts as a container: `systemctl disable` would fail there."""
    machine.setup.write(FILES, UNIT)
    link, foreign = enabled(machine, SERVICE), enabled(machine, SERVICE.with_name("other.service"))
    machine.booted.rmdir()
    machine.systemd.calls.clear()
    assert {one.change for one in machine.setup.remove()} == {Change.REMOVE}
    assert machine.systemd.calls == []
    assert machine.files() == set()
    assert not link.is_symlink()
    assert foreign.is_symlink()


def test_a_link_that_a_person_made_to_another_unit_stays(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    link = enabled(machine, SERVICE)
    link.unlink()
    link.symlink_to("/opt/own/gpukeeper.service")
    machine.booted.rmdir()
    machine.setup.remove()
    assert link.is_symlink()


def test_from_systemd_to_cron_where_systemd_does_not_run(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    link = enabled(machine, SERVICE)
    machine.booted.rmdir()
    machine.systemd.calls.clear()
    machine.setup.write(host_files(msgspec.structs.replace(ANSWERS, every=Schedule(), cron=True)), "")
    assert machine.systemd.calls == []
    assert machine.at(CRON).exists()
    assert not machine.at(SERVICE).exists()
    assert not link.is_symlink()


def enabled(machine: Machine, unit: Path) -> Path:
    """As `systemctl enable` does it."""
    link = machine.at(unit.parent / "multi-user.target.wants" / unit.name)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(unit)
    return link


def test_a_given_policy_is_installed_as_it_is() -> None:
    assert host_files(msgspec.structs.replace(ANSWERS, policy="mode: plan\n"))[SITE_FILE] == "mode: plan\n"


def test_a_machine_without_systemd_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Nothing was written.*--every 1h --cron"):
        need_systemd(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    need_systemd(tmp_path)


NAMED = {**FILES, SITE_FILE: "preset: ci\n"}
OTHER = host_files(HostAnswers(program=ANSWERS.program, admins=("root", "ann"), platforms=("host",)))


def test_a_first_policy_never_replaces_one_that_was_named(machine: Machine) -> None:
    """Such as one that `fleet` installed."""
    machine.setup.write(NAMED, UNIT, given=True)
    for asked in (True, False):
        with pytest.raises(UsageError, match=r"(?s)-preset: ci\n.*\+preset: shared-host.*Nothing was written"):
            machine.setup.keeping_policy(FILES, asked=asked)
    machine.setup.write(NAMED, UNIT)  # as with --policy and the file itself: nothing is written
    with pytest.raises(UsageError):
        machine.setup.keeping_policy(FILES, asked=False)


def test_a_first_policy_is_replaced_only_by_one_that_was_asked_for(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    kept = machine.setup.keeping_policy(OTHER, asked=False)
    assert {one.change for one in machine.setup.changes(kept)} == {Change.SAME}
    assert machine.setup.keeping_policy(OTHER, asked=True) == OTHER
    machine.setup.write(kept, UNIT)
    assert {one.change for one in machine.setup.remove()} == {Change.REMOVE}, "it is still known as setup's own"


def test_a_policy_of_an_older_version_may_have_been_named(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    record = machine.root / "state" / RECORD
    record.write_bytes(record.read_bytes().replace(b',"given":false', b""))
    assert machine.setup.record().given is None
    assert machine.setup.keeping_policy(FILES, asked=False) == FILES
    with pytest.raises(UsageError, match="a first policy would replace it"):
        machine.setup.keeping_policy(OTHER, asked=True)


def test_a_policy_of_a_person_and_none_at_all_are_treated_as_before(machine: Machine) -> None:
    assert machine.setup.keeping_policy(FILES, asked=False) == FILES
    machine.at(SITE_FILE).parent.mkdir(parents=True)
    machine.at(SITE_FILE).write_text("preset: ci\n")
    assert machine.setup.keeping_policy(FILES, asked=True) == FILES
    assert machine.state(SITE_FILE) is Change.KEEP


def test_a_named_policy_replaces_an_unchanged_one(machine: Machine) -> None:
    machine.setup.write(FILES, UNIT)
    machine.setup.write(NAMED, UNIT, given=True)
    assert machine.at(SITE_FILE).read_text() == NAMED[SITE_FILE]
    assert machine.setup.record().given
