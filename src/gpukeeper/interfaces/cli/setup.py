"""`gpukeeper setup`: put gpukeeper into service on this machine, and take it out again."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpukeeper.config.load import SITE_FILE, load_file, load_text
from gpukeeper.config.timers import HostAnswers, host_files, unit_to_enable
from gpukeeper.interfaces.cli.doctor import doctor
from gpukeeper.interfaces.terminal import completion, show
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal.session import confirmed, span
from gpukeeper.ledger.files import service_state_folder, why_untrusted
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Mode, Schedule
from gpukeeper.wiring.host_setup import Change, FileChange, HostSetup, need_systemd, runs_systemd
from gpukeeper.wiring.places import discover

app = typer.Typer(no_args_is_help=True, help="Put gpukeeper into service on this machine, and take it out again.")

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
PRESET = "shared-host"
_WRITES = (Change.CREATE, Change.UPDATE, Change.REMOVE)


@app.command()
def host(
    admins: Annotated[
        str,
        typer.Option("--admins", metavar="USER,…", help="Who may act for others. Default: root and you, with sudo."),
    ] = "",
    preset: Annotated[
        str, typer.Option("--preset", help="Preset of the first policy.", autocompletion=completion.presets)
    ] = PRESET,
    enforce: Annotated[bool, typer.Option("--enforce", help="First policy with mode enforce instead of plan.")] = False,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="DURATION", help="Single passes by a systemd timer instead of a daemon: 1h."),
    ] = None,
    cron: Annotated[
        bool, typer.Option("--cron", help="With --every: by cron instead of systemd (/etc/cron.d/gpukeeper).")
    ] = False,
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="ADDRESS", help="Serve Prometheus metrics: 127.0.0.1:9101.")
    ] = "",
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Install this policy instead of a first one.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be written, and write nothing.")] = False,
    yes: Yes = False,
    json: o.Json = False,
) -> None:
    """Write the systemd units and a first policy, start them, check.

    Shows every file first and asks. Existing files that setup did not write are kept. A policy that was named with
    --policy is replaced only by another one that is named."""
    answers = _answers(admins, preset, enforce=enforce, every=every, metrics=metrics)
    answers = msgspec.structs.replace(answers, cron=_cron(answers, cron=cron), policy=_text_of(policy))
    files, unit = host_files(answers), unit_to_enable(answers)
    setup = HostSetup(service_state_folder())
    if policy is None:
        files = setup.keeping_policy(files, asked=bool(admins) or enforce or preset != PRESET)
    planned = setup.changes(files)
    mode = _mode_in_force(files[SITE_FILE], planned, timer=answers.every is not None)
    if not json:
        _print_changes(planned)
    if plan:
        if json:
            show.as_json("setup", {"files": planned, "unit": unit, "active": setup.is_active(unit)})
        return
    setup.need_trusted(files)
    if unit:
        need_systemd()
    if _may_go_on(f"Write these files and start {unit or 'passes by cron'}?", yes=yes, json=json):
        done = setup.write(files, unit, given=policy is not None)
        active = setup.is_active(unit)
        if json:
            show.as_json("setup", {"files": done, "unit": unit, "active": active})
        else:
            _print_next(unit, mode, active=active)
            doctor()
        if not active:
            raise typer.Exit(1)


@app.command()
def remove(yes: Yes = False, json: o.Json = False) -> None:
    """Take back what setup wrote: stop the unit, remove its files.

    Files that were changed since are kept, and so are the ledger and saved evidence."""
    setup = HostSetup(_as_root())
    planned, unit = setup.removals(), setup.record().unit
    if not planned:
        raise UsageError("gpukeeper setup has written nothing on this machine, so there is nothing to take back.")
    if not json:
        _print_changes(planned)
    if _may_go_on("Stop gpukeeper and remove these files?", yes=yes, json=json):
        done = setup.remove()
        if unit and not runs_systemd():
            typer.echo(
                f"systemd does not run on this machine, so there was no {unit} to stop and systemctl was not called. "
                "If you started gpukeeper yourself, stop it.",
                err=True,
            )
        if json:
            show.as_json("setup", {"files": done, "unit": "", "active": False})
        else:
            show.text(
                f"Done. The ledger and saved evidence are still there; to delete them: rm -r {service_state_folder()}\n"
                f"The program is still installed: {_program()}"
            )
        if any(one.change is Change.KEEP for one in done):
            raise typer.Exit(3)


def _cron(answers: HostAnswers, *, cron: bool) -> bool:
    if cron and answers.every is None:
        raise UsageError("--cron starts single passes, so it needs --every. Nothing was written. Add: --every 1h")
    if cron and answers.metrics:
        raise UsageError("--cron starts no server, so it has no --metrics. Nothing was written. Remove one of them.")
    return cron


def _text_of(policy: Path | None) -> str | None:
    """Checked before: a service with a policy that cannot be read does not start."""
    if policy is None:
        return None
    loaded = load_file(policy)
    if loaded.file.exemptions_from is not None and policy.parent != SITE_FILE.parent:
        raise UsageError(
            f"{policy} takes exemptions from {loaded.file.exemptions_from}, which would not be copied. Nothing was "
            f"written. Write them in the policy itself, or name a policy in {SITE_FILE.parent}."
        )
    return policy.read_text(encoding="utf-8")


def _mode_in_force(wanted: str, planned: Sequence[FileChange], *, timer: bool) -> Mode:
    """Of the policy that will be in force: one that a person wrote or changed is kept."""
    kept = any(one.path == str(SITE_FILE) and one.change is Change.KEEP for one in planned)
    loaded = load_file(SITE_FILE) if kept else load_text(wanted, "the policy to install", SITE_FILE.parent)
    if timer and loaded.policy.mode is Mode.PLAN:
        raise UsageError(
            f"--every starts `apply --yes`, which acts only in mode enforce, and the mode of {loaded.source} is plan. "
            "Nothing was written. See what it would do: gpukeeper plan. Then add --enforce, or set mode: enforce."
        )
    return loaded.policy.mode


def _answers(admins: str, preset: str, *, enforce: bool, every: str | None, metrics: str) -> HostAnswers:
    _as_root()
    names = tuple(one.strip() for one in admins.split(",") if one.strip()) or _default_admins()
    for name in names:
        try:
            pwd.getpwnam(name)
        except KeyError:
            raise UsageError(
                f"{name} is not a user of this machine. Nothing was written. Name users of this machine: --admins "
                "NAME,NAME. Without --admins: root and you, with sudo."
            ) from None
    program, interval = _program(), span(every, "--every")
    if (why := why_untrusted(Path(program))) is not None:
        raise UsageError(
            f"root's service would run {program}, and others could change it: {why} Nothing was written. "
            "Install gpukeeper where only root writes, such as /opt/gpukeeper."
        )
    return HostAnswers(
        program=program,
        preset=preset,
        mode="enforce" if enforce else "plan",
        platforms=tuple(one.platform for one in discover() if one.reachable and one.platform != "kubernetes"),
        admins=names,
        metrics=metrics,
        every=Schedule(every=interval) if interval is not None else None,
    )


def _as_root() -> Path:
    if os.geteuid() != 0:
        raise UsageError(
            "gpukeeper setup writes to /etc and starts a service, so it needs root: sudo gpukeeper setup …"
        )
    return service_state_folder()


def _default_admins() -> tuple[str, ...]:
    caller = os.environ.get("SUDO_USER", "")
    return ("root", caller) if caller not in ("", "root") else ("root",)


def _program() -> str:
    """The program that runs now, by the path that stays the same over upgrades."""
    called = Path(os.path.abspath(sys.argv[0]))  # noqa: PTH100 - a link such as /opt/gpukeeper is kept
    return str(called if called.name == "gpukeeper" else Path(sys.executable).with_name("gpukeeper"))


def _may_go_on(question: str, *, yes: bool, json: bool) -> bool:
    if yes:
        return True
    if json or not sys.stdin.isatty():
        raise UsageError(
            "Setup needs a confirmation, and stdin is not a terminal. Nothing was changed. For scripts: --yes"
        )
    if not confirmed(question):
        raise typer.Exit(1)
    return True


def _print_changes(changes: Sequence[FileChange]) -> None:
    for one in changes:
        if one.change in _WRITES and one.diff:
            show.text(one.diff + "\n")
    show.table([(one.change.value, one.path, one.why) for one in changes])


def _print_next(unit: str, mode: Mode, *, active: bool) -> None:
    if not unit:
        show.text(f"cron starts single passes in mode {mode}. What the next one will do: gpukeeper plan\n")
    elif not active:
        show.text(f"{unit} is not running. The reason: journalctl -u {unit} -n 30\n")
    elif mode is Mode.PLAN:
        show.text(
            f"{unit} is running. In mode plan it stops and removes nothing.\n"
            f"Next: see what it would do with `gpukeeper plan`. When you agree, write mode: enforce in {SITE_FILE}\n"
        )
    else:
        show.text(f"{unit} is running in mode enforce. What it will do next: gpukeeper plan\n")
