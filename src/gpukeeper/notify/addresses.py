"""Addresses of owners, for channels that need one: from a map, a template or a program, in this order.

Names of owners are untrusted input: users who may set a label choose them. A name becomes part of an address, or an
argument of a program, only if it consists of harmless characters; the result is checked again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.model.durations import in_words
from gpukeeper.model.message import NotDelivered
from gpukeeper.notify.command import PATH

DEADLINE = timedelta(seconds=5)
FOUND_FOR, FAILED_FOR = timedelta(hours=1), timedelta(minutes=5)
CACHED = 1000  # owners
OUTPUT_MAX = 4096  # bytes
# No comma, semicolon, space, percent sign or control character: services take those as the end of an address.
ADDRESS = re.compile(r"[A-Za-z0-9@#_][A-Za-z0-9@#._+=-]{0,253}", re.ASCII)
OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}", re.ASCII)
TEMPLATE_FIELD = "{owner}"


def problem_of_address(address: str) -> str | None:
    if ADDRESS.fullmatch(address):
        return None
    return "an address has up to 254 letters, digits and the characters @ # . _ + = -"


def problem_of_template(template: str) -> str | None:
    if template.count(TEMPLATE_FIELD) != 1:
        return f"it must contain {TEMPLATE_FIELD} once"
    return problem_of_address(template.replace(TEMPLATE_FIELD, "ann"))


class AddressBook:
    def __init__(
        self, known: Mapping[str, str] | None = None, template: str | None = None, command: Sequence[str] = ()
    ) -> None:
        self._known = known or {}
        self._template = template
        self._command = tuple(command)
        self._cache: dict[str, tuple[float, str | NotDelivered]] = {}  # by owner: valid until

    async def of(self, owner: str | None) -> str | NotDelivered:
        if owner is None:
            return _no_address("its owner is unknown")
        if owner in self._known:
            return self._known[owner]
        if not self._template and not self._command:
            return _no_address("no address of this owner is configured (notify.addresses)")
        if not OWNER.fullmatch(owner):
            return _no_address("the owner's name contains characters that are not used in an address")
        if self._template:
            return _checked(self._template.replace(TEMPLATE_FIELD, owner))
        return await self._looked_up(owner)

    async def _looked_up(self, owner: str) -> str | NotDelivered:
        now = asyncio.get_running_loop().time()
        cached = self._cache.get(owner)
        if cached is not None and now < cached[0]:
            return cached[1]
        found = await self._ask(owner)
        valid = FAILED_FOR if isinstance(found, NotDelivered) else FOUND_FOR
        self._cache.pop(owner, None)
        self._cache[owner] = (now + valid.total_seconds(), found)
        while len(self._cache) > CACHED:
            del self._cache[next(iter(self._cache))]
        return found

    async def _ask(self, owner: str) -> str | NotDelivered:
        program = self._command[0]
        untrusted = await asyncio.to_thread(why_untrusted, Path(program))
        if untrusted is not None:
            return NotDelivered(f"the address command was not run: {untrusted}")
        try:
            running = await _start([*self._command, owner])
        except OSError as error:
            return NotDelivered(f"the address command {program} cannot be started: {error.strerror or error}")
        try:
            async with asyncio.timeout(DEADLINE.total_seconds()):
                status, output = await _output(running)
        except TimeoutError:
            return NotDelivered(f"the address command {program} timed out after {in_words(DEADLINE)}", transient=True)
        finally:
            await _end(running)
        if status != 0:
            return _no_address(f"the address command {program} ended with {status}")
        return _checked(output.decode("utf-8", "replace").strip())


def _checked(address: str) -> str | NotDelivered:
    """What is refused is not repeated: it may contain anything."""
    if not address:
        return _no_address("the owner has no address")
    problem = problem_of_address(address)
    return address if problem is None else _no_address(f"the address of the owner is not valid: {problem}")


def _no_address(why: str) -> NotDelivered:
    return NotDelivered(why, recipient=True)


async def _start(words: Sequence[str]) -> Process:
    return await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": PATH},
        cwd="/",
        start_new_session=True,
    )


async def _output(running: Process) -> tuple[int, bytes]:
    """At most OUTPUT_MAX bytes; a program that writes more is ended by the caller."""
    assert running.stdout is not None
    output = b""
    while len(output) <= OUTPUT_MAX:
        some = await running.stdout.read(OUTPUT_MAX)
        if not some:
            return await running.wait(), output
        output += some
    return 0, b"\0"  # no address


async def _end(running: Process) -> None:
    """With its children."""
    if running.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        await running.wait()
