"""`gpukeeper tidy`: a private temporary folder for a command, and what becomes of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import require
from tests.patience import PATIENCE

NOBODY = 65534
WAITS = "import sys, signal; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5)); print('up', flush=True); "


@pytest.fixture
def sees_all() -> None:
    """The directory stays if another user's process, which may use it, began meanwhile: only root can look into it."""
    require("root", os.geteuid() == 0)


def start(root: Path, *command: str, options: tuple[str, ...] = (), **given: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "gpukeeper", "tidy", "--root", str(root), *options, "--", *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, **(pipes | given))  # type: ignore[call-overload, no-any-return]


def tidied(root: Path, *command: str, options: tuple[str, ...] = (), **given: object) -> tuple[int, str, str]:
    with start(root, *command, options=options, **given) as child:
        out, err = child.communicate(timeout=PATIENCE)
    return child.returncode, out, err


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


@pytest.mark.usefixtures("sees_all")
def test_the_command_has_a_private_directory_that_goes_with_it(tmp_path: Path) -> None:
    script = "echo x > $TMPDIR/a; mkdir $TMP/b; stat -c %a $TMPDIR; echo $TMPDIR $TMP $TEMP $GPUKEEPER_TIDY"
    code, out, err = tidied(tmp_path, *sh(script))
    mode, folders = out.splitlines()
    assert (code, err, mode) == (0, "", "700")
    (folder,) = set(folders.split())
    assert Path(folder).parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_its_name_is_one_that_a_usual_policy_finds_when_tidy_itself_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, *sh("echo $TMPDIR; exec sleep 600")) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        (survivor,) = (int(pid) for pid in _children(child.pid))
        child.kill()
    os.kill(survivor, signal.SIGKILL)
    assert folder.is_dir()
    assert folder.parent.name.startswith("tmp")


@pytest.mark.usefixtures("sees_all")
def test_without_a_root_it_is_where_temporary_files_belong(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gpukeeper", "tidy", "sh", "-c", "echo $TMPDIR"]
    done = subprocess.run(words, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("sees_all")
@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)])
def test_it_ends_as_the_command_ended(tmp_path: Path, script: str, code: int) -> None:
    assert tidied(tmp_path, *sh(f"echo x > $TMPDIR/x; {script}")) == (code, "", "")
    assert list(tmp_path.iterdir()) == []


def test_flags_of_the_command_are_the_commands(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gpukeeper", "tidy", "--root", str(tmp_path), "echo", "--root", "-x", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "--root -x --help\n"


@pytest.mark.usefixtures("sees_all")
def test_a_command_that_is_not_there_or_no_directory_for_it_is_reported(tmp_path: Path) -> None:
    code, _, err = tidied(tmp_path, "no-such-command-anywhere")
    assert (code, "could not be started: it was not found" in err) == (127, True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plain").write_text("no program")
    assert tidied(tmp_path, str(tmp_path / "plain"))[0] == 126
    code, out, err = tidied(tmp_path / "nothing", "echo", "ran")
    assert (code, out, "nothing was run" in err) == (2, "", True)


@pytest.mark.usefixtures("sees_all")
def test_a_failed_command_may_keep_its_files(tmp_path: Path) -> None:
    code, _, err = tidied(tmp_path, *sh("echo x > $TMPDIR/core; exit 3"), options=("--keep-on-failure",))
    (kept,) = tmp_path.glob("*/tmp/core")
    assert (code, str(kept.parent) in err) == (3, True)
    assert tidied(tmp_path, "true", options=("--keep-on-failure",))[0] == 0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.usefixtures("sees_all")
def test_signals_reach_the_command(tmp_path: Path) -> None:
    with start(tmp_path, sys.executable, "-c", WAITS + "sys.stdin.read()") as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGUSR1)
        assert child.wait(timeout=PATIENCE) == 5
    assert list(tmp_path.iterdir()) == []


def test_what_a_survivor_still_uses_is_kept_and_reported(tmp_path: Path) -> None:
    script = "sleep 600 > $TMPDIR/log 2>&1 < /dev/null & echo $!; until [ -e $TMPDIR/log ]; do :; done"
    code, out, err = tidied(tmp_path, *sh(script))
    survivor = int(out)
    os.kill(survivor, signal.SIGKILL)
    assert code == 0
    assert f"was kept: it is in use by pid {survivor}" in err
    assert len(list(tmp_path.glob("*/tmp/log"))) == 1


@pytest.mark.usefixtures("sees_all")
def test_a_survivor_that_uses_nothing_of_it_keeps_nothing(tmp_path: Path) -> None:
    code, out, err = tidied(tmp_path, *sh("echo x > $TMPDIR/x; sleep 600 > /dev/null 2>&1 < /dev/null & echo $!"))
    os.kill(int(out), signal.SIGKILL)
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def anybodys() -> Iterator[Path]:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become somebody else")
    folder = Path("/tmp") / f"tidy-{os.getpid()}"
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


BECOME_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


def as_nobody(root: Path, *command: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    words = [*before, *BECOME_NOBODY, sys.executable, "-m", "gpukeeper", "tidy", "--root", str(root), "--", *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)


@pytest.fixture
def alone() -> tuple[str, ...]:
    """Where nobody else starts anything meanwhile."""
    words = ("unshare", "--pid", "--fork", "--mount-proc")
    if shutil.which("unshare") is None or subprocess.run([*words, "true"], check=False).returncode != 0:
        pytest.skip("needs a pid namespace of its own")
    return words


def test_an_ordinary_user_gets_a_clean_directory_too(anybodys: Path, alone: tuple[str, ...]) -> None:
    """What others had running before cannot be looked into, and need not be: nobody else may enter the folder."""
    runs = ("sh", "-c", 'sleep 600 & "$@"; exit $?', "sh")
    done = as_nobody(anybodys, *sh("id -u; echo x > $TMPDIR/x"), before=(*alone, *runs))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{NOBODY}\n", "")
    assert list(anybodys.iterdir()) == []


def test_what_a_service_of_root_started_meanwhile_keeps_the_directory(anybodys: Path, alone: tuple[str, ...]) -> None:
    """As docker or sudo do for a command: it is no child of the command, and may work in its folder unseen."""
    os.mkfifo(anybodys / "go")
    (anybodys / "go").chmod(0o666)
    service = f"(read folder < {anybodys}/go; (cd $folder; echo > {anybodys}/up; exec sleep 600) & wait) &"
    command = sh(f"echo x > $TMPDIR/x; echo $TMPDIR > {anybodys}/go; until [ -e {anybodys}/up ]; do :; done")
    done = as_nobody(anybodys, *command, before=(*alone, "sh", "-c", f'{service} "$@"; exit $?', "sh"))
    assert done.returncode == 0
    assert "started after the command, perhaps for it, and its open files could not be read" in done.stderr
    assert len(list(anybodys.glob("*/tmp/x"))) == 1


def test_a_survivor_that_may_not_be_searched_keeps_the_directory(anybodys: Path) -> None:
    """Whoever may run a program and not read it may not look into its process either."""
    hidden = Path(shutil.copy(str(shutil.which("sleep")), anybodys / "hidden"))
    hidden.chmod(0o111)
    script = f"{hidden} 600 > $TMPDIR/log 2>&1 < /dev/null & echo $!; until grep -q hidden /proc/$!/comm; do :; done"
    done = as_nobody(anybodys, *sh(script))
    survivor = int(done.stdout)
    os.kill(survivor, signal.SIGKILL)
    assert f"the open files of pid {survivor}, which the command left running, could not be read" in done.stderr
    assert len(list(anybodys.glob("*/tmp/log"))) == 1


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
