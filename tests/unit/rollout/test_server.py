"""The program that runs on servers, where it can be tried without root: what it finds, receives and refuses."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpukeeper.rollout import server_program


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "opt" / "gpukeeper"


def version(directory: Path, name: str) -> Path:
    """As the installer leaves it."""
    place = directory.with_name(f"gpukeeper-{name}")
    (place / "bin").mkdir(parents=True)
    (place / "pyvenv.cfg").touch()
    (place / server_program.COMPLETE).touch()
    return place


def test_what_an_installation_is(directory: Path) -> None:
    assert server_program.installation(directory) == ("absent", "")
    directory.parent.mkdir()
    directory.symlink_to(version(directory, "1.0").name)
    assert server_program.installation(directory) == ("link", "1.0")
    directory.unlink()
    directory.mkdir()
    assert server_program.installation(directory) == ("foreign", "")
    (directory / "pyvenv.cfg").touch()
    assert server_program.installation(directory) == ("environment", "")


def test_a_link_that_leads_nowhere_is_foreign_and_not_absent(directory: Path) -> None:
    directory.parent.mkdir()
    directory.symlink_to("gpukeeper-9")
    assert server_program.installation(directory) == ("foreign", "")


@pytest.mark.parametrize(("sent", "missing"), [(b"complete", 0), (b"compl", 3), (b"damagedx", 0)])
def test_a_bundle_counts_only_if_all_of_it_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, missing: int
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent)))
    wanted = hashlib.sha256(b"complete").hexdigest()
    if sent == b"complete":
        server_program.receive(tmp_path / "bundle", 8, wanted)
        assert (tmp_path / "bundle").read_bytes() == sent
        return
    with pytest.raises(server_program.Refused, match=f"{missing} of 8 bytes are missing. Nothing was installed"):
        server_program.receive(tmp_path / "bundle", 8, wanted)


def program(directory: Path, script: str) -> None:
    file = version(directory, "1.0") / "bin" / "gpukeeper"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    directory.symlink_to("gpukeeper-1.0")


@pytest.mark.parametrize(
    ("script", "reply"),
    [
        (
            'echo \'{"policy": {"mode": "enforce"}, "places": []}\'',
            {"code": 0, "mode": "enforce", "places": [], "said": ""},
        ),
        ("echo 'mode is plan' >&2; exit 2", {"code": 2, "problem": "mode is plan"}),
        ("echo '{'", {"code": 0, "problem": "its output cannot be read"}),
    ],
)
def test_a_pass_replies_with_what_was_printed_or_why_not(directory: Path, script: str, reply: dict[str, Any]) -> None:
    program(directory, script)
    found = server_program.one_pass({"directory": str(directory), "act": False})
    assert found.pop("seconds") > 0
    assert found == reply


def gpu(device: str, how: str) -> dict[str, str]:
    return {"place": "gpu1", "device": device, "how": how}


@pytest.mark.parametrize(
    ("before", "unseen", "counted"),
    [
        ([gpu("a", "running"), gpu("a", "infrastructure"), gpu("b", "free")], [], {"number": 2, "free": 1}),
        ([], [], None),  # no GPU
        ([gpu("a", "free")], [{"what": "containers"}], None),  # who holds it is not known
    ],
)
def test_the_free_gpus_are_counted_before_a_pass_and_after_it(
    directory: Path, before: list[dict[str, str]], unseen: list[dict[str, str]], counted: dict[str, int] | None
) -> None:
    observed = [{"gpus": before, "unseen": unseen}, {"gpus": [{**one, "how": "free"} for one in before], "unseen": []}]
    directory.parent.mkdir()
    for number, one in enumerate(observed):
        directory.with_name(f"observed-{number}").write_text(json.dumps(one))
    script = f"""cd {directory.parent}
case $1 in
observe) cat observed-0 ;;
apply) mv observed-1 observed-0; echo '{{"policy": {{"mode": "enforce"}}, "places": []}}' ;;
esac"""
    program(directory, script)
    found = server_program.one_pass({"directory": str(directory), "act": True})
    after = None if counted is None else {**counted, "free": counted["number"]}
    assert (found.get("gpus_before"), found.get("gpus_after")) == (counted, after)


def test_logs_are_errors_and_newest_lines_and_what_cannot_be_read_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(directory, 'test "$3 $4" = "--last 2" || exit 9; test "$5" != --errors || exit 4; echo one; echo two')
    monkeypatch.setattr(server_program, "journal", lambda last: ["echo", f"{last} of systemd"])
    assert server_program.logs({"directory": str(directory), "last": 2}) == {
        "errors": [],
        "ledger": ["one", "two"],
        "journal": ["2 of systemd"],
        "problems": ["the errors could not be read: exit code 4"],
    }


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("GPUKEEPER_STATE", str(tmp_path / "state"))


@pytest.mark.usefixtures("as_root")
def test_only_what_the_installer_made_is_removed(directory: Path) -> None:
    directory.parent.mkdir()
    version(directory, "1.0")
    directory.symlink_to("gpukeeper-1.0")
    others = directory.with_name("gpukeeper-data")
    others.mkdir()
    assert server_program.remove({"directory": str(directory)}) == {"left": []}
    assert [one.name for one in directory.parent.iterdir()] == ["gpukeeper-data"]


@pytest.mark.usefixtures("as_root")
def test_an_environment_that_it_did_not_make_is_left_and_named(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "pyvenv.cfg").touch()
    assert server_program.remove({"directory": str(directory)}) == {"left": [str(directory)]}
    assert directory.is_dir()


@pytest.mark.usefixtures("as_root")
def test_units_are_not_left_without_the_program_that_removes_them(directory: Path, tmp_path: Path) -> None:
    place = version(directory, "1.0")
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "setup.json").touch()
    with pytest.raises(server_program.Refused, match="its program is not in"):
        server_program.remove({"directory": str(directory)})
    assert place.is_dir()


@pytest.mark.usefixtures("as_root")
def test_two_requests_do_not_change_a_server_at_the_same_time(directory: Path) -> None:
    with server_program.locked(directory), pytest.raises(server_program.Refused, match="another `gpukeeper fleet`"):
        server_program.remove({"directory": str(directory)})


@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_directory_that_other_users_could_exchange_is_refused(directory: Path, mode: int) -> None:
    directory.parent.mkdir()
    directory.parent.chmod(mode)
    with pytest.raises(server_program.Refused, match="can be changed by other users"):
        server_program.remove({"directory": str(directory)})
    assert list(directory.parent.iterdir()) == []


@pytest.mark.usefixtures("as_root")
def test_a_link_in_the_place_of_the_lock_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.parent.mkdir()
    (tmp_path / "precious").write_text("kept")
    directory.with_name("gpukeeper.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        server_program.remove({"directory": str(directory)})
    assert (tmp_path / "precious").read_text() == "kept"


def test_without_root_nothing_is_changed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(server_program.Refused, match="needs root"):
        server_program.remove({"directory": str(directory)})
    assert not directory.parent.exists()


@pytest.mark.parametrize("sent", [b"", b"[]", b'{"do": "reboot"}', b'{"do": "one_pass"}'])
def test_a_request_that_makes_no_sense_gets_an_error(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(sent + b"\n")))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=written))
    server_program.main()
    reply = json.loads(written.getvalue().removeprefix(server_program.MARK))
    assert reply["ok"] is False
    assert reply["error"]
