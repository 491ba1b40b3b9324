"""The directory of one run over many nodes. What a node has sent is durable here before anything of the run is removed.

RUN/run.json            the description of the run and its nodes, written before anything is started
RUN/nodes/NODE/         each report as it was sent, with its manifest; the end of its log
RUN/fleet.json, fleet.html, nodes.csv, gpus.csv, junit.xml     the report of the run
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from gpukeeper.acceptance.fleet.collect import RunReport
from gpukeeper.acceptance.fleet.spec import RunSpec, Target
from gpukeeper.acceptance.record import Report
from gpukeeper.acceptance.reports import fleet_page, html, junit, merge, tables
from gpukeeper.acceptance.reports.document import REPORT
from gpukeeper.acceptance.reports.store import HTML, JUNIT, ReportFolder, load_file, read
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError, UsageError
from gpukeeper.model.grade import Grade

DESCRIPTION, FLEET, PAGE, NODES_CSV, GPUS_CSV = "run.json", "fleet.json", "fleet.html", "nodes.csv", "gpus.csv"
LOG, LOG_MAX = "log.txt", 256 << 10
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    spec: RunSpec
    targets: tuple[Target, ...] = ()


class RunArchive:
    def __init__(self, reports: Path, run: str) -> None:
        if not _RUN.fullmatch(run):
            raise UsageError(f"{run!r} is not a run id. To list runs: gpukeeper accept list")
        self.path = reports / run
        self.nodes = ReportFolder(self.path / "nodes")

    def exists(self) -> bool:
        return os.path.lexists(self.path / DESCRIPTION)

    def begin(self, spec: RunSpec, targets: tuple[Target, ...]) -> None:
        _write(self.path / DESCRIPTION, msgspec.json.encode(Description(spec=spec, targets=targets)))

    def description(self) -> Description | None:
        """None: this machine has not seen the run before."""
        if not self.exists():
            return None
        try:
            return reading.decode(read(self.path / DESCRIPTION), type=Description)
        except ValueError as error:
            raise KeeperError(f"{self.path / DESCRIPTION} is damaged: {error}.") from error

    def add(self, report: Report, text: bytes, log: bytes) -> Path:
        """As soon as it arrives, and durable. The same again changes nothing."""
        extra = {LOG: log[-LOG_MAX:]} if log else {}
        if report.verdict is not Grade.PASS:
            extra[HTML] = html.page(report).encode()
        return self.nodes.add(_directory(report.node), text, extra)

    def reports(self, run: str) -> dict[str, list[Report]]:
        """What was collected before, by node. One that cannot be read is none: it is collected again."""
        found: dict[str, list[Report]] = {}
        for directory in self._directories():
            try:
                report = load_file(directory / REPORT)
            except KeeperError:
                continue
            if report.run == run:
                found.setdefault(report.node, []).append(report)
        return found

    def finish(self, report: RunReport) -> Path:
        """Written again when more is known."""
        pages = self._pages(report)
        for name, content in views(report, pages).items():
            _write(self.path / name, content)
        return self.path

    def _pages(self, report: RunReport) -> dict[str, str]:
        """Relative to the run's page. Nodes that passed have none; `accept show` prints their reports."""
        names = {one.node: _directory(one.node) for one in report.fleet.nodes}
        return {
            node: f"nodes/{name}/{HTML}" for node, name in names.items() if (self.nodes.path / name / HTML).is_file()
        }

    def _directories(self) -> Iterator[Path]:
        if not self.nodes.path.is_dir():
            return
        for path in sorted(self.nodes.path.iterdir()):
            if not path.name.startswith(".") and path.is_dir() and not path.is_symlink():
                yield path


def _directory(node: str) -> str:
    return re.sub("[^A-Za-z0-9._-]", "-", node).lstrip("._-")[:100] or "node"


def views(report: RunReport, pages: Mapping[str, str]) -> dict[str, bytes]:
    about = {"run": report.run, "engine": f"{report.engine} {report.form}".strip(), "owner": report.owner}
    head = ("node", "gpu", "identity", "verdict", "reason")
    gpus = [(one.node, one.gpu, one.identity, one.verdict.value, one.reason) for one in report.gpus]
    return {
        FLEET: msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
        PAGE: fleet_page.page(report.fleet, about, pages).encode(),
        NODES_CSV: merge.csv(report.fleet).encode(),
        GPUS_CSV: tables.rows(head, gpus).encode(),
        JUNIT: junit.fleet_xml(report.fleet, report.run).encode(),
    }


def stored_runs(reports: Path) -> list[tuple[Path, RunReport | KeeperError | None]]:
    """Runs over many nodes in a report directory. None: it has no report yet; its launcher runs, or was killed."""
    found: list[tuple[Path, RunReport | KeeperError | None]] = []
    for path in sorted(reports.iterdir()) if reports.is_dir() else ():
        if not path.is_symlink() and (path / DESCRIPTION).is_file():
            try:
                found.append((path, load_run(path) if (path / FLEET).exists() else None))
            except KeeperError as problem:
                found.append((path, problem))
    return found


def load_run(path: Path) -> RunReport:
    try:
        return reading.decode(read(path / FLEET), type=RunReport)
    except ValueError as error:
        raise KeeperError(f"{path / FLEET} is damaged: {error}. Nothing was read from it.") from error


def _write(path: Path, content: bytes) -> None:
    """Complete or not at all, and durable."""
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with made.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
        number = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as error:
        with suppress(OSError):  # its directory may be the problem
            made.unlink()
        raise KeeperError(f"{path} could not be written: {error}. Nothing of the run was removed.") from error
