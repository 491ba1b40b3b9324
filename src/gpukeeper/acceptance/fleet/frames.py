"""A report as lines of a log, and back. Pure.

Only the log can be read from a node on every engine, and logs are rotated, cut, prefixed and mixed with
other output. So a report is compressed and cut into numbered lines, each with the digest of the whole and its own
checksum, and the lines are printed twice: a log that lost its beginning or a few lines still has each part once. What
does not fit is refused and never guessed. A checksum proves that a line is complete, not which program wrote it.

    GPUKEEPER-REPORT 1 RUN NODE PART/TOTAL DIGEST CHECKSUM DATA
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec

MARK = "GPUKEEPER-REPORT"
VERSION = "1"
LINE_MAX = 8192  # bytes; engines split lines of more than 16 KiB
REPORT_MAX = 64 << 20  # bytes, unpacked
PARTS_MAX = 4096
DIFFERENT_MAX = 8  # different reports in one log: attempts after a restart; more are not read
COPIES = 2
_NAME_MAX = 253  # characters of the name of a node; up to 12 times as many bytes when quoted
_DATA = 4000  # bytes of base64 in one line; the rest is for the names
_SEEN_MAX = 8  # problems that are reported
_LINE = re.compile(
    rf"{MARK} {VERSION} (?P<run>[!-~]{{1,128}}) (?P<node>[!-~]{{1,3000}})"
    r" (?P<part>[0-9]{1,4})/(?P<total>[0-9]{1,4})"
    r" (?P<digest>[0-9a-f]{64}) (?P<sum>[0-9a-f]{16}) (?P<data>[A-Za-z0-9+/=]{1,8192})(?:\s|$)"
)


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """`reports`: each complete one, in the order of their first lines; a node that started again may have sent two."""

    reports: tuple[bytes, ...] = ()
    missing: tuple[int, ...] = ()  # parts of the report that is the least incomplete; empty if one is complete
    total: int = 0  # of its parts; 0: there is no line of this run and node
    problems: tuple[str, ...] = ()  # sentences: what was refused


def encode(report: bytes, run: str, node: str) -> list[str]:
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
        head = f"{MARK} {VERSION} {run} {quoted(node)} {number}/{len(parts)} {digest}"
        lines.append(f"{head} {_checksum(head, data)} {data}")
    assert all(len(line) <= LINE_MAX for line in lines), "a name is longer than a line allows"
    return lines * COPIES


def quoted(node: str) -> str:
    """One word, whatever the machine is called."""
    return quote(node[:_NAME_MAX], safe="")


def decode(log: bytes, run: str, node: str) -> Decoded:
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
    mark, start = f"{MARK} ".encode(), 0
    while (start := log.find(mark, start)) >= 0:
        end = log.find(b"\n", start)
        end = len(log) if end < 0 else end
        again = log.find(mark, start + len(mark), end)  # a line that was cut, and the next one behind it
        yield log[start : end if again < 0 else again][: 2 * LINE_MAX]
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
