"""What a server said about itself: the reply of programs/server.py. Values only."""

from __future__ import annotations

import msgspec

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
