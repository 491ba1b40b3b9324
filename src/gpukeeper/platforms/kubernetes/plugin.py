"""Exec plugins: programs named by the kubeconfig that return credentials. Run with a timeout; the output is cached.

lightkube's own knows neither v1 nor expiry, certificates or a deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Generator, Mapping
from datetime import datetime, timedelta

import httpx2
import msgspec

from gpukeeper.model import reading
from gpukeeper.model.durations import in_words
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.kubernetes.errors import ClusterUnavailable
from gpukeeper.platforms.kubernetes.wire import when

DEADLINE = timedelta(seconds=30)
MARGIN = timedelta(seconds=10)  # a token is renewed this long before it ends
LONGEST_ANSWER = 1024 * 1024  # bytes


class Plugin(httpx2.Auth):
    """An exec plugin, such as `aws eks get-token`."""

    def __init__(
        self,
        spec: ExecSpec,
        cluster: Mapping[str, object],
        environ: Mapping[str, str],
        now: Callable[[], datetime],
        deadline: timedelta = DEADLINE,
    ) -> None:
        self._spec, self._cluster, self._environ, self._now, self._deadline = spec, cluster, environ, now, deadline
        self.token = self.certificate = self.key = ""
        self._until: datetime | None = None
        self.runs = 0

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        if self.token:
            request.headers["Authorization"] = f"Bearer {self.token}"
        yield request

    async def ready(self) -> None:
        if not self.runs or (self._until is not None and self._now() >= self._until - MARGIN):
            await self.renew()

    async def renew(self) -> None:
        given = self._read(await self._run())
        until = when(given.expiration_timestamp)
        if isinstance(until, Unknown):
            raise self._failed(f"its expirationTimestamp: {until.why}")
        if bool(given.client_certificate_data) != bool(given.client_key_data):
            raise self._failed("it returned a certificate without a key, or a key without a certificate")
        if not given.token and not given.client_certificate_data:
            raise self._failed("it returned neither a token nor a certificate")
        self.token, self._until = given.token or "", until
        self.certificate, self.key = given.client_certificate_data or "", given.client_key_data or ""
        self.runs += 1

    async def _run(self) -> bytes:
        """Its output goes to memory, not through a pipe: a child that it leaves behind cannot block the read."""
        answer, complaint = os.memfd_create("answer"), os.memfd_create("complaint")
        try:
            status = await self._wait(answer, complaint)
            output, wrong = os.pread(answer, LONGEST_ANSWER, 0), os.pread(complaint, 4096, 0)
        finally:
            os.close(answer)
            os.close(complaint)
        if status:
            raise self._failed(f"exit code {status}: {_last_line(wrong) or 'no output'}")
        return output

    async def _wait(self, answer: int, complaint: int) -> int:
        environ = {**self._environ, **{one.name: one.value for one in self._spec.env or ()}}
        environ["KUBERNETES_EXEC_INFO"] = msgspec.json.encode(self._information()).decode()
        try:
            running = await asyncio.create_subprocess_exec(
                self._spec.command,
                *(self._spec.args or ()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=answer,
                stderr=complaint,
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            hint = f". {self._spec.install_hint}" if self._spec.install_hint else ""
            raise self._failed(
                f"it cannot be started ({os.strerror(error.errno) if error.errno else error}){hint}"
            ) from error
        try:
            async with asyncio.timeout(self._deadline.total_seconds()):
                return await running.wait()
        except TimeoutError as error:
            words = f"timeout: no output within {in_words(self._deadline)}; run it once manually, it may need input"
            raise self._failed(words) from error
        finally:
            if running.returncode is None:
                os.killpg(running.pid, signal.SIGKILL)
                await running.wait()

    def _information(self) -> dict[str, object]:
        request_spec: dict[str, object] = {"interactive": False}
        if self._spec.provide_cluster_info:
            request_spec["cluster"] = self._cluster
        return {"apiVersion": self._spec.api_version, "kind": "ExecCredential", "spec": request_spec}

    def _read(self, output: bytes) -> ExecCredentialStatus:
        try:
            answer = reading.decode(output, type=ExecCredential)
        except msgspec.DecodeError as error:
            raise self._failed("its output is not an ExecCredential") from error
        if answer.kind != "ExecCredential" or answer.api_version != self._spec.api_version:
            words = f"{answer.kind or 'nothing'} in {answer.api_version or 'no version'}"
            raise self._failed(f"expected an ExecCredential in {self._spec.api_version}, but it returned {words}")
        if answer.status is None:
            raise self._failed("its output has no status")
        return answer.status

    def _failed(self, why: str) -> ClusterUnavailable:
        return ClusterUnavailable(f"the login plugin {self._spec.command} of the kubeconfig failed: {why}")


class ExecVariable(msgspec.Struct):
    name: str
    value: str


class ExecSpec(msgspec.Struct, rename="camel"):
    api_version: str
    command: str
    args: list[str] | None = None
    env: list[ExecVariable] | None = None
    install_hint: str | None = None
    provide_cluster_info: bool | None = None
    interactive_mode: str | None = None


class ExecCredentialStatus(msgspec.Struct, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: str | None = None


class ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    status: ExecCredentialStatus | None = None


def _last_line(output: bytes) -> str:
    """The last line with a word in it: printed structures end with brackets."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if re.search(r"\w", line)]
    return lines[-1][:200] if lines else ""
