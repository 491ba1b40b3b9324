"""A Ray cluster that runs jobs of ours: its Jobs API and its state API, over HTTP; the launcher of acceptance runs;
and passes on its nodes, with the policy that is sent there.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import Mapping, Sequence
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from gpukeeper import http_client
from gpukeeper.acceptance.launchers.ray import WAIT, RayLauncher, RaySettings
from gpukeeper.config.load import load_file
from gpukeeper.model import reading
from gpukeeper.model.errors import PlatformError, UsageError
from gpukeeper.model.policy import Mode
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.platforms.ray.busy import busy
from gpukeeper.platforms.ray.state import PORT, StateApi, read_token, refusal
from gpukeeper.rayjobs import RayJob, RayNode
from gpukeeper.rollout.ray import AGAIN, DEADLINE, RayPasses, RayPassSettings
from gpukeeper.wiring.launch_hosts import check_options, span_option

T = TypeVar("T")
REPLY = timedelta(seconds=60)  # the agent of a busy head answers late
LOG_MAX = 512 * 1024 * 1024
SIZE_MAX = 64 * 1024 * 1024
SUPERVISOR = "_ray_internal_job_actor_"
NORMAL = "NORMAL_TASK"
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray's own names


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
        self.address = (address if "://" in address else f"http://{address}").rstrip("/")
        parts = urlsplit(self.address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(
                f'"{address}" is not the address of a Ray dashboard. Write it like http://HEAD:{PORT}: '
                f"--option address=http://HEAD:{PORT}, or set RAY_API_SERVER_ADDRESS."
            )
        self._tls = _context(ca) if ca else None
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._state = StateApi(self.address, token, deadline=REPLY, tls=self._tls)

    async def version(self) -> str:
        found = await self._state.version()
        return _known(found).ray

    async def nodes(self) -> tuple[RayNode, ...]:
        return _known(await self._state.rows("nodes", RayNode))

    async def work(self, nodes: Sequence[str]) -> dict[str, str | Unknown | None]:
        """What runs on each of these nodes, by their ids; None: Ray lists nothing."""
        session = _known(await self._state.version()).session
        if session is None:
            return dict.fromkeys(nodes, Unknown(f"Ray at {self.address} does not name its session"))
        answers = await self._state.answers(session)
        return {node: busy(node, answers) for node in nodes}

    async def parts(self, name: str, job_id: str) -> tuple[str, ...]:
        actors = _known(await self._state.rows("actors", _Actor))
        groups = _known(await self._state.rows("placement_groups", _Group))
        return (
            *(f"actor {one.actor_id}" for one in actors if one.job_id == job_id or one.name == SUPERVISOR + name),
            *(f"placement group {one.placement_group_id}" for one in groups if one.creator_job_id == job_id),
        )

    async def held(self) -> dict[str, float]:
        """By node id: GPUs that actors, tasks and placement groups hold now. Work inside a group has resources of
        other names, so it is not counted twice; nor are tasks of actors."""
        actors = _known(await self._state.rows("actors", _Actor))
        groups = _known(await self._state.rows("placement_groups", _Group))
        tasks = _known(await self._state.rows("tasks", _Task))
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


def _known(found: T | Unknown) -> T:
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


def address(options: Mapping[str, str], environ: Mapping[str, str]) -> tuple[str, bool]:
    """Of the dashboard, and whether a person named it: only then a token is sent there."""
    if "address" in options:
        return options["address"], True
    for name in ADDRESSES:
        if environ.get(name, "").startswith(("http://", "https://")):
            return environ[name], True
    return f"http://127.0.0.1:{PORT}", False


LAUNCH_OPTIONS = ("address", "ca", "gpus", "master", "program", "python", "wait")


def ray_launcher(options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> RayLauncher:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, LAUNCH_OPTIONS)
    if options.get("gpus", "none") != "none":
        raise UsageError(f'option gpus="{options["gpus"]}" can only be "none"; without it a node gets all its GPUs')
    settings = RaySettings(
        python=options.get("python", "python3"),
        program=options.get("program", "gpukeeper"),
        gpus="gpus" not in options,
        master=options.get("master", ""),
        wait=span_option(options, "wait", WAIT),
        token=lambda: secrets.token_hex(8),
    )
    return RayLauncher(jobs_api(options, environ), settings)


def jobs_api(options: Mapping[str, str], environ: Mapping[str, str]) -> RayJobsApi:
    where, named = address(options, environ)
    token = read_token(environ, Path(environ.get("HOME", "/"))) if named else None
    if isinstance(token, Unknown):
        raise UsageError(token.why)
    return RayJobsApi(where, token, ca=options.get("ca", ""))


PASS_OPTIONS = ("address", "again", "ca", "deadline", "program", "python")


def ray_passes(options: Mapping[str, str]) -> RayPasses:
    """`address`: of the dashboard; without it RAY_API_SERVER_ADDRESS, RAY_ADDRESS, then the usual port of this host."""
    check_options("ray", options, PASS_OPTIONS)
    api = jobs_api(options, os.environ)
    settings = RayPassSettings(
        token=secrets.token_hex(8),
        python=options.get("python", "python3"),
        program=options.get("program", "gpukeeper"),
        deadline=span_option(options, "deadline", DEADLINE),
        again=span_option(options, "again", AGAIN),
    )
    return RayPasses(api, api.work, settings)


def policy_text(path: Path | None, *, act: bool) -> str:
    """Checked here: a mistake in it would be found on every node."""
    if path is None:
        raise UsageError("--on ray sends the policy to the nodes: name it with --policy FILE. Nothing was done.")
    loaded = load_file(path)
    if loaded.file.exemptions_from is not None:
        raise UsageError(f"{path}: exemptions_from is not sent to nodes. Write the exemptions in the policy itself.")
    if "ray" not in loaded.policy.scope:
        raise UsageError(f"{path}: its scope has no Ray. Write scope: {{ray: {{}}}}. Nothing was done.")
    if act and loaded.policy.mode is Mode.PLAN:
        raise UsageError(f"{path}: mode is plan, and only mode: enforce acts unattended. Nothing was done.")
    return path.read_text(encoding="utf-8")
