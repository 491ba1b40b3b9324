"""Trees that somebody names, and has nothing of open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpukeeper.model.decision import Accepted, Changed
from gpukeeper.platforms.host.trees import mentioned_below, names_after
from tests.unit.platforms.host.machine import Machine

WAITS = "import sys; print(flush=True); sys.stdin.read()"
COMM = Path(sys.executable).name[:15]


@contextmanager
def running(*words: str, **environ: str) -> Iterator[int]:
    """A process with such words and settings; its pid."""
    command = [sys.executable, "-c", WAITS, *words]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | environ, **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        yield child.pid
        child.stdin.close()


@pytest.mark.parametrize(
    "words", ["{}/tmp-a", "--dir={}/tmp-a/below", "cd {}/tmp-a; ls", "/x:{}/tmp-a:/y", "{}//tmp-a"]
)
def test_what_a_command_line_names_is_in_use(tmp_path: Path, words: str) -> None:
    on = Machine(tmp_path)
    on.tree("tmp-a"), on.tree("tmp-ab")
    before = on.observe()["tmp-a"]
    assert before.in_use is False
    with running(words.format(tmp_path)) as pid:
        seen = on.observe()
        who = f"pid {pid} ({COMM}) names it in its command line"
        assert (seen["tmp-a"].in_use, seen["tmp-a"].kept) == (True, who)
        assert (seen["tmp-ab"].in_use, seen["tmp-ab"].kept) == (False, None)
        assert on.read(before).in_use is True
        assert on.remove(before) == Changed(f"it is in use: {who}"), "it was named after the look"
    assert isinstance(on.remove(on.observe()["tmp-a"]), Accepted)


@pytest.mark.parametrize("variable", ["TMPDIR", "TMP", "TEMP", "RAY_TMPDIR"])
def test_the_directory_for_a_users_temporary_files_is_in_use(tmp_path: Path, variable: str) -> None:
    on = Machine(tmp_path)
    on.tree("tmp-a"), on.tree("tmp-b")
    with running(**{variable: f"{tmp_path}/tmp-a/below", "OTHER": f"{tmp_path}/tmp-b"}) as pid:
        seen = on.observe()
    assert seen["tmp-a"].kept == f"pid {pid} ({COMM}) names it as its {variable}"
    assert seen["tmp-b"].in_use is False


def test_a_root_may_be_written_in_two_ways(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "short").symlink_to("big")
    on = Machine(tmp_path / "short")
    on.tree("tmp-a"), on.tree("tmp-b")
    with running(f"{tmp_path}/short/tmp-a", f"{tmp_path}/big/tmp-b"):
        assert [one.in_use for one in on.observe().values()] == [True, True]


def test_an_odd_name_is_found_in_whatever_is_around_it() -> None:
    found = set(names_after(b"/tmp/", b"cp /tmp/my run=1;/tmp/tmpx /tmp/a/b:/tmp/"))
    assert {b"my run=1", b"my", b"tmpx", b"a"} <= found
    assert b"" not in found


def test_a_text_full_of_paths_costs_no_more_than_its_length() -> None:
    assert set(names_after(b"/tmp/", b"/tmp/" * 200_000)) == {b"tmp"}


def test_our_own_command_line_keeps_nothing(tmp_path: Path) -> None:
    """Whoever asks about a tree names it, too."""
    home = tmp_path / str(os.getpid())
    home.mkdir()
    (home / "cmdline").write_bytes(b"gpukeeper\0/scratch/tmp-a\0")
    (home / "environ").write_bytes(b"TMPDIR=/scratch/tmp-b\0")
    assert list(mentioned_below(["/scratch"], str(tmp_path))) == ["tmp-b"]
