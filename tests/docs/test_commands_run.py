"""Every command of the guides runs, on a simulated server, or tests/docs/commands_not_run.txt says why not.

Each page has a directory of its own: a server of files (`GPUKEEPER_FLEET`), a state directory with a ledger of one
pass, the policy that the page shows, and the examples. Its commands run in their order, as the reader would run them.
"""

from __future__ import annotations

import os
import pty
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.model.errors import KeeperError
from tests import forked
from tests.cli.terminal import read_all
from tests.docs import shell
from tests.docs.markdown import ROOT
from tests.docs.shell import Command
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

REASONS = Path(__file__).with_name("commands_not_run.txt")
ME = pwd.getpwuid(os.getuid()).pw_name
SEED = f"preset: shared-host\nmode: enforce\nscope: {{docker: {{}}}}\nadmins: [root, {ME}]\n"
POLICY = SEED.replace("enforce", "plan")
RULES = ROOT / "examples/policies/imports/kube-janitor-rules.yaml"
OURS = ("gpukeeper",)
ASKS = ("gpukeeper apply", "gpukeeper ledger restore", "gpukeeper stop-all")
# Paths of the reader's machine, which here are in the directory of the page.
ELSEWHERE = re.compile(r"(?<![\w./])/(?=(backup|etc/gpukeeper|var/lib/gpukeeper)/)")


@dataclass(frozen=True)
class Reason:
    page: str
    command: str
    why: str

    def fits(self, command: Command) -> bool:
        return _fits(command.page, self.page) and _fits(command.line, self.command)

    @property
    def exit_code(self) -> int | None:
        """Of a command that runs and ends with another code than 0."""
        found = re.match(r"exits (\d+): \S", self.why)
        return int(found[1]) if found else None


def _fits(text: str, pattern: str) -> bool:
    return fnmatchcase(text, pattern.replace("[", "[[]"))


@cache
def reasons() -> list[Reason]:
    found = []
    for line in REASONS.read_text().splitlines():
        if line and not line.startswith("#"):
            page, _, rest = line.partition(" | ")
            command, _, why = rest.rpartition(" | ")  # a command may have a pipe
            assert all((page, command, why)), f"not PAGE | COMMAND | REASON: {line}"
            found.append(Reason(page, command, why))
    return found


def reason(command: Command) -> Reason | None:
    return next((one for one in reasons() if one.fits(command)), None)


def all_commands() -> list[Command]:
    return [command for page in shell.pages() for block in shell.commands(page) for command in block]


def is_run(command: Command) -> bool:
    why = reason(command)
    return why is None or why.exit_code is not None


def runnable_pages() -> list[str]:
    return sorted({command.page for command in all_commands() if is_run(command)})


@pytest.mark.parametrize("page", runnable_pages())
def test_its_commands_run(page: str, tmp_path: Path) -> None:
    server, missing = Server(tmp_path, ROOT / page), set()
    for block in shell.commands(ROOT / page):
        printed = ""
        for command in block:
            if not is_run(command):
                continue
            if (program := _program(command.line)) not in OURS and shutil.which(program) is None:
                missing.add(program)
                continue
            code, output = server.run(command.line)
            why = reason(command)
            expected = why.exit_code if why else 0
            assert code == expected, f"{command.line} exits with {code} instead of {expected}:\n{output}"
            printed += output
            if command.shown:
                assert _plain(command.shown) in _plain(printed), f"{command}: {command.shown} is not in:\n{printed}"
    if missing:
        pytest.skip(f"all but the commands of {', '.join(sorted(missing))}, which this machine does not have")


def test_every_reason_fits_a_command_and_names_a_test_that_exists() -> None:
    used = {reason(command) for command in all_commands()}
    assert [one for one in reasons() if one not in used] == [], "stale: remove them"
    for one in reasons():
        for file, name in re.findall(r"(tests/\S+\.py)::(\w+)", one.why):
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), one
        if "ested by" in one.why:
            assert re.search(r"ested by tests/\S+\.py::test_\w+$", one.why), one
        for place in re.findall(r"ested in (tests/\S+)", one.why):
            assert (ROOT / place).exists(), one


def test_most_commands_of_gpukeeper_that_need_no_engine_run() -> None:
    """A pattern that is too wide would end them unnoticed."""
    assert len([command for command in all_commands() if is_run(command)]) >= 60


def test_targets_and_paths_of_the_repository_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in all_commands():
        words = command.line.removeprefix("sudo ").split()
        if words[0] == "make":
            assert [word for word in words[1:2] if word not in targets] == [], command
        for path in re.findall(r"(?<![\w./])(?:examples|deploy|tests)/(?!gpukeeper\b)[\w./-]+", command.line):
            assert (ROOT / path).exists(), command


def _program(line: str) -> str:
    return line.removeprefix("sudo ").split()[0].rpartition("/")[2]


class Server:
    """Of files: workloads that the pages name, and a ledger of one pass over them."""

    def __init__(self, folder: Path, page: Path) -> None:
        self.folder = folder
        folder.chmod(0o700)
        for name in ("examples", "deploy"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("backup", "etc/gpukeeper", "var/lib"):
            (folder / name).mkdir(parents=True)
        (folder / "rules.yaml").write_bytes(RULES.read_bytes())
        self._workloads(folder / "node-3")
        installed = folder / "etc/gpukeeper/policy.yaml"
        installed.write_text(SEED)
        code, output = self.run("gpukeeper apply --yes")
        assert code == 0, output
        self._workloads(folder / "node-3")
        installed.write_text(page_policy(page))
        if "--output policy.yaml" not in page.read_text():
            (folder / "policy.yaml").write_text(page_policy(page))
        for text in shell.blocks(page, "yaml"):
            if named := re.match(r"# (\S+\.yaml)\n", text):
                (folder / named[1]).write_text(text)

    def _workloads(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        for number, name in enumerate(("train", "train-7b", "test-7")):
            times = _times(created=3, started=3)
            (place / f"{name}.json").write_text(
                f'{{"owner": "ann", "state": "running", "devices": ["GPU-{number}"], {times}}}'
            )
        times = _times(created=99, started=99, ended=90)
        (place / "eval.json").write_text(
            f'{{"owner": "bob", "state": "ended", "outcome": "succeeded", "devices": ["GPU-3"], {times}}}'
        )

    def run(self, line: str) -> tuple[int, str]:
        line = ELSEWHERE.sub(f"{self.folder}/", line.removeprefix("sudo "))
        line = re.sub(r"^\S+/bin/gpukeeper\b", "gpukeeper", line)
        env = forked.environment() | {
            "GPUKEEPER_FLEET": f"folder:{self.folder / 'node-3'}",
            "GPUKEEPER_POLICY": str(self.folder / "etc/gpukeeper/policy.yaml"),
            "GPUKEEPER_STATE": str(self.folder / "var/lib/gpukeeper"),
            "HOME": str(self.folder),
        }
        if line.startswith("gpukeeper ") and not re.search(r"[|<>$;&*]", line):
            words = shlex.split(line)[1:]
            if line.startswith(ASKS) and "--yes" not in words:
                return self._confirmed(words, env)
            code, out, err = forked.run("gpukeeper", words, env, "", folder=self.folder)
            return code, out + err
        path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env={**env, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def _confirmed(self, words: list[str], env: dict[str, str]) -> tuple[int, str]:
        """On a terminal, where the answer is yes."""
        ours, theirs = pty.openpty()
        os.write(ours, b"y\n")
        child = forked.start("gpukeeper", words, env, (theirs, theirs, theirs), folder=self.folder)
        os.close(theirs)
        printed = read_all(ours)
        code = child.wait(timeout=PATIENCE)
        os.close(ours)
        return code, printed


def page_policy(page: Path) -> str:
    """The first one that the page shows in full, or that of a small server."""
    for text in shell.blocks(page, "yaml"):
        try:
            load_text(text)
        except KeeperError:
            continue
        return text.replace("admins: [", f"admins: [{ME}, ") if "admins:" in text else f"{text}admins: [root, {ME}]\n"
    return POLICY


def _times(**hours: int) -> str:
    now = datetime.now(UTC)
    return ", ".join(f'"{name}": "{(now - timedelta(hours=ago)).isoformat()}"' for name, ago in hours.items())


def _plain(text: str) -> str:
    """Without numbers: times, hosts and line numbers are others here."""
    return re.sub(r"\d", "0", " ".join(text.split()))
