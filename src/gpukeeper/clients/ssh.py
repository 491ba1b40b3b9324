"""Requests to hosts through the OpenSSH client: a program is sent over stdin, then one request; one reply.

The remote command is constant; names and commands travel as JSON on stdin. No text of a run reaches a remote shell.
Hosts are listed as people write them: one per line, USER@HOST:PORT, comments.
"""

from __future__ import annotations

import asyncio
import re
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.words import in_words, size_in_words
from gpukeeper.processes import Tail, read_at_most, running

_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


class Host(msgspec.Struct, frozen=True, order=True):
    """`node`: its name in reports, without the user. The port counts: two servers may share an address."""

    node: str
    address: str
    user: str = ""
    port: int | None = None

    @property
    def words(self) -> str:
        return f"{self.user}@{self.node}" if self.user else self.node


def host(text: str) -> Host:
    """ValueError: it is no host. What begins with a dash is none: ssh would take it for an option."""
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"] or 22) < 65536:
        raise ValueError(f'"{text}" is not a host; write it as HOST, USER@HOST or USER@HOST:PORT')
    port = None if found["port"] is None else int(found["port"])
    node = found["host"] if port is None else f"{found['host']}:{port}"
    return Host(node, found["host"].strip("[]"), found["user"] or "", port)


def read_hosts(lines: Iterable[str], source: str) -> tuple[Host, ...]:
    """All problems at once."""
    found: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            one = host(text)
        except ValueError as error:
            problems.append(f"{source}:{number}: {error}")
            continue
        if one.node in found:
            problems.append(f"{source}:{number}: {one.node} is in the list twice")
        found[one.node] = one
    if problems:
        raise UsageError("\n".join((*problems, "Nothing was started.")))
    return tuple(found.values())


def selected_hosts(known: Sequence[Host], names: Sequence[str]) -> tuple[Host, ...]:
    """Those of a list; without a list the names themselves are hosts."""
    if not known:
        return read_hosts(names, "--nodes")
    by_name = {one.node: one for one in known} | {one.words: one for one in known}
    missing = [name for name in names if name not in by_name]
    if missing:
        near = get_close_matches(missing[0], by_name, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UsageError(f"not in the list of hosts: {', '.join(missing)}.{hint} Nothing was started.")
    return tuple(dict.fromkeys(by_name[name] for name in names)) or tuple(known)


T = TypeVar("T")
AT_ONCE = 32  # connections
CONNECT = timedelta(seconds=10)
REQUEST = timedelta(seconds=90)  # one request, with the connection; stopping a run takes up to 50 s
REPLY_MAX = 80 * 1024 * 1024  # bytes
WORDS_MAX = 300  # characters of an error message
CHUNK = 256 * 1024  # bytes that are sent or read at once
SSH_FAILED = 255  # exit code of the ssh program itself
_PYTHON = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_/.+-]*")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the client. `config`: another file than ~/.ssh/config. `multiplex`: a directory for shared connections.
    `sudo`: the program runs as root, by a sudo that asks for no password."""

    program: str = "ssh"
    python: str = "python3"  # on the hosts
    config: str = ""
    identity: str = ""
    user: str = ""
    connect: timedelta = CONNECT
    request: timedelta = REQUEST
    multiplex: str = ""
    sudo: bool = False


class HostError(Exception):
    """One host could not carry out a request. `code` as in NodeStatus; the message is for people."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


class Envelope(msgspec.Struct, frozen=True):
    """What every reply has. `size`: bytes behind it."""

    ok: bool
    size: int
    error: str = ""


class Program(msgspec.Struct, frozen=True):
    """Runs on the hosts, with the standard library of Python 3.8. `mark`: its reply begins behind it."""

    source: bytes
    mark: bytes

    @classmethod
    def of(cls, file: str, mark: bytes) -> Program:
        return cls(Path(file).read_bytes(), mark)


class SshClient:
    def __init__(self, settings: Settings, program: Program) -> None:
        if not _PYTHON.fullmatch(settings.python):
            raise UsageError(f'option python="{settings.python}" is not the name or path of an interpreter')
        self._settings = settings
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._program = program
        self._used: set[Host] = set()

    async def request(self, host: Host, reply: type[T], do: str, **what: object) -> T:
        return (await self.request_bytes(host, reply, do, **what))[0]

    async def request_bytes(self, host: Host, reply: type[T], do: str, **what: object) -> tuple[T, bytes]:
        """HostError: it did not reply, or refused."""
        return await self._replied(host, reply, None, {"do": do, **what})

    async def send(self, host: Host, reply: type[T], do: str, file: Path, /, **what: object) -> T:
        """The file comes behind the request, which is one line then."""
        return (await self._replied(host, reply, file, {"do": do, **what}))[0]

    async def _replied(
        self, host: Host, reply: type[T], file: Path | None, request: dict[str, object]
    ) -> tuple[T, bytes]:
        source, sent = self._program.source, msgspec.json.encode(request)
        async with self._limit:
            parts = _parts(b"%d\n" % len(source) + source + sent, file)
            code, out, err = await self._exchange(host, parts)
        if len(out) > REPLY_MAX:
            raise HostError("refused", f"{host.node} sent more than {size_in_words(REPLY_MAX)}; its reply was not read")
        line, body = _split(out.partition(self._program.mark), code, err, host, self._settings.python)
        try:
            head = reading.decode(line, type=Envelope)
            if not head.ok:
                raise HostError("refused", f"{host.node} refused: {_clean(head.error)}")
            if len(body) != head.size:
                raise HostError("unreachable", f"the connection to {host.node} broke during its reply: {_clean(err)}")
            return reading.decode(line, type=reply), body
        except msgspec.DecodeError as error:
            raise HostError("refused", f"the reply of {host.node} cannot be read: {error}") from error

    def command(self, host: Host) -> list[str]:
        """The program and its arguments. The destination comes after `--`, the remote command is constant."""
        settings = self._settings
        given = {
            "BatchMode": "yes",
            "ConnectTimeout": str(max(1, round(settings.connect.total_seconds()))),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "PermitLocalCommand": "no",
            "RequestTTY": "no",
        }
        if settings.multiplex:
            given |= {"ControlMaster": "auto", "ControlPath": f"{settings.multiplex}/%C", "ControlPersist": "60"}
        words = [settings.program, "-T"]
        words += ["-F", settings.config] if settings.config else []
        words += ["-i", settings.identity] if settings.identity else []
        words += [word for name, value in given.items() for word in ("-o", f"{name}={value}")]
        user = host.user or settings.user
        words += ["-l", user] if user else []
        words += ["-p", str(host.port)] if host.port is not None else []
        return [*words, "--", host.address, self.remote()]

    def remote(self) -> str:
        """Reads as many bytes as the first line says, and executes them. The quotes are the same in every shell."""
        read = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
        root = "sudo -n " if self._settings.sudo else ""
        return f"exec {root}{self._settings.python} -I -S -c '{read}'"

    async def close(self) -> None:
        """Shared connections end; others end with their request."""
        if not self._settings.multiplex:
            return
        for host in self._used:
            ssh, *rest = self.command(host)
            with suppress(OSError, TimeoutError):
                await _run([ssh, "-O", "exit", *rest[: rest.index("--") + 2]], (), CONNECT)

    async def _exchange(self, host: Host, sent: Iterable[bytes]) -> tuple[int, bytes, bytes]:
        self._used.add(host)
        within = max(self._settings.request, 2 * self._settings.connect)
        try:
            return await _run(self.command(host), sent, within)
        except TimeoutError as error:
            words = f"{host.node} did not reply within {in_words(within)}"
            raise HostError("unreachable", words) from error
        except OSError as error:
            words = f"{self._settings.program} cannot be started: {error.strerror}. Install the OpenSSH client."
            raise UsageError(words) from error


def _parts(head: bytes, file: Path | None) -> Iterator[bytes]:
    """A file is never in memory as a whole: it goes to many hosts at the same time."""
    if file is None:
        yield head
        return
    yield head + b"\n"
    with file.open("rb") as content:
        while part := content.read(CHUNK):
            yield part


async def _run(command: list[str], sent: Iterable[bytes], within: timedelta) -> tuple[int, bytes, bytes]:
    """Its exit code, its reply and the end of its stderr. What it leaves behind, such as a shared connection, stays."""
    said = Tail()
    async with (
        running(*command, alone=True, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=CHUNK) as child,
        asyncio.timeout(within.total_seconds()),
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        out, _, _ = await asyncio.gather(_reply(child, child.stdout), said.read(child.stderr), _feed(child.stdin, sent))
        await child.wait()
    return child.returncode or 0, out, said.kept


async def _reply(child: Process, stdout: asyncio.StreamReader) -> bytes:
    """A host that sends more than REPLY_MAX is not listened to any further."""
    found = await read_at_most(stdout, REPLY_MAX)
    if len(found) > REPLY_MAX:
        with suppress(ProcessLookupError):
            child.kill()
    return found


async def _feed(stdin: asyncio.StreamWriter, sent: Iterable[bytes]) -> None:
    """A program that ends before it has read everything says why on stderr."""
    with suppress(BrokenPipeError, ConnectionResetError):
        for part in sent:
            stdin.write(part)
            await stdin.drain()
    stdin.close()


def _split(found: tuple[bytes, bytes, bytes], code: int, err: bytes, host: Host, python: str) -> tuple[bytes, bytes]:
    """The line and the bytes behind the mark: a profile on the host may print before it."""
    _, mark, reply = found
    line, complete, body = reply.partition(b"\n")
    if mark and complete:
        return line, body
    words = _clean(err) or f"exit code {code}"
    if code == SSH_FAILED:
        raise HostError("unreachable", f"{host.node} cannot be reached: {words}")
    advice = f"gpukeeper needs Python 3.8 or newer there; name it with --option python=PATH (now: {python})"
    raise HostError("python", f"the host program did not run on {host.node}: {words}. {advice}")


def _clean(words: bytes | str) -> str:
    """The last lines, where the reason is; banners come first. Untrusted: printable characters only."""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else words
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    said = "; ".join(lines[-3:])
    return "".join(letter for letter in said if letter.isprintable())[-WORDS_MAX:].rstrip(".")
