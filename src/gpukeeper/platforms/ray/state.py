"""What a Ray cluster reports about itself: the state API of its dashboard, over HTTP, where its own processes reach
it. Reads only; Ray is not needed here. Incomplete responses are not used: what was cut off, or misses a node, is
Unknown. An address counts for a session only if it reports that session, before and after. A token is sent only to
the address that the policy names. A dashboard usually listens on 127.0.0.1 of its own network namespace; the thread
that connects enters it, and ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from gpukeeper import http_client
from gpukeeper.blocking import in_thread
from gpukeeper.model import reading
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.ray.busy import (
    OVER_ACTOR,
    OVER_GROUP,
    OVER_JOB,
    OVER_TASK,
    ClusterState,
    Job,
    PlacementGroup,
    RayActor,
    RayNode,
    Rows,
    Task,
    Worker,
    busy,
    without,
)
from gpukeeper.platforms.ray.nodes import Process, Raylet, flags_of, is_still

DEADLINE: Final = timedelta(seconds=10)
LIMIT: Final = 10_000  # more is refused
SIZE_MAX: Final = 64 * 1024 * 1024
LOOPBACK: Final = frozenset(("127.0.0.1", "localhost", "[::1]", "::1"))
PORT: Final = 8265  # the dashboard's, unless configured otherwise
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # Ray's own names
_WEBUI = re.compile(r"(?:^|\s)--webui=(\S+)")

T = TypeVar("T")
Filter: TypeAlias = tuple[str, str, str]


class Version(msgspec.Struct, frozen=True):
    ray: str = msgspec.field(name="ray_version")
    session: str | None = msgspec.field(name="session_name", default=None)


class StateApi:
    def __init__(
        self,
        address: str,
        token: str | None = None,
        *,
        deadline: timedelta = DEADLINE,
        enter: Callable[[], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`address` as http://host:port; the default scheme is http. `enter` enters its network namespace."""
        self.address, self._token, self._deadline = _url(address), token, deadline
        self._enter, self._tls = enter, tls

    async def version(self) -> Version | Unknown:
        return await self._get("/api/version", Version)

    async def rows(self, kind: str, row: type[T]) -> Rows[T]:
        """Every row of one kind that has not ended; nodes: all."""
        return await self._all(kind, row)

    async def answers(self, session: str) -> ClusterState:
        """Everything that shows what runs, of that session. The order matters, for Ray gives no snapshot: a driver may
        create a lasting actor and end between two requests, so what starts something is requested before what it
        starts. And a job exists before its driver, so that a driver without a job is Ray's own.
        """
        workers = await self._all("workers", Worker)
        jobs = await self._jobs_of(workers, await self._all("jobs", Job))
        tasks = await self._all("tasks", Task)
        groups = await self._all("placement_groups", PlacementGroup)
        actors = await self._all("actors", RayActor)
        nodes = await self._all("nodes", RayNode)
        stranger = self._mismatch(await self.version(), session)
        if stranger is not None:
            return ClusterState(
                nodes=stranger, workers=stranger, actors=stranger, tasks=stranger, groups=stranger, jobs=stranger
            )
        return ClusterState(nodes=nodes, workers=workers, actors=actors, tasks=tasks, groups=groups, jobs=jobs)

    def _mismatch(self, version: Version | Unknown, session: str) -> Unknown | None:
        if isinstance(version, Unknown):
            return version
        if version.session == session:
            return None
        return Unknown(
            f"Ray at {self.address} is {_first(version.session or 'a session without a name')}, not {session}"
        )

    async def _jobs_of(self, workers: Rows[Worker], jobs: Rows[Job]) -> Rows[Job]:
        """With the jobs that have ended although a driver of theirs is alive."""
        if isinstance(workers, Unknown) or isinstance(jobs, Unknown):
            return jobs
        found = list(jobs)
        for job_id in sorted({driver.job_id for driver in workers if driver.drives} - {job.job_id for job in jobs}):
            page = await self._page("jobs", Job, (("job_id", "=", job_id),))
            if isinstance(page, Unknown):
                return page
            found += page.result
        return tuple(found)

    async def _all(self, kind: str, row: type[T]) -> Rows[T]:
        """Every row that has not ended. Ray's own source returns a limited number of rows, ended or not; then by
        state.
        """
        first = await self._page(kind, row, _FIRST.get(kind, ()))
        if isinstance(first, Unknown) or not first.cut:
            return first if isinstance(first, Unknown) else first.result
        if kind not in _NARROWER:
            return self._cut(kind, first)
        # The first response shows the maximum of the source; for tasks that number has another meaning.
        most = LIMIT if kind == "tasks" else min(LIMIT, first.num_after_truncation)
        rows: list[T] = list(first.result)
        for one in _NARROWER[kind]:
            page = await self._page(kind, row, (one,))
            if isinstance(page, Unknown):
                return page
            if len(page.result) >= most:
                return self._cut(kind, page)
            rows += page.result
        return tuple({msgspec.json.encode(row): row for row in rows}.values())  # rows with resources have no hash

    def _cut(self, kind: str, page: _Page[T]) -> Unknown:
        what = f"{len(page.result)} of {page.total} {kind.replace('_', ' ')}"
        return Unknown(f"Ray at {self.address} returned {what} only; the others may run anything")

    async def _page(self, kind: str, row: type[T], filters: Sequence[Filter]) -> _Page[T] | Unknown:
        parameters: list[tuple[str, str | int]] = [("detail", 1), ("limit", LIMIT)]
        parameters.append(("timeout", max(1, int(self._deadline.total_seconds()))))
        for key, predicate, value in filters:
            parameters += [("filter_keys", key), ("filter_predicates", predicate), ("filter_values", value)]
        answer = await self._get(f"/api/v0/{kind}?{urlencode(parameters)}", _StateResponse[row])  # type: ignore[valid-type]
        if isinstance(answer, Unknown):
            return answer
        if not answer.result or answer.data.result is None:
            return Unknown(f"Ray at {self.address} could not list its {kind.replace('_', ' ')}: {_first(answer.msg)}")
        page = answer.data.result
        if complaint := page.partial_failure_warning or "".join(page.warnings or ()):
            return Unknown(f"Ray at {self.address} listed only a part of its {kind}: {_first(complaint)}")
        return page

    async def _get(self, path: str, kind: type[T]) -> T | Unknown:
        try:
            async with asyncio.timeout(self._deadline.total_seconds()):
                body = await self._download(path)
                return await in_thread(lambda: reading.decode(body, type=kind, strict=False), self._deadline)
        except TimeoutError:
            return Unknown(f"Ray at {self.address} did not answer within {in_words(self._deadline)}")
        except msgspec.MsgspecError as error:
            return Unknown(
                f"the response of Ray at {self.address} to {path.partition('?')[0]} could not be read: {error}"
            )
        except (ValueError, http_client.HttpError) as error:
            return Unknown(f"Ray at {self.address} could not be queried: {error}")

    async def _download(self, path: str) -> bytes:
        if urlsplit(self.address).scheme not in {"http", "https"}:
            raise ValueError("not a valid dashboard address; write it like http://head:8265")
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        answer = await http_client.get(
            self.address + path, headers=headers, size_max=SIZE_MAX, enter=self._enter, tls=self._tls, purpose="ray"
        )
        if answer.status >= 300:
            raise ValueError(refusal(answer))
        return answer.body


def addresses(raylet: Sequence[str]) -> list[str]:
    """Where the dashboard may be, most likely first, from the arguments of a raylet.

    Every raylet of 2.40 to 2.60 has the address in the command that it starts workers with. No file has it.
    """
    values = [match[1] for part in raylet if (match := _WEBUI.search(part))]
    hosts = [part.partition("=")[2].rpartition(":")[0] for part in raylet if part.startswith("--gcs-address=")]
    known = [one for one in values if re.fullmatch(r"\S+:\d+", one)]
    guesses = [f"{host}:{PORT}" for host in (*hosts, "127.0.0.1") if host]
    return list(dict.fromkeys(_url(one) for one in known + guesses))


def why_out_of_reach(raylet: Sequence[str]) -> str | None:
    """For a node on another machine than the head, if the dashboard listens only on the head's own machine (the default
    of `ray start --head`): what to change.
    """
    value = next((match[1] for part in raylet if (match := _WEBUI.search(part))), "")
    flags = flags_of(raylet)
    head, own = flags.get("gcs_address", "").rpartition(":")[0], flags.get("node_ip_address", "")
    host = value.rpartition(":")[0]
    if not head or not own or head == own or host not in LOOPBACK:
        return None
    return (
        f"the dashboard of its cluster listens only on {host} of the head ({head}), which other machines "
        "cannot reach. Start the head with ray start --head --dashboard-host=0.0.0.0 (anyone who reaches that "
        "port can run programs on the cluster, so keep it behind a firewall), or set ray.dashboard in the "
        "policy to an address that this machine reaches"
    )


def read_token(environ: Mapping[str, str], home: Path) -> str | Unknown | None:
    """As Ray itself finds it, since 2.52; None: there is none."""
    if given := environ.get(TOKEN, "").strip():
        return _checked(given, TOKEN)
    named = environ.get(TOKEN_PATH)
    path = Path(named) if named else home / ".ray" / "auth_token"
    try:
        kept = path.read_text().strip()
    except FileNotFoundError:
        return Unknown(f"{TOKEN_PATH} names {path}, which does not exist") if named else None
    except (OSError, UnicodeDecodeError) as error:
        return Unknown(f"Ray's token in {path} could not be read: {error}")
    return _checked(kept, str(path)) if kept else None


def _checked(token: str, source: str) -> str | Unknown:
    """Before it is sent: no message repeats an invalid one."""
    if all("!" <= letter <= "~" for letter in token):
        return token
    return Unknown(f"the token in {source} contains invalid characters")


def _states(key: str, over: Iterable[str]) -> tuple[Filter, ...]:
    return tuple((key, "!=", state) for state in over)


# Filtered by the dashboard after it got everything from its source, so that `total` still shows whether that was all.
# "true" is on purpose: the source already understands "True", and its total then counts what it dropped.
_FIRST: Final[Mapping[str, tuple[Filter, ...]]] = {
    "workers": (("is_alive", "=", "true"),),
    "actors": _states("state", OVER_ACTOR),
    "tasks": _states("state", OVER_TASK),
    "placement_groups": _states("state", OVER_GROUP),
    "jobs": _states("status", OVER_JOB),
}
# Filtered by the source itself, which then reads all it has. From what starts to what ends, as in `answers`.
# For tasks a response is never certainly complete (a cluster that once dropped events reports that forever): those that
# run.
_NARROWER: Final[Mapping[str, tuple[Filter, ...]]] = {
    "workers": (("is_alive", "=", "True"),),
    "actors": tuple(
        ("state", "=", state)
        for state in ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING", "ALIVE", "RESTARTING")
    ),
    "tasks": tuple(("state", "=", state) for state in ("RUNNING", "RUNNING_IN_RAY_GET", "RUNNING_IN_RAY_WAIT")),
}


class _Page(msgspec.Struct, Generic[T], frozen=True):
    result: tuple[T, ...]
    total: int
    num_after_truncation: int  # returned by the source of the dashboard
    num_filtered: int  # matching the filters, before the limit
    partial_failure_warning: str | None = None
    warnings: tuple[str, ...] | None = None

    @property
    def cut(self) -> bool:
        return len(self.result) < self.num_filtered or self.num_after_truncation < self.total


class _Data(msgspec.Struct, Generic[T], frozen=True):
    result: _Page[T] | None


class _StateResponse(msgspec.Struct, Generic[T], frozen=True):
    result: bool
    msg: str
    data: _Data[T]


def _url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def refusal(answer: http_client.Response) -> str:
    if answer.status == HTTPStatus.UNAUTHORIZED:
        return (
            f"it requires a token; set it in {TOKEN} or {TOKEN_PATH}, and set the address in the policy: "
            "ray.dashboard (the token is sent to no other address)"
        )
    if answer.status == HTTPStatus.FORBIDDEN:
        return f"it refused the token; check {TOKEN}, {TOKEN_PATH} or ~/.ray/auth_token"
    try:
        message = reading.decode(answer.body, type=_Words).msg
    except msgspec.MsgspecError:
        message = ""
    return f"it answered {answer.status} {_first(message) or answer.reason}"


class _Words(msgspec.Struct, frozen=True):
    msg: str = ""


def _first(words: str) -> str:
    """Ray's messages may contain a traceback."""
    line = next((line.strip() for line in words.split("\n") if line.strip()), "")
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


DASHBOARDS_AT_ONCE = 16  # requests
OWN_JOB = "GPUKEEPER_RAY_JOB"  # set by a task that runs gpukeeper: the job it is part of does not count as work
_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Dashboard(msgspec.Struct, frozen=True):
    """One that reports its session itself."""

    session: str
    version: str
    api: StateApi


class DashboardQueries:
    """One round of queries: each session is queried once, however many of its raylets are here."""

    def __init__(
        self,
        setting: str | None,
        environ: Mapping[str, str],
        deadline: timedelta = DEADLINE,
        proc: str = "/proc",
    ) -> None:
        self._setting, self._environ, self._deadline, self._proc = setting, environ, deadline, proc
        self._known: dict[tuple[str, str], Dashboard | Unknown] = {}
        self._answers: dict[str, ClusterState] = {}

    async def busy(self, raylets: Iterable[Raylet]) -> str | Unknown | None:
        """What runs on the Ray nodes of these raylets; None only if Ray reports each of them as idle."""
        states = [await self._busy(one) for one in raylets]
        words = next((one for one in states if isinstance(one, str)), None)
        return words or next((one for one in states if isinstance(one, Unknown)), None)

    async def find(self, raylets: Iterable[Raylet]) -> None:
        """Their dashboards, some at the same time: one that does not answer delays no other."""
        limit = asyncio.Semaphore(DASHBOARDS_AT_ONCE)

        async def one(raylet: Raylet) -> None:
            async with limit:
                await self.dashboard(raylet)

        some = {(raylet.session_name, _network(raylet.process, self._proc)): raylet for raylet in raylets}
        await asyncio.gather(*(one(raylet) for raylet in some.values()))

    async def dashboard(self, raylet: Raylet) -> Dashboard | Unknown:
        network = _network(raylet.process, self._proc)
        key = raylet.session_name, network or ""
        if key not in self._known:
            self._known[key] = await self._find(raylet, network)
        return self._known[key]

    def answered(self) -> dict[str, Dashboard]:
        """By session, those that answered so far."""
        return {session: one for (session, _), one in self._known.items() if isinstance(one, Dashboard)}

    async def _busy(self, raylet: Raylet) -> str | Unknown | None:
        found = await self.dashboard(raylet)
        if isinstance(found, Unknown):
            return found
        if found.session not in self._answers:
            self._answers[found.session] = await found.api.answers(found.session)  # which requests its name once more
        state, ours = self._answers[found.session], self._environ.get(OWN_JOB)
        return busy(raylet.node_id, state if ours is None else without(ours, state))

    async def _find(self, raylet: Raylet, network: str | None) -> Dashboard | Unknown:
        whys: list[str] = []
        for api in self._apis(raylet, network):
            version = await api.version()
            if isinstance(version, Unknown):
                whys.append(version.why)
            elif version.session != raylet.session_name:
                whys.append(f"Ray at {api.address} belongs to another session, {version.session}")
            else:
                return Dashboard(raylet.session_name, version.ray, api)
        advice = why_out_of_reach(raylet.process.argv)
        if advice is not None and not self._setting:
            return Unknown(advice)
        return Unknown("; ".join(dict.fromkeys(whys)))

    def _apis(self, raylet: Raylet, network: str | None) -> Iterable[StateApi]:
        if self._setting:
            token = read_token(self._environ, Path(self._environ.get("HOME", "/")))
            yield StateApi(self._setting, token if isinstance(token, str) else None, deadline=self._deadline)
        for address in addresses(raylet.process.argv):
            if network is None:
                yield StateApi(address, deadline=self._deadline)
            else:
                inside = partial(enter_network, raylet.process, self._proc)
                yield StateApi(address, deadline=self._deadline, enter=inside)


def enter_network(process: Process, proc: str = "/proc") -> None:
    """Only this thread enters the network namespace of that process. OSError if it may not, or the process ended."""
    fd = os.open(f"{proc}/{process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not is_still(process.pid, process.starttime, proc):
            raise ProcessLookupError("the raylet has ended")
        if _libc.setns(fd, _NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"its network could not be entered: {os.strerror(number)}")
    finally:
        os.close(fd)


def _network(process: Process, proc: str) -> str | None:
    """Its network namespace; None: ours, or it could not be read."""
    try:
        its, ours = (str(Path(proc, who, "ns/net").readlink()) for who in (str(process.pid), "self"))
    except OSError:
        return None
    return None if its == ours else its
