"""Runs on a server, sent over ssh: says what is installed there, installs a bundle, calls `gpukeeper setup`.

Python 3.8, standard library, Linux; imports nothing of gpukeeper. One line of JSON on stdin, then the bytes of a file
where the request has a `size`; one reply: a line with a mark, a line of JSON.

Everything that gpukeeper itself knows is asked from the gpukeeper that is installed there; files in /etc are written by
its `setup host` and `setup remove` only. One request at a time changes a server: it holds DIRECTORY.lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MARK = b"gpukeeper-server-reply 1\n"
POLICY = Path("/etc/gpukeeper/policy.yaml")
CRON = Path("/etc/cron.d/gpukeeper")
UNITS = ("gpukeeper.service", "gpukeeper-pass.timer")
BY_TIMER = "gpukeeper-pass.service"
BEGUN, COMPLETE = "gpukeeper-installing", "gpukeeper-installed"  # of the bundle's installer
ASK_S, CHANGE_S = 60, 540
WORDS_MAX = 600
LINE_MAX = 1000  # characters of a line of a log
TOO_LATE, NOT_FOUND = 124, 127  # exit codes, as of a shell
POLICY_MAX = 1024 * 1024
CHUNK = 1024 * 1024


class Refused(Exception):
    """The request cannot be carried out; a sentence."""


def main() -> None:
    try:
        request = json.loads(sys.stdin.buffer.readline())
        reply = {"ok": True, "size": 0, **COMMANDS[request["do"]](request)}
    except Refused as refused:
        reply = {"ok": False, "error": str(refused), "size": 0}
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        reply = {"ok": False, "error": f"{what}{error.strerror or error}", "size": 0}
    except Exception:  # of this program: reported with the name of the server
        reply = {"ok": False, "error": traceback.format_exc(limit=-3), "size": 0}
    sys.stdout.buffer.write(MARK + json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


# Requests.


def look(request: dict[str, Any]) -> dict[str, Any]:
    """Changes nothing but a directory of its own, which is gone afterwards."""
    directory = Path(request["directory"])
    root = os.geteuid() == 0
    kind, version = installation(directory)
    found = {
        "root": root,
        "sudo": "" if root else why_no_sudo(),
        "python": platform.python_version(),
        "machine": os.uname().machine,
        "directory": kind,
        "version": version,
        "previous": installation(beside(directory, ".previous"))[1],
        "free": free(directory),
        "units": units(),
        "cron": CRON.exists(),
        "policy": policy(),
    }
    if kind in ("link", "environment") and not request.get("brief"):
        code, _, words = run([program(directory), "--version"], ASK_S)
        found["program"] = words
        if root and not code:
            found.update(asked(directory, request))
    return found


def deploy(request: dict[str, Any]) -> dict[str, Any]:
    """Install, if the request has a bundle; then set up."""
    directory = Path(request["directory"])
    with locked(directory):
        installed = install(directory, request) if request["size"] else False
        return {"installed": installed, "problem": set_up(directory, request)}


def roll_back(request: dict[str, Any]) -> dict[str, Any]:
    """By the installer of the bundle, which the request contains; then set up by the version before."""
    directory = Path(request["directory"])
    with locked(directory):
        _, _, words = run([sys.executable, "-I", "-c", request["installer"], "--rollback", str(directory)], CHANGE_S)
        return {"problem": words or set_up(directory, request)}


def remove(request: dict[str, Any]) -> dict[str, Any]:
    """By `setup remove`, then the environments that the installer made. `left`: what is still there."""
    directory = Path(request["directory"])
    left = []
    with locked(directory):
        if recorded():
            if not Path(program(directory)).exists():
                raise Refused(f"gpukeeper is set up here, and its program is not in {directory}; deploy it again first")
            code, out, words = run([program(directory), "setup", "remove", "--yes", "--json"], CHANGE_S)
            if code not in (0, 3):  # 3: files that a person changed are kept
                return {"problem": words}
            left = [one["path"] for one in document(out)["files"] if one["change"] == "keep"]
        for one in (directory, beside(directory, ".previous")):
            if one.is_symlink():
                one.unlink()
        for one in sorted(directory.parent.glob(f"{directory.name}-*")):
            if (one / COMPLETE).is_file() or (one / BEGUN).is_file():
                shutil.rmtree(one)
        beside(directory, ".lock").unlink()
    names = (directory, beside(directory, ".previous"), beside(directory, ".by-pip"))
    left += [str(one) for one in names if os.path.lexists(one)]
    return {"left": left}


def one_pass(request: dict[str, Any]) -> dict[str, Any]:
    """By the policy that is in force here. Without `act`: what it would do."""
    directory = Path(request["directory"])
    command = ["apply", "--yes", "--json"] if request["act"] else ["plan", "--json"]
    before = gpus(directory) if request["act"] else None
    began = time.monotonic()
    code, out, words = run([program(directory), *command], CHANGE_S)
    took = {"seconds": time.monotonic() - began}
    try:
        found = document(out)
        reply = {"code": code, "mode": found["policy"]["mode"], "places": found["places"], "said": words, **took}
    except (ValueError, KeyError):
        return {"code": code, "problem": words or "its output cannot be read", **took}
    if before is not None and before["number"]:
        reply.update(gpus_before=before, gpus_after=gpus(directory))
    return reply


def logs(request: dict[str, Any]) -> dict[str, Any]:
    """The newest lines of the ledger that are errors, and the newest of all; with systemd those of its journal."""
    last = str(request["last"])
    ledger = [program(Path(request["directory"])), "ledger", "list", "--last", last]
    commands = {"errors": [*ledger, "--errors"], "ledger": ledger, "journal": journal(last)}
    found: dict[str, Any] = {"problems": []}
    for name, command in commands.items():
        code, out, words = run(command, ASK_S) if command else (0, "", "")
        found[name] = [] if code else [line[:LINE_MAX] for line in out.splitlines()]
        found["problems"] += [f"the {name} could not be read: {words}"] if code else []
    return found


COMMANDS = {one.__name__: one for one in (look, deploy, roll_back, remove, one_pass, logs)}


# What is there.


def program(directory: Path) -> str:
    return str(directory / "bin" / "gpukeeper")


def beside(directory: Path, ending: str) -> Path:
    return directory.with_name(directory.name + ending)


def installation(directory: Path) -> tuple[str, str]:
    """absent, link, environment, foreign; and its version, as the installer names the directory."""
    if not os.path.lexists(directory):
        return "absent", ""
    if not (directory / "pyvenv.cfg").is_file():
        return "foreign", ""
    if not directory.is_symlink():
        return "environment", ""
    base = directory.name[: -len(".previous")] if directory.name.endswith(".previous") else directory.name
    name = directory.resolve().name
    return "link", name[len(base) + 1 :] if name.startswith(f"{base}-") else ""


def why_no_sudo() -> str:
    code, _, words = run(["sudo", "-n", "true"], ASK_S)
    return "there is no sudo" if code == NOT_FOUND else words


def free(directory: Path) -> int:
    there = next(one for one in directory.parents if one.exists())
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def units() -> dict[str, str] | None:
    """None: systemd does not run here."""
    if not Path("/run/systemd/system").is_dir() or not shutil.which("systemctl"):
        return None
    _, out, _ = run(["systemctl", "is-active", *UNITS], ASK_S)
    return dict(zip(UNITS, out.split()))  # noqa: B905 - Python 3.8


def gpus(directory: Path) -> dict[str, int] | None:
    """How many there are, and how many are free. None: they could not be read."""
    code, out, _ = run([program(directory), "observe", "--gpus", "--json"], ASK_S)
    try:
        found = document(out)
        held = [(one["place"], one["device"], one["how"]) for one in found["gpus"] if one["device"]]
    except (ValueError, KeyError):
        return None
    if code or found["unseen"]:
        return None
    number, free_ones = ({one[:2] for one in some} for some in (held, [one for one in held if one[2] == "free"]))
    return {"number": len(number), "free": len(free_ones)}


def journal(last: str) -> list[str]:
    """Empty: systemd does not run here, so what cron starts has its lines in the ledger only."""
    if units() is None:
        return []
    names = [word for unit in (*UNITS, BY_TIMER) for word in ("-u", unit)]
    return ["journalctl", "--no-pager", "--quiet", "--output=short-iso", "-n", last, *names]


def policy() -> str | None:
    try:
        return POLICY.read_text(encoding="utf-8")[:POLICY_MAX]
    except (OSError, UnicodeDecodeError):
        return None


def recorded() -> bool:
    """Setup has written something here."""
    return (Path(os.environ.get("GPUKEEPER_STATE") or "/var/lib/gpukeeper") / "setup.json").exists()


def asked(directory: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What the gpukeeper there says: what setup would change, the mode, its own checks."""
    found: dict[str, Any] = {}
    with policy_file(request) as given:
        command = [program(directory), "setup", "host", "--plan", "--json", *request["answers"], *given]
        code, out, words = run(command, ASK_S)
    found["setup"], found["setup_problem"] = (None, words) if code else (document(out), "")
    code, out, _ = run(
        [program(directory), "policy", "show", "--json", *(["--policy", str(POLICY)] * POLICY.exists())], ASK_S
    )
    settings = {} if code else {one["setting"]: one["value"] for one in document(out)["settings"]}
    found["mode"] = str(settings.get("mode", ""))
    _, out, words = run([program(directory), "doctor", "--json"], ASK_S)
    try:
        found["findings"] = document(out)["findings"]
    except (ValueError, KeyError):
        found["findings"] = [{"verdict": "problem", "about": "doctor", "words": words}]
    return found


def document(out: str) -> Any:
    return json.loads(out)


@contextlib.contextmanager
def policy_file(request: dict[str, Any]) -> Iterator[list[str]]:
    """The wanted policy; without one, the one that is there stays."""
    if request["policy"] is None:
        yield ["--policy", str(POLICY)] if POLICY.exists() else []
        return
    with tempfile.TemporaryDirectory(prefix="gpukeeper-") as folder:
        path = Path(folder) / "policy.yaml"
        path.write_text(request["policy"], encoding="utf-8")
        yield ["--policy", str(path)]


# Changes.


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """The kernel releases the lock of a process that ends."""
    if os.geteuid() != 0:
        raise Refused("this needs root")
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    check_parents(directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(beside(directory, ".lock"), flags, 0o600), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused("another `gpukeeper fleet` changes this server now; try again when it has ended") from None
        yield


def check_parents(directory: Path) -> None:
    """Root runs what is installed here: no other user may be able to exchange it, or to put a link in its place."""
    for number, above in enumerate(directory.parents):
        about = above.stat()
        others = about.st_mode & 0o022 and not (number and about.st_mode & stat.S_ISVTX)
        if others or about.st_uid not in (0, os.getuid()):
            raise Refused(f"{above} can be changed by other users than root; name another directory")


def install(directory: Path, request: dict[str, Any]) -> bool:
    """The copy and all temporary files are beside the directory: its free space was measured."""
    prefix = f".{directory.name}.fleet-"
    for old in directory.parent.glob(f"{prefix}*"):  # of an interrupted request: this one has the lock
        shutil.rmtree(old, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        bundle = staging / "bundle.pyz"
        receive(bundle, request["size"], request["sha256"])
        command = [sys.executable, "-I", str(bundle), str(directory)]
        code, _, words = run(command, CHANGE_S, {**os.environ, "TMPDIR": str(staging)})
        if code:
            raise Refused(words)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def receive(path: Path, size: int, sha256: str) -> None:
    digest, left = hashlib.sha256(), size
    with path.open("wb") as file:
        while left and (part := sys.stdin.buffer.read(min(CHUNK, left))):
            file.write(part)
            digest.update(part)
            left -= len(part)
    if left or digest.hexdigest() != sha256:
        raise Refused(f"the bundle did not arrive complete: {left} of {size} bytes are missing. Nothing was installed")


def set_up(directory: Path, request: dict[str, Any]) -> str:
    """Empty, or the words of `setup host`."""
    with policy_file(request) as given:
        command = [program(directory), "setup", "host", "--yes", "--json", *request["answers"], *given]
        return run(command, CHANGE_S)[2]


def run(command: list[str], within: int, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, output, and why it failed: the last words of its error output. Empty: it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return TOO_LATE, "", f"{' '.join(command[:3])} did not end within {within} s"
    except OSError as error:
        return NOT_FOUND, "", f"{command[0]}: {error.strerror}"
    words = " ".join(done.stderr.decode("utf-8", "replace").split())[-WORDS_MAX:]
    why = (words or f"exit code {done.returncode}") if done.returncode else ""
    return done.returncode, done.stdout.decode("utf-8", "replace"), why


if __name__ == "__main__":
    main()
