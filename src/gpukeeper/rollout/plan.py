"""From what is wanted and what was seen on a server to the steps, what prevents them, and drift. Pure.

The same twice: after a deployment that was verified the plan has no steps.
"""

from __future__ import annotations

import difflib
from datetime import timedelta
from enum import StrEnum
from typing import Final

import msgspec

from gpukeeper.clients.ssh import Host
from gpukeeper.model.unknown import direct
from gpukeeper.model.words import size_in_words

DIRECTORY: Final = "/opt/gpukeeper"
PYTHON: Final = "python3"
EVERY: Final = "1h"
TIMEOUT: Final = timedelta(minutes=10)
COPIES: Final = 6  # of the bundle: the file, its wheels, the environment; wheels are compressed


@direct
class Unit(StrEnum):
    SYSTEMD = "systemd"
    TIMER = "timer"
    CRON = "cron"


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `make bundle`. `pythons`: versions that it has wheels for."""

    path: str
    version: str
    sha256: str
    size: int
    pythons: tuple[str, ...]
    machine: str

    @property
    def space(self) -> int:
        """Bytes that an installation needs at most, as far as is known before."""
        return COPIES * self.size


class PolicyText(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    text: str
    mode: str


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """`policy` None: the one that is there stays; without one, the first policy of `setup host`. `bundle` None: nothing
    is installed."""

    host: Host
    unit: Unit = Unit.SYSTEMD
    every: str = EVERY
    directory: str = DIRECTORY
    python: str = PYTHON
    timeout: timedelta = TIMEOUT
    metrics: str = ""
    policy: PolicyText | None = None
    bundle: Bundle | None = None

    @property
    def name(self) -> str:
        return self.host.node

    def answers(self) -> list[str]:
        """Arguments of `setup host` on the server."""
        words = [] if self.unit is Unit.SYSTEMD else ["--every", self.every]
        words += ["--cron"] if self.unit is Unit.CRON else []
        return words + (["--metrics", self.metrics] if self.metrics else [])


Version = tuple[int, int]


class FoundFile(msgspec.Struct, frozen=True):
    """As `setup host --plan --json` prints it."""

    path: str
    change: str
    why: str = ""
    diff: str = ""


class FoundSetup(msgspec.Struct, frozen=True):
    """What `setup host` would do there now."""

    files: tuple[FoundFile, ...]
    unit: str
    active: bool


class Finding(msgspec.Struct, frozen=True):
    """A line of `doctor --json`."""

    verdict: str
    about: str
    words: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """`root`: the reply was made as root; `by_sudo`: by a user who needs sudo for that, as for all further requests.
    `sudo`: why a user who is not root cannot become root. `directory`: absent, link, environment or foreign. `version`:
    of the installation; empty where it is unknown. `program`: why it does not run. `units`: None where systemd does not
    run. `setup` None: it could not be asked; `setup_problem` says why."""

    root: bool
    by_sudo: bool = False
    sudo: str = ""
    python: str
    machine: str
    directory: str = "absent"
    version: str = ""
    previous: str = ""
    program: str = ""
    free: int | None = None
    units: dict[str, str] | None = None
    cron: bool = False
    policy: str | None = None
    mode: str = ""
    setup: FoundSetup | None = None
    setup_problem: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def python_version(self) -> Version:
        major, minor = [*self.python.split("."), "0", "0"][:2]
        return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)

    @property
    def can_become_root(self) -> bool:
        return self.root or not self.sudo

    @property
    def active(self) -> str:
        """The unit that starts passes; empty: none."""
        running = [unit for unit, state in (self.units or {}).items() if state == "active"]
        return running[0] if running else "cron" if self.cron else ""

    def about(self, subject: str) -> str:
        return next((one.words for one in self.findings if one.about == subject), "")

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(f"{one.about}: {one.words}" for one in self.findings if one.verdict == "problem")


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request that changes a server. `problem`: what did not work, in its words."""

    installed: bool = False
    problem: str = ""
    left: tuple[str, ...] = ()


OLDEST: Final = (3, 11)
NONE_YET: Final = "none is recorded yet"  # of doctor; with cron the first one comes later
_DUE: Final = ("create", "update", "remove")
POLICY: Final = "/etc/gpukeeper/policy.yaml"


@direct
class Act(StrEnum):
    INSTALL = "install"
    SETUP = "setup"


class Step(msgspec.Struct, frozen=True):
    """`diff`: of the files that change, as far as is known before."""

    act: Act
    words: str
    diff: str = ""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`blocked`: why the steps cannot be taken. `drift`: what differs from the last deployment and is kept."""

    steps: tuple[Step, ...] = ()
    blocked: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()

    @property
    def installs(self) -> bool:
        return any(step.act is Act.INSTALL for step in self.steps)


def plan(wanted: Wanted, seen: Seen) -> ServerPlan:
    steps = (*_install(wanted, seen), *_setup(wanted, seen))
    blocked = _blocked(wanted, seen, steps) if steps else _unknown(seen)
    return ServerPlan(steps=steps, blocked=blocked, drift=_drift(seen))


def upgrade(wanted: Wanted, seen: Seen) -> tuple[Wanted, ServerPlan]:
    """Only the version: the policy of the server stays. A server without gpukeeper is not touched."""
    wanted = msgspec.structs.replace(wanted, policy=None)
    if seen.directory in ("absent", "foreign"):
        return wanted, ServerPlan(blocked=("gpukeeper is not installed there. Install it: gpukeeper fleet deploy",))
    found = plan(wanted, seen)
    return wanted, found if found.installs else ServerPlan(drift=found.drift)


def unverified(wanted: Wanted, seen: Seen) -> tuple[str, ...]:
    """Why a server is not as wanted, from a look after the steps."""
    found = []
    if wanted.bundle is not None and seen.version != wanted.bundle.version:
        found.append(f"version {seen.version or 'unknown'} is installed instead of {wanted.bundle.version}")
    if seen.setup is not None:
        found += [f"{one.path} is not as wanted" for one in seen.setup.files if one.change in _DUE]
    kept = any(one.path == POLICY and one.change == "keep" for one in (seen.setup.files if seen.setup else ()))
    if wanted.policy is not None and not kept and seen.mode and seen.mode != wanted.policy.mode:
        found.append(f"the mode is {seen.mode} instead of {wanted.policy.mode}")
    return (*found, *not_working(seen))


def not_working(seen: Seen) -> tuple[str, ...]:
    """Whatever version and policy are wanted. A version before may not read the ledger that a newer one has written."""
    found = []
    if seen.program:
        found.append(f"gpukeeper does not run: {seen.program}")
    elif seen.setup is None:
        found.append(f"setup cannot be checked: {seen.setup_problem or 'it needs root'}")
    elif not seen.setup.active:
        found.append(f"{seen.setup.unit} is not active")
    return (*found, *(one for one in seen.problems if one.startswith(("ledger:", "policy:", "doctor:"))))


def overdue(seen: Seen) -> tuple[str, ...]:
    """By `doctor` there, which calls a late pass a note: it may be run by hand. Here something starts passes. No
    deployment is judged by it: the pass that is late may be the reason for it."""
    late = [one for one in seen.findings if one.about == "pass" and one.verdict != "ok"]
    return tuple(f"pass: {one.words}" for one in late if not one.words.startswith(NONE_YET))


def _install(wanted: Wanted, seen: Seen) -> tuple[Step, ...]:
    if wanted.bundle is None or (seen.version == wanted.bundle.version and not seen.program):
        return ()
    before = {"absent": "nothing", "link": seen.version or "another version"}.get(seen.directory, "an unknown version")
    return (Step(Act.INSTALL, f"install {wanted.bundle.version} in {wanted.directory}; now: {before}"),)


def _setup(wanted: Wanted, seen: Seen) -> tuple[Step, ...]:
    """Always after an installation: the service must be restarted. Else if it would write something."""
    if _install(wanted, seen):
        how = {Unit.SYSTEMD: "the daemon", Unit.TIMER: f"a timer, every {wanted.every}"}
        words = how.get(wanted.unit, f"cron, every {wanted.every}")
        return (Step(Act.SETUP, f"set up {words}, and start it", _policy_diff(wanted, seen)),)
    if seen.setup is None:
        return ()
    due = [one for one in seen.setup.files if one.change in _DUE]
    if due:
        names = ", ".join(f"{one.change} {one.path}" for one in due)
        return (Step(Act.SETUP, names, "\n".join(one.diff for one in due if one.diff)),)
    return () if seen.setup.active else (Step(Act.SETUP, f"start {seen.setup.unit}, which is not active"),)


def _policy_diff(wanted: Wanted, seen: Seen) -> str:
    if wanted.policy is None:
        return ""
    before, after = (seen.policy or "").splitlines(), wanted.policy.text.splitlines()
    return "\n".join(difflib.unified_diff(before, after, POLICY, wanted.policy.source, lineterm="", n=1))


def _drift(seen: Seen) -> tuple[str, ...]:
    kept = [one for one in (seen.setup.files if seen.setup else ()) if one.change == "keep"]
    return tuple(f"{one.path}: {one.why}; it is kept" for one in kept)


def _blocked(wanted: Wanted, seen: Seen, steps: tuple[Step, ...]) -> tuple[str, ...]:
    found = []
    if not seen.can_become_root:
        found.append(f"this needs root: {seen.sudo}. Log in as root, or allow sudo without a password")
    if wanted.unit is not Unit.CRON and seen.units is None:
        found.append("systemd does not run there. Write unit: cron")
    if seen.directory == "foreign":
        found.append(f"{wanted.directory} exists and is no virtual environment. Name another directory")
    if any(step.act is Act.INSTALL for step in steps):
        found += _not_installable(wanted, seen)
    return tuple(found)


def _unknown(seen: Seen) -> tuple[str, ...]:
    """Without a step: is everything as wanted, or could it not be read? The second is never the first."""
    if seen.directory == "absent":
        return ("gpukeeper is not installed there, and no bundle is named. Write bundle: FILE",)
    if not seen.can_become_root:
        return (f"whether it is as wanted can only root read: {seen.sudo}",)
    if seen.setup is None:
        return (f"whether it is as wanted is not known: {seen.program or seen.setup_problem}",)
    return ()


def _not_installable(wanted: Wanted, seen: Seen) -> list[str]:
    bundle = wanted.bundle
    assert bundle is not None, "only a bundle is installed"
    found = []
    version = ".".join(map(str, seen.python_version))
    known = ", ".join(bundle.pythons)
    if seen.python_version < OLDEST:
        found.append(f"{wanted.python} is Python {version}; gpukeeper needs 3.11. Name another one: python: PATH")
    elif version not in bundle.pythons:
        found.append(f'the bundle is for Python {known}, not {version}. Build one: make bundle PYTHONS="{version}"')
    if seen.machine != bundle.machine:
        advice = f"Build one for it: make bundle MACHINE={seen.machine}"
        found.append(f"the bundle is for {bundle.machine}, and this server is {seen.machine}. {advice}")
    if seen.free is not None and seen.free < bundle.space:
        needed, there = size_in_words(bundle.space), size_in_words(seen.free)
        found.append(f"{there} are free for {wanted.directory}, and {needed} may be needed. Free some space")
    return found
