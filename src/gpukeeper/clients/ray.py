"""A Ray cluster over HTTP: its state API, and jobs of ours over its Jobs API. Ray is not needed here.

Responses of the state API that were cut off, or that Ray itself calls incomplete, are Unknown. A program of ours gets
to the head of a cluster in the metadata of its job. The entrypoint of the job is constant but for the name of an
interpreter; no text of a user reaches a shell. Removed: stopped, ended, deleted, read again.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gpukeeper import http_client
from gpukeeper.blocking import in_thread
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words

# In these states each kind has ended; every other state counts, also one that a later Ray adds.
OVER_ACTOR: Final = ("DEAD",)
OVER_TASK: Final = ("FINISHED", "FAILED")
OVER_GROUP: Final = ("REMOVED",)
OVER_JOB: Final = ("SUCCEEDED", "FAILED", "STOPPED")
DEADLINE: Final = timedelta(seconds=10)
LIMIT: Final = 10_000  # more is refused
SIZE_MAX: Final = 64 * 1024 * 1024
PORT: Final = 8265  # the dashboard's, unless configured otherwise
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # Ray's own names

T = TypeVar("T")
Rows: TypeAlias = tuple[T, ...] | Unknown
Filter: TypeAlias = tuple[str, str, str]


class Version(msgspec.Struct, frozen=True):
    ray: str = msgspec.field(name="ray_version")
    session: str | None = msgspec.field(name="session_name", default=None)


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
# Filtered by the source itself, which then reads all it has. From what starts to what ends: what moves on meanwhile is
# seen.
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
        self.address, self._token, self._deadline = url(address), token, deadline
        self._enter, self._tls = enter, tls

    async def version(self) -> Version | Unknown:
        return await self._get("/api/version", Version)

    async def rows(self, kind: str, row: type[T]) -> Rows[T]:
        """Every row of one kind that has not ended; nodes: all. Ray's own source returns a limited number of rows,
        ended or not; then by state.
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
        return tuple({msgspec.json.encode(row): row for row in rows}.values())  # a row with resources has no hash

    async def some(self, kind: str, row: type[T], key: str, value: str) -> Rows[T]:
        """Those with this value."""
        page = await self._page(kind, row, ((key, "=", value),))
        return page if isinstance(page, Unknown) else page.result

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
            return Unknown(
                f"Ray at {self.address} could not list its {kind.replace('_', ' ')}: {first_line(answer.msg)}"
            )
        page = answer.data.result
        if complaint := page.partial_failure_warning or "".join(page.warnings or ()):
            return Unknown(f"Ray at {self.address} listed only a part of its {kind}: {first_line(complaint)}")
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


def url(address: str) -> str:
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
    return f"it answered {answer.status} {first_line(message) or answer.reason}"


class _Words(msgspec.Struct, frozen=True):
    msg: str = ""


def first_line(words: str) -> str:
    """Ray's messages may contain a traceback."""
    line = next((line.strip() for line in words.split("\n") if line.strip()), "")
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:300]


# Jobs.

REPLY = timedelta(seconds=60)  # the agent of a busy head answers late
LOG_MAX = 512 * 1024 * 1024
SUPERVISOR = "_ray_internal_job_actor_"
NORMAL = "NORMAL_TASK"


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A row of its state API; `name` is not unique."""

    node_id: str
    ip: str = msgspec.field(name="node_ip")
    name: str = msgspec.field(name="node_name", default="")
    state: str
    message: str | None = msgspec.field(name="state_message", default=None)
    resources: Mapping[str, float] = msgspec.field(name="resources_total", default_factory=dict)
    labels: Mapping[str, str] | None = None

    @property
    def alive(self) -> bool:
        return self.state == "ALIVE"

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


class RayJob(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: its submission id; `job_id`: Ray's own, once its driver runs."""

    name: str
    status: str
    message: str = ""
    job_id: str = ""
    metadata: Mapping[str, str] = {}


class _Job(msgspec.Struct, frozen=True):
    status: str
    submission_id: str | None = None
    job_id: str | None = None
    message: str | None = None
    metadata: dict[str, str] | None = None


class _Log(msgspec.Struct, frozen=True):
    logs: str


class _Actor(msgspec.Struct, frozen=True):
    actor_id: str
    job_id: str
    name: str | None = None
    node_id: str | None = None
    required_resources: dict[str, float] | None = None


class _Task(msgspec.Struct, frozen=True):
    state: str
    type: str = ""
    node_id: str | None = None
    required_resources: dict[str, float] | None = None


class _Bundle(msgspec.Struct, frozen=True):
    node_id: str | None = None
    unit_resources: dict[str, float] | None = None


class _Group(msgspec.Struct, frozen=True):
    placement_group_id: str
    creator_job_id: str = ""
    bundles: tuple[_Bundle, ...] | None = None


class RayJobsApi:
    """`token`: sent with every request. `ca`: a file with the certificates that an https address is checked with."""

    def __init__(self, address: str, token: str | None = None, *, ca: str = "") -> None:
        self.address = url(address)
        parts = urlsplit(self.address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(
                f'"{address}" is not the address of a Ray dashboard. Write it like http://HEAD:{PORT}: '
                f"--option address=http://HEAD:{PORT}, or set RAY_API_SERVER_ADDRESS."
            )
        self._tls = _context(ca) if ca else None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.state = StateApi(self.address, token, deadline=REPLY, tls=self._tls)

    async def version(self) -> str:
        found = await self.state.version()
        return known(found).ray

    async def nodes(self) -> tuple[RayNode, ...]:
        return known(await self.state.rows("nodes", RayNode))

    async def parts(self, name: str, job_id: str) -> tuple[str, ...]:
        actors = known(await self.state.rows("actors", _Actor))
        groups = known(await self.state.rows("placement_groups", _Group))
        return (
            *(f"actor {one.actor_id}" for one in actors if one.job_id == job_id or one.name == SUPERVISOR + name),
            *(f"placement group {one.placement_group_id}" for one in groups if one.creator_job_id == job_id),
        )

    async def held(self) -> dict[str, float]:
        """By node id: GPUs that actors, tasks and placement groups hold now. Work inside a group has resources of
        other names, so it is not counted twice; nor are tasks of actors."""
        actors = known(await self.state.rows("actors", _Actor))
        groups = known(await self.state.rows("placement_groups", _Group))
        tasks = known(await self.state.rows("tasks", _Task))
        parts = [(one.node_id, one.required_resources) for one in actors]
        parts += [(each.node_id, each.unit_resources) for one in groups for each in one.bundles or ()]
        parts += [
            (one.node_id, one.required_resources) for one in tasks if one.state == "RUNNING" and one.type == NORMAL
        ]
        found: dict[str, float] = {}
        for node, resources in parts:
            if node and (resources or {}).get("GPU"):
                found[node] = found.get(node, 0.0) + (resources or {})["GPU"]
        return found

    async def submit(self, name: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        body = msgspec.json.encode({"submission_id": name, "entrypoint": entrypoint, "metadata": dict(metadata)})
        answer = await self._send("POST", "/api/jobs/", body)
        if answer.status >= 300 and b"already exists" not in answer.body:
            raise self._refused("did not accept the job", answer)

    async def jobs(self) -> tuple[RayJob, ...]:
        answer = await self._send("GET", "/api/jobs/")
        return tuple(_job(one) for one in self._read(answer, tuple[_Job, ...]) if one.submission_id)

    async def job(self, name: str) -> RayJob | None:
        answer = await self._send("GET", f"/api/jobs/{quote(name, safe='')}")
        return None if answer.status == HTTPStatus.NOT_FOUND else _job(self._read(answer, _Job))

    async def log(self, name: str) -> str | None:
        answer = await self._send("GET", f"/api/jobs/{quote(name, safe='')}/logs", size_max=LOG_MAX)
        return None if answer.status == HTTPStatus.NOT_FOUND else self._read(answer, _Log).logs

    async def stop(self, name: str) -> None:
        answer = await self._send("POST", f"/api/jobs/{quote(name, safe='')}/stop")
        if answer.status >= 300 and answer.status != HTTPStatus.NOT_FOUND:
            raise self._refused("did not stop the job", answer)

    async def delete(self, name: str) -> None:
        answer = await self._send("DELETE", f"/api/jobs/{quote(name, safe='')}")
        if answer.status >= 300 and answer.status != HTTPStatus.NOT_FOUND:
            raise self._refused("did not delete the job", answer)

    async def close(self) -> None:
        """Connections end with their request: seconds lie between two."""

    async def _send(
        self, method: str, target: str, body: bytes | None = None, size_max: int = SIZE_MAX
    ) -> http_client.Response:
        headers = {**self._headers, **({"Content-Type": "application/json"} if body is not None else {})}
        try:
            async with (
                asyncio.timeout(REPLY.total_seconds()),
                http_client.Client(self.address, tls=self._tls, purpose="ray-jobs") as client,
            ):
                return await client.request(method, target, headers=headers, body=body, size_max=size_max)
        except TimeoutError:
            raise PlatformError(f"Ray at {self.address} did not answer within {in_words(REPLY)}") from None
        except http_client.HttpError as error:
            raise PlatformError(
                f"Ray at {self.address} could not be queried: {error}. Is this the address of its dashboard? "
                "Name it with --option address=http://HEAD:8265"
            ) from error

    def _read(self, answer: http_client.Response, kind: type[T]) -> T:
        if answer.status >= 300:
            raise self._refused("did not answer", answer)
        try:
            return reading.decode(answer.body, type=kind, strict=False)
        except msgspec.DecodeError as error:
            raise PlatformError(f"the response of Ray at {self.address} could not be read: {error}") from error

    def _refused(self, what: str, answer: http_client.Response) -> PlatformError:
        return PlatformError(f"Ray at {self.address} {what}: {_advice(answer)}")


def _advice(answer: http_client.Response) -> str:
    if answer.status == HTTPStatus.UNAUTHORIZED:
        return (
            "it requires a token; set it in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, and name the address with "
            "--option address=… (the token is sent to no other address)"
        )
    words = answer.body.decode("utf-8", "replace").strip().splitlines()
    plain = answer.headers.get("content-type", "").startswith("text/plain")
    return f"it answered {answer.status} {words[-1][:300]}" if plain and words else refusal(answer)


def known(found: T | Unknown) -> T:
    if isinstance(found, Unknown):
        raise PlatformError(found.why)
    return found


def _job(one: _Job) -> RayJob:
    return RayJob(
        name=one.submission_id or "",
        status=one.status,
        message=one.message or "",
        job_id=one.job_id or "",
        metadata=one.metadata or {},
    )


def _context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise UsageError(f"option ca={ca} cannot be read: {error.strerror or error}") from error


def named_nodes(nodes: Sequence[RayNode]) -> dict[str, RayNode]:
    """By the name that reports use: Ray's own, which usually is an address; with a part of its id if others have it.

    A dead node does not take the name of one that is alive: a machine that was restarted is a new node.
    """
    alive = Counter(node.name or node.ip for node in nodes if node.alive)
    found: dict[str, RayNode] = {}
    for node in sorted(nodes, key=lambda one: (not one.alive, one.name, one.ip, one.node_id)):
        name = node.name or node.ip
        if alive[name] > 1:
            name = f"{name}-{node.node_id[:8]}"
        found.setdefault(name, node)
    return found


PLAN: Final = "gpukeeper.io/plan"
PROGRAM: Final = "gpukeeper.io/program"
METADATA_MAX: Final = 100_000  # bytes; the kernel limits what Ray passes to the driver to 128 KiB
_ENTRY: Final = (
    "import sys; sys.path[:] = filter(None, sys.path); "  # not from its directory, also with a Python that has no -P
    'import base64, json, os, zlib; m = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]; '
    f'exec(zlib.decompress(base64.b64decode(m["{PROGRAM}"])))'
)
_PYTHON: Final = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_/.+-]*")


def entrypoint(python: str) -> str:
    return f"exec {python} -c '{_ENTRY}'"


def check_python(python: str) -> None:
    if not _PYTHON.fullmatch(python):
        raise UsageError(f'option python="{python}" is not the name or path of an interpreter')


def packed(what: bytes) -> str:
    return base64.b64encode(zlib.compress(what, 9)).decode()


STOPPING: Final = timedelta(seconds=40)  # Ray waits 3 s, then kills


class Pauses(msgspec.Struct, frozen=True):
    sleep: float = 0.3  # seconds between two looks at a job that is to end
    settle: timedelta = timedelta(seconds=2)  # Ray looks at a job every second, and may not have noticed its end


async def remove_job(api: RayJobsApi, job: RayJob, is_same: Callable[[RayJob], bool], pauses: Pauses) -> str:
    """Why it is still there; empty: it is gone. `is_same`: another job may have got its name meanwhile."""
    if job.status not in OVER_JOB:
        await api.stop(job.name)
    if left := await _last_left(api, job, pauses):
        return left
    await asyncio.sleep(pauses.settle.total_seconds())
    now = await api.job(job.name)
    if now is not None and is_same(now):
        await api.delete(job.name)
        if await _comes_back(api, job.name, pauses):
            return "still there after it was removed"
    return ""


async def _comes_back(api: RayJobsApi, name: str, pauses: Pauses) -> bool:
    """Ray watches a job until its supervisor is gone, and writes a new, empty record if the job was deleted before it
    noticed. What has just been deleted and comes back without metadata is that."""
    for _ in range(2):
        await asyncio.sleep(pauses.settle.total_seconds() / 2)
        again = await api.job(name)
        if again is None:
            return False
        if again.metadata or again.status not in OVER_JOB:
            return True
        await api.delete(name)
    return await api.job(name) is not None


async def _last_left(api: RayJobsApi, job: RayJob, pauses: Pauses) -> str:
    """Ray ends actors after their driver, in a moment."""
    late = asyncio.get_running_loop().time() + STOPPING.total_seconds()
    while True:
        left = await _left(api, job)
        if not left or asyncio.get_running_loop().time() > late:
            return left
        await asyncio.sleep(pauses.sleep)


async def _left(api: RayJobsApi, job: RayJob) -> str:
    """Why its record may not be deleted yet; empty: nothing of it runs."""
    now = await api.job(job.name)
    if now is not None and now.status not in OVER_JOB:
        return f"it was stopped and is still {now.status.lower()}"
    parts = await api.parts(job.name, (now or job).job_id or job.job_id)
    return f"Ray has not ended {', '.join(parts[:5])}" if parts else ""
