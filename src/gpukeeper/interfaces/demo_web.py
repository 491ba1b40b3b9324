"""`gpukeeper demo --web`: the dashboard of a simulated fleet, with the same daemon parts and the same web process
as `serve --web`; real files in a temporary directory. Time is compressed: a minute passes there in each second.

Begins with six hours that are simulated as fast as possible, in memory: files are written by threads, which cannot
keep up with virtual time. What was recorded in them is written to the files before time slows down to its pace.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from gpukeeper.backtest.comparison import compare
from gpukeeper.config.load import Loaded, load_text
from gpukeeper.config.sections import deciding_digest
from gpukeeper.engine.keeper import Keeper
from gpukeeper.engine.loop import Watch, watch
from gpukeeper.engine.ports import EvidenceStore, Ledger, UsageStore
from gpukeeper.interfaces.daemon.serve import LOOPBACK
from gpukeeper.interfaces.daemon.web import WebChild, WebProcess, listen
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.interfaces.link import Answer, Demo, Question
from gpukeeper.ledger.evidence import DirectoryEvidence, safe_name
from gpukeeper.ledger.files import usage_path
from gpukeeper.ledger.in_memory import InMemoryLedger, InMemorySignals
from gpukeeper.ledger.journal import SqliteLedger, open_ledger
from gpukeeper.ledger.logins import LoginKind, Logins, open_logins
from gpukeeper.ledger.meta import BacktestRecord, record_backtest
from gpukeeper.ledger.signals import open_signals
from gpukeeper.ledger.usage import open_usage
from gpukeeper.lifecycle.replay import GIVEN, grid
from gpukeeper.lifecycle.replay_outcome import Judging
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model import reading
from gpukeeper.model.decision import Evidence
from gpukeeper.model.policy import Policy
from gpukeeper.model.ports import Clock, Signals
from gpukeeper.model.series import Sample, UsageFold
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown
from gpukeeper.notify.messages import Messages
from gpukeeper.notify.terminals import InsideWorkload
from gpukeeper.platforms.simulated.adapter import SimulatedTerminal
from gpukeeper.platforms.simulated.demo import ShownMeter, ShownPlatform, owners_hold, recorded, shown_world
from gpukeeper.platforms.simulated.world import PacedLoop, World, run_virtually
from gpukeeper.processes import DIRECTORY, environment, module_command
from gpukeeper.traces.synthetic import SyntheticTrace
from gpukeeper.views.backtest import TraceFacts, record_of, report
from gpukeeper.wiring.demo import DEMO_POLICY
from gpukeeper.wiring.session import Session

PACE = 60.0
BEFORE = timedelta(hours=6)
HOLDING = 0.1  # share of the owners who hold their work after a warning
ADMIN, OWNER = "eve", "ann"
POLICY = f"""{DEMO_POLICY.replace("every: 15m", "every: 5m")}
admins: [{ADMIN}]
prices:
  currency: EUR
  per_gpu_hour: {{"NVIDIA H200": 3.2, "NVIDIA H100*": 2.4, "NVIDIA A100*": 1.6, "NVIDIA L40S": 1.1, "NVIDIA RTX*": 0.8}}
"""
HOST = "demo"


@dataclass
class FleetDemo:
    """Made in a PacedLoop. `session` is there after `prepare`."""

    directory: Path
    seed: int
    now: datetime
    loop: PacedLoop
    session: Session = field(init=False)
    _world: World = field(init=False)

    async def prepare(self) -> None:
        loaded = load_text(POLICY, "the demo's policy")
        self._world = shown_world(self.seed, self.loop, self.now - BEFORE)
        book, before, meter = Rulebook(loaded.policy), _Before(), ShownMeter(self._world)
        await self._play(_keeper(self._world, meter, before.ledger, before, before, before), book, BEFORE)
        path = self.directory / "ledger.db"
        ledger, signals = open_ledger(path, write=True), open_signals(path, write=True)
        hours, evidence = (
            open_usage(usage_path(path), write=True),
            DirectoryEvidence(self.directory / "evidence", 2**30),
        )
        weeks = recorded(self.seed, self.now - BEFORE)
        await ledger.append([*weeks.lines, *before.ledger.lines])
        await hours.record(weeks.usage)
        for fold in before.folds:
            await hours.record(fold)
        await signals.add(before.samples)
        self.loop.keep_pace(PACE)  # until now no time passed: nothing waited for a timer
        for ref, step, at, files in before.saved:
            await evidence.save(ref, step, at, files)
        keeper = _keeper(self._world, meter, ledger, signals, evidence, hours)
        messages = keeper.notifier
        assert isinstance(messages, Messages)
        self.session = Session(keeper, book, loaded, [], ledger, signals, evidence, ADMIN, messages, hours=hours)

    async def play(self, stop: asyncio.Event) -> None:
        """Until it is stopped."""
        session = self.session
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(session.keeper, lambda: session.book, stop)))
            holding = group.create_task(owners_hold(session.keeper, session.book, self._world, stop, HOLDING))
            clock = session.keeper.clock
            backtest = group.create_task(_backtest(session.ledger, clock, session.loaded))
            await stop.wait()
            holding.cancel()
            backtest.cancel()

    async def _play(self, keeper: Keeper, book: Rulebook, length: timedelta) -> None:
        stop = asyncio.Event()
        self.loop.call_later(length.total_seconds(), stop.set)
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(Watch(keeper, lambda: book, stop)))
            group.create_task(owners_hold(keeper, book, self._world, stop, HOLDING))


class _Before:
    """What is recorded in the hours before: ledger, signals, hours of GPUs, evidence; in memory, and as it came."""

    def __init__(self) -> None:
        self.ledger = InMemoryLedger()
        self.samples: list[Sample] = []
        self.folds: list[UsageFold] = []
        self.saved: list[tuple[Ref, str, datetime, Evidence]] = []
        self._signals = InMemorySignals()
        self.series = self._signals.series

    async def add(self, samples: Sequence[Sample]) -> None:
        self.samples += samples
        await self._signals.add(samples)

    async def record(self, found: UsageFold) -> None:
        self.folds.append(found)

    async def save(self, ref: Ref, step: str, at: datetime, evidence: Evidence) -> str | Unknown:
        self.saved.append((ref, step, at, evidence))
        return f"{at:%Y%m%d}/{safe_name(ref.name)}-{safe_name(step)}"

    async def load(self, name: str) -> Evidence | Unknown:
        return Unknown("not yet written")


def _keeper(
    world: World, meter: ShownMeter, ledger: Ledger, signals: Signals, evidence: EvidenceStore, usage: UsageStore
) -> Keeper:
    platforms = tuple(ShownPlatform(world, place) for place in world.places)
    return Keeper(
        platforms=platforms,
        ledger=ledger,
        signals=signals,
        evidence=evidence,
        notifier=Messages((InsideWorkload(platforms), SimulatedTerminal(world))),
        clock=world.clock,
        meter=meter,
        usage=usage,
        host=HOST,
    )


LINK = timedelta(days=1)  # it is redeemed at once


def serve_demo(port: int, seed: int, log: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM."""
    with ExitStack() as stack:
        listener = stack.enter_context(listen(Endpoint(port, LOOPBACK, "--web")))
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="gpukeeper-demo-")))
        loop = PacedLoop()
        fleet = FleetDemo(directory, seed, datetime.now(UTC), loop)
        run_virtually(_serve(fleet, listener, log), loop)


async def _serve(fleet: FleetDemo, listener: socket.socket, log: Callable[[str], None]) -> None:
    log("Simulating the last hours of the fleet, a few seconds …")
    await fleet.prepare()
    stop, session = asyncio.Event(), fleet.session
    for number in (signal.SIGTERM, signal.SIGINT):
        fleet.loop.add_signal_handler(number, stop.set)
    session.keeper.request_state.enabled = True
    with closing(session), closing(open_logins(session.ledger.path)) as logins:
        web = DemoWeb(session, logins, listener, log)
        with closing(web):
            async with WebChild(web, listener, log).kept_running():
                _print_links(web, f"http://localhost:{listener.getsockname()[1]}", log)
                await fleet.play(stop)


def _print_links(web: DemoWeb, url: str, log: Callable[[str], None]) -> None:
    log(f"The dashboard on {url}/ shows a simulated fleet. One minute passes there in each second.")
    for who, path in web.links:
        log(f"  log in as {who}: {url}{path}")
    log("Nothing on this machine is changed. Press Ctrl-C to stop.")


class DemoWeb(WebProcess):
    """Visitors log in as one of two people of the simulation, as often as they want."""

    no_metrics = (
        "the demo has no metrics. On a machine they are here, and with `serve --metrics` on a port of their own"
    )

    def __init__(self, session: Session, logins: Logins, listener: socket.socket, log: Callable[[str], None]) -> None:
        super().__init__(session, logins, listener, log)
        self._people = {secrets.token_urlsafe(16): person for person in (OWNER, ADMIN)}
        self.demo = Demo(began=session.keeper.clock.now(), real=datetime.now(UTC), pace=PACE, logins=tuple(self.links))

    @property
    def links(self) -> list[tuple[str, str]]:
        what = {OWNER: "a user", ADMIN: "an admin"}
        return [(f"{person}, {what[person]}", f"/login/{secret}") for secret, person in self._people.items()]

    async def answer(self, question: Question) -> Answer:
        person = self._people.get(question.request.token)
        if question.request.verb == "redeem" and person is not None:
            now = self._session.keeper.clock.now()
            made = await self._logins.create(LoginKind.LINK, person, None, now, LINK)
            request = msgspec.structs.replace(question.request, token=made.secret)
            question = msgspec.structs.replace(question, request=request)
        return await super().answer(question)


# A backtest for its dashboard: a synthetic trace under its policy and other idle limits, in a process of its own with
# low priority, so that the demo starts as soon as without it.
SEED, WORKLOADS, DAYS = 7, 48, 14
HOURS = (1, 2, 5, 12)
NICE = 10
CHILD = module_command("gpukeeper.interfaces.demo_web")


async def _backtest(ledger: SqliteLedger, clock: Clock, loaded: Loaded) -> None:
    """Cancelled: its process is ended, and nothing is recorded."""
    child = _start(POLICY)
    try:
        found, _ = await asyncio.to_thread(child.communicate)
    finally:
        child.kill()
    if child.returncode == 0:
        record = reading.decode(found, BacktestRecord)
        record = msgspec.structs.replace(record, at=clock.now())  # the demo has a time of its own
        await record_backtest(ledger, deciding_digest(loaded.policy), record)


def _start(text: str) -> subprocess.Popen[bytes]:
    """`text`: of the policy."""
    none, out = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen([*CHILD, text], stdin=none, stdout=out, stderr=none, env=environment(), cwd=DIRECTORY)


def computed(policy: Policy, workloads: int = WORKLOADS, hours: tuple[int, ...] = HOURS) -> BacktestRecord:
    trace = SyntheticTrace(SEED, workloads, DAYS)
    judging = Judging(threshold=policy.activity.gpu, slice_threshold=policy.activity.gpu_slice)
    variants = (GIVEN, *grid([timedelta(hours=one) for one in hours], ()))
    judged = compare(trace, policy, variants, judging)
    facts = TraceFacts(
        source=trace.source,
        begin=trace.begin,
        end=trace.end,
        runs=len(judged[GIVEN]),
        rows=trace.rows,
        bad_rows=0,
        bad=(),
        not_recorded=(),
    )
    return record_of(report("", policy.digest, facts, judging, judged), datetime.now(UTC))


if __name__ == "__main__":
    os.nice(NICE)
    sys.stdout.buffer.write(msgspec.json.encode(computed(load_text(sys.argv[1], "the demo's policy").policy)))
