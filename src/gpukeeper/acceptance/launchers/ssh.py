"""Runs over a list of hosts, through OpenSSH. What runs there, and its deadline, is up to host_program.py.

A host that does not reply is GONE with ssh's own words; the others are reported as usual. One that did not reply before
the start is left out. Checks before a run: what each host has, and whether all reach the first one; they leave nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from time import time
from typing import Any

import msgspec

from gpukeeper.acceptance.fleet.launcher import (
    NodeStatus,
    Phase,
    Removal,
    RunSpec,
    RunSummary,
    Target,
    command,
    environment,
    group_environment,
)
from gpukeeper.acceptance.launchers import host_checks_program, host_program
from gpukeeper.clients import ssh
from gpukeeper.clients.ssh import Host, HostError, Program, Settings, selected_hosts
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words


class SshClient(ssh.SshClient):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Program.of(host_program.__file__, host_program.MARK))


REACH_S = 20.0  # until the first host listens; its connection may take longer than that of the others
LISTEN_S, LISTEN_MAX_S, EACH_S = 40.0, 80.0, 0.5


class HostReply(msgspec.Struct, frozen=True):
    """Of one host, as it reports it. None: not known."""

    python: str
    folder: str
    time: float
    gpus: int
    driver: str
    program: str | None
    version: str
    broken: str
    shm: int | None
    free: int | None
    refused: str


class MetReply(msgspec.Struct, frozen=True):
    problem: str


async def host_facts(client: SshClient, host: Host, program: str) -> tuple[HostReply, float] | HostError:
    """And by how many seconds its clock differs at least: what the request itself took is not known better."""
    before = time()
    try:
        found = await client.request(host, HostReply, "checks", check="facts", program=program, source=checks_source())
    except HostError as error:
        return error
    after = time()
    return found, found.time - after if found.time > after else min(0.0, found.time - before)


async def unmet(client: SshClient, hosts: Sequence[Host], master: str, port: int) -> dict[str, str]:
    """By host: why it does not reach the first one at `master`. The first one itself: why it cannot listen. Empty: all
    meet."""
    first, *others = hosts
    if not others:
        return {}
    given = {"source": checks_source(), "token": secrets.token_hex(8), "port": port}
    listening = asyncio.create_task(_asked(client, first, check="listen", **given, **_patience(len(others))))
    reaching = [
        asyncio.create_task(_asked(client, one, check="reach", **given, address=master, within_s=REACH_S))
        for one in others
    ]
    try:
        done = asyncio.gather(*reaching)
        first_of: set[asyncio.Future[Any]] = {done, listening}
        await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
        if listening.done() and (problem := listening.result()):
            return {first.node: problem}
        found = dict(zip((one.node for one in others), await done, strict=True))
    finally:
        for task in (listening, *reaching):
            task.cancel()
        await asyncio.gather(listening, *reaching, return_exceptions=True)
    return {node: problem for node, problem in found.items() if problem}


def _patience(peers: int) -> dict[str, float]:
    return {"peers": peers, "within_s": min(LISTEN_MAX_S, LISTEN_S + EACH_S * peers)}


async def _asked(client: SshClient, host: Host, **what: object) -> str:
    try:
        return (await client.request(host, MetReply, "checks", **what)).problem
    except HostError as error:
        return str(error)


def checks_source() -> str:
    return Path(host_checks_program.__file__).read_text(encoding="utf-8")


LOG_MAX = 64 * 1024 * 1024  # bytes; a program that writes more is ended
RETENTION = timedelta(days=7)  # of a run that ended and that nobody removed
LOST = "its processes are gone and left no exit code: the host was restarted, or they were killed"
NOT_STARTED = "its start was interrupted; start the run again, or remove it"


class HostRequest(msgspec.Struct, frozen=True):
    """What the host was asked to run, as far as it is needed again."""

    deadline_s: float
    nodes: list[str]


class HostState(msgspec.Struct, frozen=True):
    """A run on one host, as the host program reports it."""

    run: str
    node: str
    state: str  # created, running, ended, vanished
    why: str = ""
    exit_code: int | None = None
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    request: HostRequest | None = None
    spec: msgspec.Raw = msgspec.Raw(b"null")
    verdict: str = ""
    folder: str = ""


class FactsReply(msgspec.Struct, frozen=True):
    gpus: int
    program: str | None
    root: str


class StateReply(msgspec.Struct, frozen=True):
    state: HostState | None


class ListReply(msgspec.Struct, frozen=True):
    states: list[HostState]


class OutputReply(msgspec.Struct, frozen=True):
    token: str | None
    offset: int = 0


class RemoveReply(msgspec.Struct, frozen=True):
    removed: str | None
    left: list[str]


class SshLauncher:
    """`known`: the list of hosts; empty: the names in `spec.nodes` are hosts. `program`: gpukeeper on the hosts."""

    engine = "ssh"

    def __init__(
        self,
        client: SshClient,
        known: Sequence[Host] = (),
        *,
        program: str = "gpukeeper",
        master: str = "",
        retention: timedelta = RETENTION,
    ) -> None:
        self._client, self._program, self._master, self._retention = client, program, master, retention
        self._known = tuple(known)
        self._named: dict[str, Host] = {one.node: one for one in known}
        self._left_out: dict[str, frozenset[str]] = {}  # by run: what did not reply before its start
        self._read: dict[tuple[str, str], tuple[str, bytearray]] = {}  # what was read of a log, and of which start

    async def targets(self, spec: RunSpec) -> tuple[Target, ...]:
        hosts = self._hosts(spec)
        given = {"check": "look", "source": checks_source(), "program": self._program}
        found = await self._all(hosts, lambda host: self._client.request(host, FactsReply, "checks", **given))
        silent = frozenset(host.node for host, facts in found.items() if isinstance(facts, HostError))
        self._left_out[spec.run] = silent
        return tuple(self._target(host, found[host]) for host in hosts)

    def _target(self, host: Host, facts: FactsReply | HostError) -> Target:
        if isinstance(facts, HostError):
            return Target(node=host.node, excluded=str(facts))
        if facts.program is None:
            why = f"{self._program} is not on the PATH of {host.node}; name it with --option program=PATH"
            return Target(node=host.node, gpus=facts.gpus, excluded=why)
        return Target(node=host.node, gpus=facts.gpus)

    def render(self, spec: RunSpec, targets: Sequence[Target]) -> str:
        self._hosts(spec)
        parts = [f"# Each host: {shlex.join(self._client.command(Host('HOST', 'HOST')))}"]
        started = [one.node for one in targets if not one.excluded]
        for target in targets:
            if target.excluded:
                parts.append(f"# {target.node} is left out: {target.excluded}")
                continue
            given = [
                f"{name}={shlex.quote(value)}" for name, value in self._variables(spec, target.node, started).items()
            ]
            parts.append(
                f"# {target.node}, in gpukeeper-runs/{spec.run}/{target.node}, for {spec.deadline_s:.0f} s at most"
            )
            parts.append(" ".join([*given, shlex.join(self._command(spec))]))
        return "\n".join(parts) + "\n"

    async def start(self, spec: RunSpec, targets: Sequence[Target]) -> None:
        """A host that does not reply stops no other; its status reports it."""
        self._hosts(spec)
        started = [one.node for one in targets if not one.excluded]
        nodes = [one.node for one in targets]
        if spec.together and started:
            await self._must_meet(spec, started)

        async def one(host: Host) -> StateReply:
            return await self._client.request(
                host,
                StateReply,
                "start",
                run=spec.run,
                node=host.node,
                spec=spec,
                command=self._command(spec),
                environment=self._variables(spec, host.node, started),
                deadline_s=spec.deadline_s,
                retention_s=self._retention.total_seconds(),
                log_most=LOG_MAX,
                nodes=nodes,
            )

        found = await self._all([self._named[node] for node in started], one)
        _require_a_reply(found)

    async def _must_meet(self, spec: RunSpec, started: Sequence[str]) -> None:
        """Before the start: nodes that do not meet would wait for each other until the rendezvous ends. A run that has
        been started already uses the port itself."""
        hosts = [self._named[node] for node in started]
        states = await self._all(
            hosts, lambda host: self._client.request(host, StateReply, "status", run=spec.run, node=host.node)
        )
        if any(isinstance(one, StateReply) and one.state is not None for one in states.values()):
            return
        problems = await unmet(self._client, hosts, self._meeting(started), spec.port)
        if problems:
            words = "; ".join(f"{node}: {problem}" for node, problem in problems.items())
            raise PlatformError(
                f"the hosts do not meet at {self._meeting(started)} port {spec.port}, so nothing was started. {words}. "
                "Name an address of the first host that all others reach with --option master=ADDRESS, or leave a host "
                "out with --nodes"
            )

    def _meeting(self, started: Sequence[str]) -> str:
        return self._master or self._named[started[0]].address

    async def runs(self) -> tuple[RunSummary, ...] | Unknown:
        """Hosts that do not reply are in the runs that they are part of; if no other host has a run: Unknown."""
        found = await self._states()
        silent = {host: reply for host, reply in found.items() if isinstance(reply, HostError)}
        names = dict.fromkeys(
            state.run for reply in found.values() if isinstance(reply, ListReply) for state in reply.states
        )
        summaries = [one for name in names if (one := self._summary(name, found)) is not None]
        if silent and not summaries:
            return Unknown("; ".join(str(error) for error in silent.values()))
        return tuple(summaries)

    async def run(self, run: str) -> RunSummary | None:
        found = await self._states(run)
        summary = self._summary(run, found)
        silent = [str(reply) for reply in found.values() if isinstance(reply, HostError)]
        if summary is None and silent:
            raise PlatformError(
                f"nothing is known of run {run}: {'; '.join(silent)}. The other hosts have nothing of it."
            )
        return summary

    async def output(self, spec: RunSpec, node: str) -> bytes | Unknown:
        """Only what is new is read. A connection that breaks loses nothing: the next call reads on."""
        host = self._hosts_of_run(spec).get(node)
        if host is None:
            return Unknown(f"{node} is not in the list of hosts")
        token, had = self._read.get((spec.run, node), ("", bytearray()))
        try:
            reply, body = await self._client.request_bytes(
                host, OutputReply, "output", run=spec.run, node=node, offset=len(had), token=token, most=LOG_MAX
            )
        except HostError as error:
            return Unknown(str(error))
        if reply.token is None:
            return Unknown(f"{node} has no log of run {spec.run}")
        kept = had[: reply.offset] + body
        self._read[spec.run, node] = reply.token, kept
        return bytes(kept)

    async def remove(self, run: str) -> Removal:
        async def one(host: Host) -> RemoveReply:
            return await self._client.request(host, RemoveReply, "remove", run=run, node=host.node)

        found = await self._all(self._hosts_with(run), one)
        _require_a_reply(found)
        removed, left = [], []
        for host, reply in found.items():
            if isinstance(reply, HostError):
                left.append(
                    (f"{host.node}:gpukeeper-runs/{run}", f"it is not known whether something is left: {reply}")
                )
            elif reply.left:
                left.append((f"{host.node}:{run}", f"still there after it was removed: {', '.join(reply.left)}"))
            elif reply.removed:
                removed.append(f"{host.node}:{reply.removed}")
            self._read.pop((run, host.node), None)
        return Removal(removed=tuple(removed), left=tuple(left))

    async def close(self) -> None:
        await self._client.close()

    async def _states(self, run: str = "") -> dict[Host, ListReply | HostError]:
        if not self._named:
            raise UsageError("no host is named; add --nodes HOST,HOST or --option hosts=FILE")
        found = await self._all(self._hosts_with(run), lambda host: self._client.request(host, ListReply, "listed"))
        _require_a_reply(found)
        return found

    def _hosts_with(self, run: str) -> tuple[Host, ...]:
        """Those that may have something of this run."""
        left_out = self._left_out.get(run, frozenset())
        return tuple(one for one in self._named.values() if one.node not in left_out)

    def _summary(self, run: str, found: Mapping[Host, ListReply | HostError]) -> RunSummary | None:
        states = {
            host.node: state
            for host, reply in found.items()
            if isinstance(reply, ListReply)
            for state in reply.states
            if state.run == run and state.node == host.node
        }
        specs = [spec for state in states.values() if (spec := _spec(state)) is not None]
        if not specs:
            return None
        errors = {host.node: reply for host, reply in found.items() if isinstance(reply, HostError)}
        nodes = dict.fromkeys(node for state in states.values() if state.request for node in state.request.nodes)
        statuses = [self._status(node, states.get(node), errors.get(node)) for node in {**nodes, **states}]
        objects = tuple(f"{node}:{state.folder}" for node, state in states.items())
        return RunSummary(spec=specs[0], nodes=tuple(statuses), objects=objects)

    def _status(self, node: str, state: HostState | None, error: HostError | None) -> NodeStatus:
        if error is not None:
            return NodeStatus(node=node, phase=Phase.GONE, code=error.code, reason=str(error))
        if state is not None:
            return status_of(state, self._program)
        if node not in self._named:
            why = f"{node} is part of the run, but not of the list of hosts of this command"
            return NodeStatus(node=node, phase=Phase.GONE, code="unreachable", reason=why)
        return NodeStatus(node=node, phase=Phase.GONE, code="vanished", reason=f"{node} has nothing of this run")

    def _hosts(self, spec: RunSpec) -> tuple[Host, ...]:
        if spec.selector:
            raise UsageError("hosts have no labels; name them: --nodes HOST,HOST or --option hosts=FILE")
        if not spec.nodes and not self._known:
            raise UsageError("no host is named; add --nodes HOST,HOST or --option hosts=FILE")
        hosts = selected_hosts(self._known, spec.nodes)
        self._named |= {one.node: one for one in hosts}
        return hosts

    def _hosts_of_run(self, spec: RunSpec) -> Mapping[str, Host]:
        if spec.nodes and not self._known:
            self._hosts(spec)
        return self._named

    def _command(self, spec: RunSpec) -> list[str]:
        _, *rest = command(spec)
        return [self._program, *rest]

    def _variables(self, spec: RunSpec, node: str, started: Sequence[str]) -> dict[str, str]:
        group = group_environment(spec, started.index(node), len(started), self._meeting(started))
        return {**environment(spec, node), **group}

    async def _all(self, hosts: Sequence[Host], request: Any) -> dict[Host, Any]:
        """Of each host its reply, or the error; the order of the hosts."""

        async def one(host: Host) -> Any:
            try:
                return await request(host)
            except HostError as error:
                return error

        return dict(zip(hosts, await asyncio.gather(*(one(host) for host in hosts)), strict=True))


def status_of(state: HostState, program: str) -> NodeStatus:
    phase, code, reason = Phase.RUNNING, "", ""
    if state.state == "ended":
        phase, code, reason = Phase.ENDED, state.why, _ending(state, program)
    elif state.state == "vanished":
        phase, code, reason = Phase.GONE, "vanished", LOST
    elif state.state == "created":
        phase, code, reason = Phase.GONE, "vanished", NOT_STARTED
    return NodeStatus(
        node=state.node,
        phase=phase,
        code=code,
        reason=reason,
        exit_code=state.exit_code,
        message=state.verdict,
        since=moment_of(state.ended or state.started or state.created),
    )


def _ending(state: HostState, program: str) -> str:
    if state.why == "deadline" and state.request is not None:
        deadline = timedelta(seconds=state.request.deadline_s)
        return f"it reached its deadline of {in_words(deadline)} and was ended"
    if state.why == "command":
        return f"{program} is not there, or may not be executed; name it with --option program=PATH"
    return {"stopped": "it was stopped on request", "log": "it wrote more than 64 MiB and was ended"}.get(state.why, "")


def moment_of(seconds: float | None) -> datetime | None:
    try:
        return None if seconds is None else reading.instant(seconds)
    except ValueError:
        return None


def _spec(state: HostState) -> RunSpec | None:
    try:
        return reading.decode(state.spec, type=RunSpec)
    except msgspec.DecodeError:
        return None


def _require_a_reply(found: Mapping[Host, object]) -> None:
    """None did it: the engine does not reply."""
    errors = [reply for reply in found.values() if isinstance(reply, HostError)]
    if errors and len(errors) == len(found):
        words = "no host replied" if {one.code for one in errors} == {"unreachable"} else "no host carried it out"
        raise PlatformError(f"{words}: {'; '.join(str(one) for one in errors)}")
