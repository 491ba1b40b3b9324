"""`gpukeeper doctor`: can gpukeeper do its work here? Policy, platforms, GPUs, files, channels, dashboard, ledger,
daemon; clock, space, time of the last pass; and whether the machine's own cleaner (systemd-tmpfiles, tmpreaper)
would delete files of a directory in use. Changes nothing.

What is quiet is not dead: unpacked code and spilled objects of a running cluster are not touched for days.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

import typer

from gpukeeper.clients import docker
from gpukeeper.clients.kubernetes import connect as kubernetes
from gpukeeper.config.load import load_policy
from gpukeeper.config.show import sentence
from gpukeeper.devices.driver.client import gpu_note, inventory
from gpukeeper.engine.loop import TOO_SLOW
from gpukeeper.interfaces.cli.policy import not_backtested
from gpukeeper.interfaces.cli.support import write as write_support
from gpukeeper.interfaces.terminal import options as o
from gpukeeper.interfaces.terminal import show
from gpukeeper.interfaces.terminal.daemon import closed
from gpukeeper.interfaces.terminal.messages import print_message
from gpukeeper.interfaces.web_setup import CLEAR, read_setup
from gpukeeper.ledger.files import ledger_path, may_exist, socket_path, state_folder
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import KeeperError, PolicyError, UsageError
from gpukeeper.model.event import Complaint, Event, Passed
from gpukeeper.model.policy import Web
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words
from gpukeeper.notify.catalog import admin_channels, channel_problem, owner_services
from gpukeeper.platforms.kubernetes.settings import settings_of as kubernetes_settings_of
from gpukeeper.platforms.ray.nodes import raylet_of, read_processes
from gpukeeper.platforms.ray.settings import RAY, temporary_folders
from gpukeeper.platforms.ray.settings import settings_of as ray_settings_of
from gpukeeper.platforms.ray.state import Dashboard, DashboardQueries
from gpukeeper.wiring.places import discover

FOLDERS = ("etc/tmpfiles.d", "run/tmpfiles.d", "usr/local/lib/tmpfiles.d", "usr/lib/tmpfiles.d")  # the first wins
AGING = frozenset("dDevqQC")
SPECIFIERS = {"%T": "/tmp", "%V": "/var/tmp", "%t": "/run", "%S": "/var/lib", "%C": "/var/cache"}  # noqa: S108
NO_AGE = frozenset({"", "-"})


class TmpfilesLine(NamedTuple):
    file: str
    type: str
    path: str
    age: str


def aged_by(folder: str, root: Path = Path("/")) -> list[str]:
    """One sentence for each cleaner that would delete old files below this directory, and how to exclude it."""
    return [*_by_tmpfiles(folder, root), *_by_tmpreaper(folder, root)]


def _by_tmpfiles(folder: str, root: Path) -> Iterator[str]:
    lines = list(_lines(root))
    for path in (folder, *map(str, PurePosixPath(folder).parents)):
        here = [line for line in lines if fnmatchcase(path, line.path)]
        if any(line.type == "x" for line in here):
            return
        aging = [line for line in here if line.type in AGING]
        if not aging:
            continue
        first = aging[0]  # of two lines for one path the first counts
        if first.age not in NO_AGE:
            yield (
                f"systemd-tmpfiles deletes files below {path} that were unused for {first.age} ({first.file}), also "
                f"in {folder} while it is in use. To exclude it: `x {folder}*` in /etc/tmpfiles.d/gpukeeper.conf"
            )
        return


def _lines(root: Path) -> Iterator[TmpfilesLine]:
    """In the order in which they count. A file hides those of its name in later directories; a link to /dev/null,
    too."""
    files: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*.conf")):
            files.setdefault(path.name, path)
    for _, path in sorted(files.items()):
        for words in map(str.split, _text(path).splitlines()):
            if len(words) >= 2 and not words[0].startswith("#") and "!" not in words[0]:
                where = words[1].strip("\"'")
                for short, long in SPECIFIERS.items():
                    where = where.replace(short, long)
                age = words[5].lstrip("~") if len(words) > 5 else ""
                yield TmpfilesLine(f"/{path.relative_to(root)}", words[0].strip("+-=~^"), where.rstrip("/") or "/", age)


def _by_tmpreaper(folder: str, root: Path) -> Iterator[str]:
    settings = _text(root / "etc/tmpreaper.conf")
    if not settings or not (root / "etc/cron.daily/tmpreaper").exists():
        return
    told = dict(re.findall(r"^\s*(\w+)=[\"']?([^\"'\n]*)", settings, re.MULTILINE))
    below = [str(PurePosixPath(one)) for one in told.get("TMPREAPER_DIRS", "/tmp/.").split()]  # noqa: S108
    kept = told.get("TMPREAPER_PROTECT_EXTRA", "").split()
    reached = [one for one in below if PurePosixPath(folder).is_relative_to(one)]
    protected = any(fnmatchcase(folder, f"{one.rstrip('/*')}*") for one in kept)
    if reached and not protected and told.get("SHOWWARNING") != "true":
        yield (
            f"tmpreaper deletes files below {reached[0]} that were not read for {told.get('TMPREAPER_TIME', '7d')} "
            f"(/etc/tmpreaper.conf), also in {folder} while it is in use. To exclude it: "
            f"TMPREAPER_PROTECT_EXTRA='{folder}*'"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


LITTLE = 64 << 20  # bytes; the reserve of the ledger is 8 MiB
STALE = timedelta(hours=1)
_UNSYNCHRONIZED, _ERROR = 0x40, 5  # STA_UNSYNC; TIME_ERROR

Row = tuple[str, ...]


class _Timex(ctypes.Structure):
    """As the kernel fills it: only the status is read, and the rest is room for it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Row:
    """Ages, windows and expiry depend on it."""
    found = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(found))
    if state < 0:
        return ("note", "clock", f"whether it is synchronized could not be read: {os.strerror(ctypes.get_errno())}")
    if state == _ERROR or found.status & _UNSYNCHRONIZED:
        return ("note", "clock", "not synchronized. Start a time service: systemctl enable --now systemd-timesyncd")
    return ("ok", "clock", "synchronized")


def space(state: Path) -> Row:
    """Without space nothing can be recorded, and what cannot be recorded is not done."""
    place = next(one for one in (state, *state.parents) if one.exists())
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    words = f"{size_in_words(free)} free for the ledger at {place}"
    if free < LITTLE:
        return ("problem", "disk", f"only {words}. Nothing is reclaimed when nothing can be recorded. Free some space")
    return ("ok", "disk", words)


def measuring(lines: list[tuple[int, Event]], now: datetime) -> list[Row]:
    """Whether the daemon found that it measures too slowly, by its complaints of the last day."""
    slow = [line.at for _, line in lines if isinstance(line, Complaint) and line.what.startswith(TOO_SLOW)]
    return [("note", "measuring", f"{in_words(max(now - slow[-1], timedelta()))} ago: {TOO_SLOW}")] if slow else []


def last_pass(lines: list[tuple[int, Event]], now: datetime) -> Row:
    passes = [line for _, line in lines if isinstance(line, Passed)]
    if not passes:
        return ("note", "pass", "none is recorded yet. The daemon makes one at each interval of the policy")
    last = passes[-1]
    where, ago = f"{last.platform}/{last.place}", now - last.at
    if ago < -timedelta(minutes=5):
        return ("problem", "pass", f"the last one, at {where}, is {in_words(-ago)} in the future. Check the clock")
    verdict = "note" if ago > STALE else "ok"
    advice = ". Is the daemon running? systemctl status gpukeeper" if ago > STALE else ""
    failed = f", {last.failed} failed" if last.failed else ""
    return (verdict, "pass", f"the last one was {in_words(ago)} ago at {where}: {last.seen} seen{failed}{advice}")


PLATFORMS = ("docker", "kubernetes")


def doctor(
    policy: o.PolicyFile = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle", metavar="FILE", help="Also write a file for a support request, without secrets: .tar.gz"
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Check this machine: what works, what does not, and how to fix it."""
    rows: list[tuple[str, ...]] = []
    for name, examine in _EXAMINED.items():
        try:
            rows += examine(policy)
        except (KeeperError, PermissionError) as problem:
            rows.append(("problem", name, str(problem).replace("\n", " ")))
    rows += _daemon()
    findings = [{"verdict": v, "about": a, "words": w} for v, a, w in rows]
    if json:
        show.as_json("doctor", {"findings": findings})
    else:
        show.table(rows)
    if bundle is not None:
        names = ", ".join(write_support(bundle, findings, policy))
        print_message(f"{bundle}: {names}. It has names of users, containers and images: read it before you send it.")
    if any(row[0] == "problem" for row in rows):
        raise typer.Exit(1)


def _policy(policy: Path | None) -> list[tuple[str, ...]]:
    loaded = load_policy(policy)
    return [
        ("ok", "policy", f"{loaded.source}: {sentence(loaded.policy)}"),
        *(("note", "policy", w) for w in (*loaded.warnings, *not_backtested(loaded.policy))),
    ]


def _platforms(policy: Path | None) -> list[tuple[str, ...]]:
    silent, answers, covered = asyncio.run(_asked(policy))
    return [
        ("problem" if r.platform in covered else "note", r.platform, silent[r.platform])
        if r.platform in silent
        else ("ok" if r.reachable else "absent", r.platform, answers.get(r.platform, r.why))
        for r in discover()
    ]


async def _asked(policy: Path | None) -> tuple[dict[str, str], dict[str, str], Collection[str]]:
    """Configured platforms that are not reachable, and why; those that are, with a note; the platforms in scope."""
    silent: dict[str, str] = {}
    answers: dict[str, str] = {}
    context: str | None = None
    covered: Collection[str] = PLATFORMS
    try:
        loaded = load_policy(policy).policy
        context, covered = kubernetes_settings_of(loaded).context, tuple(loaded.scope)
    except PolicyError:
        pass  # reported above
    address = docker.find(os.environ)
    if address is not None:
        try:
            async with docker.Engine(address).opened():
                pass
        except KeeperError as problem:
            silent["docker"] = str(problem)
    if (config := kubernetes.find(os.environ)) is not None:
        try:
            cluster = kubernetes.Cluster.from_environment(os.environ, context)
            async with cluster.opened():
                version = await cluster.version()
            answers["kubernetes"] = (
                f"{cluster.place} at {cluster.address} is reachable ({version}; configured by {config})"
            )
        except KeeperError as problem:
            silent["kubernetes"] = str(problem)
    return silent, answers, covered


def _gpus(policy: Path | None) -> list[tuple[str, ...]]:
    note = gpu_note()
    if note is not None:
        return [("absent", "gpus", note)]
    found = inventory(timedelta(seconds=10))
    if isinstance(found, Unknown):
        return [("problem", "gpus", f"{found.why}. Without measurements nothing is reclaimed as idle.")]
    return [("ok", "gpus", f"{gpu.name} ({gpu.uuid})") for gpu in found]


def _files(policy: Path | None) -> list[tuple[str, ...]]:
    """What prevents reading which files are in use, and which other cleaners remove them."""
    loaded = load_policy(policy).policy
    rows: list[tuple[str, ...]] = [("note", "files", words) for one in _session_folders() for words in aged_by(one)]
    if os.geteuid() != 0 and (loaded.temporary or loaded.reports.roots or "ray" in loaded.scope):
        rows.append(
            (
                *("note", "files"),
                "open files of other users cannot be read without root, so their trees are kept. "
                "Run gpukeeper as root to reclaim them",
            )
        )
    return rows


def _ray(policy: Path | None) -> list[tuple[str, ...]]:
    """Whether the dashboards of the Ray nodes here are reachable; nodes of other clusters count as busy."""
    loaded = load_policy(policy).policy
    here = read_processes() if "ray" in loaded.scope else ()
    raylets = [raylet for one in here if (raylet := raylet_of(one)) is not None]

    async def asked() -> list[tuple[str, ...]]:
        asking = DashboardQueries(ray_settings_of(loaded).dashboard, os.environ)
        await asking.find(raylets)
        return [_of_node(raylet.node_id[:8], await asking.dashboard(raylet)) for raylet in raylets]

    def _of_node(node: str, found: Dashboard | Unknown) -> tuple[str, ...]:
        if isinstance(found, Unknown):
            return ("problem", "ray", f"node {node}: whether it is idle could not be read, so it is kept: {found.why}")
        return ("ok", "ray", f"node {node}: Ray {found.version} at {found.api.address} is reachable")

    return asyncio.run(asked()) if raylets else []


def _session_folders() -> list[str]:
    """Session directories of clusters on this machine: the defaults, and those of running raylets."""
    usual = [folder for one in temporary_folders(os.environ) if (folder := Path(one, RAY)).is_dir()]
    here = [raylet_of(one) for one in read_processes() if one.container is None]
    told = [Path(one.temp_dir) for one in here if one is not None and one.temp_dir]
    return list(dict.fromkeys(str(one) for one in (*usual, *told)))


def _channels(policy: Path | None) -> list[tuple[str, ...]]:
    """Whether the channels of the policy could send. Sends nothing; `gpukeeper notify test` does."""
    settings = load_policy(policy).policy.notify
    rows: list[tuple[str, ...]] = []

    async def checked() -> None:
        for channel in (*admin_channels(settings, lambda words: None)[1:], *owner_services(settings)):
            why = await channel_problem(channel)
            words = channel.name if why is None else f"{channel.name}: {why}"
            rows.append(("ok" if why is None else "problem", "notify", words))

    asyncio.run(checked())
    if settings.owners and not (settings.addresses or settings.address or settings.address_command):
        words = "owners have no addresses. Set notify.address, notify.addresses or notify.address_command"
        rows.append(("problem", "notify", words))
    return rows


def _web(policy: Path | None) -> list[tuple[str, ...]]:
    """Whether the dashboard could be served as configured; nothing if nothing is configured."""
    settings = load_policy(policy).policy.web
    if settings == Web():
        return []
    try:
        setup = read_setup(settings, "127.0.0.1")
    except UsageError as problem:
        return [("problem", "web", str(problem))]
    words = [settings.url or "no web.url"]
    words += [f"TLS with {settings.tls.certificate}"] if setup.tls is not None else []
    words += [f"proxy at {', '.join(settings.proxy.from_)}"] if setup.site.proxy is not None else []
    rows: list[tuple[str, ...]] = [("ok", "web", "; ".join(words))]
    if settings.plain_http:
        rows.append(("note", "web", f"web.plain_http is set: on other addresses than loopback, {CLEAR}"))
    return rows


def _ledger(policy: Path | None) -> list[tuple[str, ...]]:
    path = ledger_path()
    if not path.exists():
        return [("note", "ledger", f"{path} does not exist yet; the first apply or serve creates it")]
    ledger = open_ledger(path, write=False)
    try:
        damage = asyncio.run(ledger.damage())
        paused = asyncio.run(ledger.paused())
        passes = [] if damage else asyncio.run(ledger.lines(LineFilter(last=1, types=("pass",))))
        yesterday = datetime.now(UTC) - timedelta(days=1)
        slow = (
            []
            if damage
            else asyncio.run(ledger.lines(LineFilter(last=1, types=("complaint",), since=yesterday, search=TOO_SLOW)))
        )
    finally:
        ledger.close()
    rows: list[tuple[str, ...]] = [("problem", "ledger", f"{path}: {words}") for words in damage]
    if paused is not None:
        rows.append(("note", "ledger", f"all actions are paused: {paused}. Resume with: gpukeeper resume"))
    return [
        *(rows or [("ok", "ledger", str(path))]),
        last_pass(passes, datetime.now(UTC)),
        *measuring(slow, datetime.now(UTC)),
    ]


def _daemon() -> list[tuple[str, ...]]:
    path = socket_path()
    if not may_exist(path):
        return [
            (
                "note",
                "daemon",
                f"not running (no {path}); the idle rule needs its measurements. Start it: gpukeeper serve",
            )
        ]
    usable = os.access(path, os.R_OK | os.W_OK)
    return [("ok", "daemon", str(path)) if usable else ("problem", "daemon", closed(path))]


def _machine(policy: Path | None) -> list[tuple[str, ...]]:
    return [clock(), space(state_folder())]


_EXAMINED: dict[str, Callable[[Path | None], list[tuple[str, ...]]]] = {
    "policy": _policy,
    "platforms": _platforms,
    "gpus": _gpus,
    "machine": _machine,
    "files": _files,
    "ray": _ray,
    "notify": _channels,
    "web": _web,
    "ledger": _ledger,
}
