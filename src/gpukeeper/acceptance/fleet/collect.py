"""What a node sends (its report as lines of a log, a termination message), and the report of the run from it. Pure.

Only a report counts. A node without one is INCONCLUSIVE, with the reason that the engine gives; a verdict that only its
termination message has is quoted and does not accept it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from urllib.parse import quote

import msgspec

from gpukeeper.acceptance.check import RunRequest
from gpukeeper.acceptance.fleet.launcher import LOST, NodeStatus, Phase, RunSpec, Target
from gpukeeper.acceptance.recompute import recomputed
from gpukeeper.acceptance.record import Finding, Machine, Remedy, Report
from gpukeeper.acceptance.reports.formats import decode_report
from gpukeeper.acceptance.reports.merge import FleetReport, merge
from gpukeeper.acceptance.reports.wording import gpus_of
from gpukeeper.model import reading
from gpukeeper.model.errors import KeeperError
from gpukeeper.model.gpu import Grade, rank
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, plain

FRAME_MARK = "GPUKEEPER-REPORT"
FRAME_VERSION = "1"
NCCL_MARK = "[NCCL "  # a line of NCCL's log, with the name of its file
NCCL_MAX = 64 << 10  # characters of NCCL's logs that a node sends; 512 nodes are read by one launcher
FRAME_MAX = 8192  # bytes; engines split lines of more than 16 KiB
REPORT_MAX = 64 << 20  # bytes, unpacked
PARTS_MAX = 4096
DIFFERENT_MAX = 8  # different reports in one log: attempts after a restart; more are not read
FRAME_COPIES = 2
_NAME_MAX = 253  # characters of the name of a node; up to 12 times as many bytes when quoted
_DATA = 4000  # bytes of base64 in one line; the rest is for the names
_SEEN_MAX = 8  # problems that are reported
_LINE = re.compile(
    rf"{FRAME_MARK} {FRAME_VERSION} (?P<run>[!-~]{{1,128}}) (?P<node>[!-~]{{1,3000}})"
    r" (?P<part>[0-9]{1,4})/(?P<total>[0-9]{1,4})"
    r" (?P<digest>[0-9a-f]{64}) (?P<sum>[0-9a-f]{16}) (?P<data>[A-Za-z0-9+/=]{1,8192})(?:\s|$)"
)


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """`reports`: each complete one, in the order of their first lines; a node that started again may have sent two."""

    reports: tuple[bytes, ...] = ()
    missing: tuple[int, ...] = ()  # parts of the report that is the least incomplete; empty if one is complete
    total: int = 0  # of its parts; 0: there is no line of this run and node
    problems: tuple[str, ...] = ()  # sentences: what was refused


# Only the log can be read from a node on every engine, and logs are rotated, cut, prefixed and mixed with other
# output. So a report is compressed and cut into numbered lines, each with the digest of the whole and its own
# checksum, and the lines are printed twice: a log that lost its beginning or a few lines still has each part once.
# What does not fit is refused and never guessed. A checksum proves that a line is complete, not which program wrote
# it.
def encode_frames(report: bytes, run: str, node: str) -> list[str]:
    """The lines, each set twice. ValueError: the report is too large."""
    if len(report) > REPORT_MAX:
        raise ValueError(f"a report of {len(report):,} bytes is larger than {REPORT_MAX:,}")
    words = base64.b64encode(zlib.compress(report, 9)).decode()
    parts = [words[start : start + _DATA] for start in range(0, len(words), _DATA)]
    if len(parts) > PARTS_MAX:
        raise ValueError(f"a report of {len(parts):,} lines has more than {PARTS_MAX:,}")
    digest = hashlib.sha256(report).hexdigest()
    lines = []
    for number, data in enumerate(parts, start=1):
        head = f"{FRAME_MARK} {FRAME_VERSION} {run} {quoted(node)} {number}/{len(parts)} {digest}"
        lines.append(f"{head} {_checksum(head, data)} {data}")
    assert all(len(line) <= FRAME_MAX for line in lines), "a name is longer than a line allows"
    return lines * FRAME_COPIES


def nccl_lines(logs: Mapping[str, str]) -> Iterator[str]:
    """The beginnings of NCCL's logs, where its version, networks, rings and choices are."""
    found = {name: words for name, words in logs.items() if name.rpartition("/")[2].startswith("nccl-") and words}
    for name, words in found.items():
        share = NCCL_MAX // len(found)
        for line in words[:share].splitlines():
            yield f"{NCCL_MARK}{name}] {plain(line)}"
        if len(words) > share:
            yield f"{NCCL_MARK}{name}] {len(words) - share} more characters were not sent"


def quoted(node: str) -> str:
    """One word, whatever the machine is called."""
    return quote(node[:_NAME_MAX], safe="")


def decode_frames(log: bytes, run: str, node: str) -> Decoded:
    reader = FrameReader(run, node)
    reader.feed(log)
    return reader.result()


@dataclass
class _Set:
    """The parts of one report."""

    total: int
    parts: dict[int, str] = field(default_factory=dict)


class FrameReader:
    """Parts of one node's log, in any order, with any overlap. Only the lines of this run and node count."""

    def __init__(self, run: str, node: str) -> None:
        self._run, self._node = run, quoted(node)
        self._sets: dict[str, _Set] = {}
        self._problems: dict[str, int] = {}

    def feed(self, log: bytes) -> None:
        """A line that is cut at either end of `log` is damaged; it has to be read again as a whole."""
        for line in _marked(log):
            found = _LINE.search(line.decode("ascii", "replace"))
            if found is None:
                self._refuse("a line of a report is damaged")
            else:
                self._take(found)

    def _take(self, found: re.Match[str]) -> None:
        head, data = found[0][: found.start("sum") - found.start() - 1], found["data"]
        part, total, digest = int(found["part"]), int(found["total"]), found["digest"]
        if _checksum(head, data) != found["sum"]:
            self._refuse("a line of a report is damaged: its checksum does not match")
        elif found["run"] != self._run:
            self._refuse(f"a line belongs to run {found['run']}, not to {self._run}")
        elif found["node"] != self._node:
            self._refuse(f"a line belongs to node {found['node'][:80]}, not to {self._node}")
        elif not 1 <= part <= total <= PARTS_MAX:
            self._refuse(f"a line has the impossible number {part}/{total}")
        elif digest not in self._sets and len(self._sets) >= DIFFERENT_MAX:
            self._refuse(f"the log has more than {DIFFERENT_MAX} different reports of this node")
        elif self._sets.setdefault(digest, _Set(total)).total != total:
            self._refuse(f"lines of one report do not agree on their number: {total} and {self._sets[digest].total}")
        elif self._sets[digest].parts.setdefault(part, data) != data:
            self._refuse(f"part {part} of a report is there twice, with different contents")

    def result(self) -> Decoded:
        reports, problems = [], [_counted(words, times) for words, times in self._problems.items()]
        for digest, one in self._sets.items():
            if len(one.parts) == one.total:
                try:
                    reports.append(_unpacked(one, digest))
                except ValueError as problem:
                    problems.append(f"a report was refused: {problem}")
        best = max(self._sets.values(), key=lambda one: len(one.parts) / one.total, default=None)
        missing = () if best is None or reports else tuple(n for n in range(1, best.total + 1) if n not in best.parts)
        total = 0 if best is None else best.total
        return Decoded(reports=tuple(reports), missing=missing, total=total, problems=tuple(problems))

    def _refuse(self, words: str) -> None:
        if words in self._problems or len(self._problems) < _SEEN_MAX:
            self._problems[words] = self._problems.get(words, 0) + 1


def _marked(log: bytes) -> Iterator[bytes]:
    """From the mark to the end of its line. Engines and people put times and names before it."""
    mark, start = f"{FRAME_MARK} ".encode(), 0
    while (start := log.find(mark, start)) >= 0:
        end = log.find(b"\n", start)
        end = len(log) if end < 0 else end
        again = log.find(mark, start + len(mark), end)  # a line that was cut, and the next one behind it
        yield log[start : end if again < 0 else again][: 2 * FRAME_MAX]
        start = end if again < 0 else again


def _checksum(head: str, data: str) -> str:
    return hashlib.sha256(f"{head} {data}".encode()).hexdigest()[:16]


def _unpacked(parts: _Set, digest: str) -> bytes:
    try:
        packed = base64.b64decode("".join(parts.parts[number] for number in range(1, parts.total + 1)), validate=True)
        unpacking = zlib.decompressobj()
        report = unpacking.decompress(packed, REPORT_MAX)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it cannot be unpacked ({error})") from error
    if unpacking.unconsumed_tail:
        raise ValueError(f"it is larger than {REPORT_MAX:,} bytes when unpacked")
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError("it cannot be unpacked (its end is missing, or something follows it)")
    if hashlib.sha256(report).hexdigest() != digest:
        raise ValueError("its contents do not match its digest")
    return report


def _counted(words: str, times: int) -> str:
    return words if times == 1 else f"{words} ({times} times)"


MESSAGE_MAX = 4096  # bytes; Kubernetes keeps no more of a termination message
_REASON_MAX = 3000
RUN_CHECK = "run"


class TerminationMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A few bytes that an engine keeps when the log is lost. `digest`: of the report, as in its frames."""

    verdict: Grade
    run: str
    node: str
    reason: str
    digest: str


def termination_message(report: Report, text: bytes) -> bytes:
    """`text`: the report as it was sent. The reason is cut so that all fits."""
    made = TerminationMessage(
        verdict=report.verdict, run=report.run, node=report.node, reason="", digest=hashlib.sha256(text).hexdigest()
    )
    for length in (_REASON_MAX, 1000, 300, 100):
        found = msgspec.json.encode(msgspec.structs.replace(made, reason=report.reason[:length]))
        if len(found) <= MESSAGE_MAX:
            return found
    return msgspec.json.encode(msgspec.structs.replace(made, node=report.node[:64], run=report.run[:64]))


def read_message(text: str) -> TerminationMessage | None:
    """None: it is none of ours."""
    if len(text) > MESSAGE_MAX:
        return None
    try:
        return reading.decode(text, type=TerminationMessage)
    except (ValueError, msgspec.MsgspecError):
        return None


def without_result(
    *,
    run: str,
    node: str,
    version: str,
    wish: RunRequest,
    started: datetime,
    ended: datetime,
    why: str,
    interrupted: bool,
) -> Report:
    """The report of a run that ended before any check could: it accepts nothing, and gives the reason."""
    reason = f"The run ended without a result: {why}"
    finding = Finding(
        check=RUN_CHECK, verdict=Grade.INCONCLUSIVE, code="run-failed", message=reason, action=Remedy.CHECK_CONFIG
    )
    return Report(
        run=run,
        node=node,
        version=version,
        device=wish.device,
        started=started,
        ended=ended,
        profile=wish.profile,
        within_s=wish.within_s,
        verdict=Grade.INCONCLUSIVE,
        reason=reason,
        machine=Machine(node=node, gpus=Unknown("the run ended before the GPUs were read")),
        expected=wish.expected,
        findings=(finding,),
        settings={"wish": msgspec.to_builtins(wish)},
        interrupted=interrupted,
    )


RUN_SCHEMA = "gpukeeper/acceptance-run/v1"
FAILED, INCONCLUSIVE, INTERRUPTED = 4, 5, 130
EXCLUDED, LAUNCH, DEADLINE, PENDING, LOG_LOST, NO_REPORT, VANISHED, REFUSED, STOPPED = (
    *("excluded", "launch-failed", "deadline", "pending", "log-lost", "no-report", "vanished", "report-refused"),
    "interrupted",
)


class MissingNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node without a report. `claimed`: the verdict of its termination message, which does not count."""

    node: str
    code: str  # of the engine, or one of this module
    reason: str
    exit_code: int | None = None
    claimed: Grade | None = None


class GpuOfRun(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    gpu: int  # index
    identity: str
    verdict: Grade
    reason: str


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run over many nodes. `fleet`: the verdict, and the nodes; `missing`: those without a report."""

    run: str
    owner: str
    engine: str
    form: str
    started: datetime
    ended: datetime
    deadline_s: float
    arguments: tuple[str, ...] = ()
    interrupted: bool = False
    fleet: FleetReport
    gpus: tuple[GpuOfRun, ...] = ()  # failing first
    missing: tuple[MissingNode, ...] = ()
    notes: tuple[str, ...] = ()  # sentences: what was odd about what nodes sent
    schema: str = RUN_SCHEMA

    @property
    def verdict(self) -> Grade:
        return self.fleet.verdict


@dataclass
class Collected:
    """What is known so far. `reports`: of a node that started again there may be several."""

    spec: RunSpec
    targets: tuple[Target, ...]
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    reports: dict[str, list[Report]] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of what a node sent
    unread: dict[str, str] = field(default_factory=dict)  # nodes whose output could not be read, and why
    failed: str = ""  # why the run could not be launched


def read_sent(text: bytes, run: str, node: str) -> Report:
    """The report that a node sent. KeeperError: it is none of this run and node. Its verdict is computed again."""
    report = decode_report(text, f"the report of {node}")
    if (report.run, report.node) != (run, node):
        raise KeeperError(f"the report of {node} is one of run {report.run} and node {report.node}. It was not used.")
    return recomputed(report)


def run_report(found: Collected, ended: datetime, *, interrupted: bool = False) -> RunReport:
    spec = found.spec
    counted = {node: _worst(reports) for node, reports in found.reports.items() if reports}
    expected = [one.node for one in found.targets]
    missing = tuple(_missing(one, found, interrupted=interrupted) for one in found.targets if one.node not in counted)
    fleet = merge(counted.values(), expected, {one.node: one.reason for one in missing})
    return RunReport(
        run=spec.run,
        owner=spec.owner,
        engine=spec.engine,
        form=spec.form,
        started=spec.created,
        ended=ended,
        deadline_s=spec.deadline_s,
        arguments=spec.arguments,
        interrupted=interrupted,
        fleet=fleet,
        gpus=tuple(sorted(_gpus(counted), key=lambda one: (-rank(one.verdict), one.node, one.gpu))),
        missing=missing,
        notes=tuple(_notes(found, counted)),
    )


def exit_code(report: RunReport, *, strict: bool = False) -> int:
    if report.interrupted:
        return INTERRUPTED
    codes = {Grade.PASS: 0, Grade.WARN: FAILED if strict else 0, Grade.FAIL: FAILED}
    return codes.get(report.verdict, INCONCLUSIVE)


def _worst(reports: Sequence[Report]) -> Report:
    """Two of one run and node differ only if the node started again, or if one is forged: the worse counts."""
    return max(reports, key=lambda one: rank(one.verdict))


def _missing(target: Target, found: Collected, *, interrupted: bool) -> MissingNode:
    """The first that applies: what was decided before the start, what the node sent, what the engine knows."""
    status, node = found.statuses.get(target.node), target.node
    if target.excluded:
        return MissingNode(node=node, code=EXCLUDED, reason=_sentence(target.excluded))
    if found.failed and (status is None or status.phase is Phase.GONE):
        return MissingNode(node=node, code=LAUNCH, reason=f"The run could not be launched: {found.failed}")
    if node in found.problems:
        words = "; ".join(found.problems[node])
        return _lost(node, status, REFUSED, f"What it sent was refused: {words}.")
    if node in found.unread:
        return _lost(node, status, LOG_LOST, f"Its output could not be read: {found.unread[node]}")
    if status is None:
        return MissingNode(node=node, code=VANISHED, reason="The engine has nothing of it.")
    if interrupted and status.phase in (Phase.WAITING, Phase.RUNNING):
        why = f" It was {status.phase}{f': {status.reason}' if status.reason else '.'}"
        return MissingNode(node=node, code=STOPPED, reason=f"The run was interrupted before it reported.{why}")
    return _by_phase(node, status, found.spec)


def _by_phase(node: str, status: NodeStatus, spec: RunSpec) -> MissingNode:
    why = f" {_sentence(status.reason)}" if status.reason else ""
    span = in_words(timedelta(seconds=spec.deadline_s))
    if status.code in LOST and status.phase in (Phase.WAITING, Phase.RUNNING):
        return _lost(node, status, status.code, f"Its node was lost before it reported.{why}")
    match status.phase:
        case Phase.WAITING:
            return _lost(node, status, status.code or PENDING, f"It did not start within {span}.{why}")
        case Phase.RUNNING:
            return _lost(node, status, status.code or DEADLINE, f"It did not report within {span}.{why}")
        case Phase.ENDED:
            ended = "Its program ended" if status.exit_code is None else f"Its program ended with {status.exit_code}"
            return _lost(node, status, status.code or NO_REPORT, f"{ended} and its log has no report.{why}")
        case Phase.GONE:
            return _lost(node, status, status.code or VANISHED, f"It is gone without a report.{why}")


def _lost(node: str, status: NodeStatus | None, code: str, reason: str) -> MissingNode:
    message = read_message(status.message) if status is not None and status.message else None
    exit_code = None if status is None else status.exit_code
    if message is None or message.node != node:
        return MissingNode(node=node, code=code, reason=reason, exit_code=exit_code)
    words = (
        f"{reason} Its termination message says {message.verdict} ({message.reason.rstrip('.')}), which does not count."
    )
    code = LOG_LOST if code == NO_REPORT else code
    return MissingNode(node=node, code=code, reason=words, exit_code=exit_code, claimed=message.verdict)


def _sentence(words: str) -> str:
    text = words.strip()
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _gpus(counted: Mapping[str, Report]) -> Iterator[GpuOfRun]:
    for node, report in counted.items():
        known = {gpu.uuid: gpu for gpu in gpus_of(report.machine)}
        for one in report.tallies:
            gpu = known.get(one.gpu)
            yield GpuOfRun(
                node=node,
                gpu=-1 if gpu is None else gpu.index,
                identity=one.gpu if gpu is None else gpu.identity,
                verdict=one.verdict,
                reason=one.reason,
            )


def _notes(found: Collected, counted: Mapping[str, Report]) -> Iterator[str]:
    for node, reports in found.reports.items():
        if len(reports) > 1:
            grades = ", ".join(str(one.verdict) for one in reports)
            yield f"{node} sent {len(reports)} different reports ({grades}); the worst counts."
    for node, problems in found.problems.items():
        if node in counted:
            yield f"{node}: {'; '.join(problems)}."
