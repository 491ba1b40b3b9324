"""Credentials for a cluster: kubeconfig, service account, certificates, tokens, exec plugins. Only the login.

lightkube reads the entries and makes the connection. Ours is what it leaves out: several files in KUBECONFIG, names
and proxies of a cluster, impersonation, and exec plugins (its own know neither v1 nor expiry, certificates or a
deadline). A field with credentials is used or rejected, never skipped.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import ssl
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx2
import msgspec
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import Cluster as ClusterEntry
from lightkube.config.models import Context as ContextEntry
from lightkube.config.models import User as UserEntry
from lightkube.core.exceptions import ConfigError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from gpukeeper.clients.kubernetes.exchange import ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import when
from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words
from gpukeeper.processes import running
from gpukeeper.safe_yaml import safe_yaml

PLUGIN_DEADLINE = timedelta(seconds=30)
RENEWED_BEFORE = timedelta(seconds=10)  # a token is renewed this long before it ends
LONGEST_ANSWER = 1024 * 1024  # bytes


class Plugin(httpx2.Auth):
    """An exec plugin, such as `aws eks get-token`."""

    def __init__(
        self,
        spec: ExecSpec,
        cluster: Mapping[str, object],
        environ: Mapping[str, str],
        now: Callable[[], datetime],
        deadline: timedelta = PLUGIN_DEADLINE,
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
        if not self.runs or (self._until is not None and self._now() >= self._until - RENEWED_BEFORE):
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
        command, deadline = (self._spec.command, *(self._spec.args or ())), self._deadline.total_seconds()
        try:
            async with (
                running(*command, stdin=DEVNULL, stdout=answer, stderr=complaint, env=environ) as plugin,
                asyncio.timeout(deadline),
            ):
                return await plugin.wait()
        except TimeoutError as error:
            words = f"timeout: no output within {in_words(self._deadline)}; run it once manually, it may need input"
            raise self._failed(words) from error
        except OSError as error:
            hint = f". {self._spec.install_hint}" if self._spec.install_hint else ""
            raise self._failed(
                f"it cannot be started ({os.strerror(error.errno) if error.errno else error}){hint}"
            ) from error

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


EXEC = "client.authentication.k8s.io/"
EXEC_VERSIONS = tuple(EXEC + version for version in ("v1", "v1beta1", "v1alpha1"))
CHOOSE = "set kubernetes.context in the policy, or run `kubectl config use-context`"
FILES_OF_A_USER = ("client-certificate", "client-key", "tokenFile")
T = TypeVar("T")


class Login:
    """One way into one cluster. `client()` makes a connection with the credentials as they are now."""

    def __init__(
        self, place: str, config: SingleConfig, more: ClusterOptions, user: UserOptions, plugin: Plugin | None = None
    ) -> None:
        self.place = place
        self.namespace = config.namespace
        self.address = config.cluster.server.rstrip("/")
        self.plugin = plugin
        self._config, self._more = config, more
        self._headers = _impersonation(user)
        self._seen = self._stamps()
        self._made_with = ""
        self._checked: dict[str, Any] | None = self._parameters()  # fail now, not with the first request

    @property
    def extensions(self) -> dict[str, Any]:
        """Of every request: the name the server's certificate must carry, where it is not that of the address."""
        return {"sni_hostname": self._more.tls_server_name} if self._more.tls_server_name else {}

    def client(self) -> httpx2.AsyncClient:
        parameters = None if self.certificate_changed else self._checked
        seen, self._checked = self._stamps(), None
        parameters = parameters or self._parameters()
        self._seen, self._made_with = seen, self.plugin.certificate if self.plugin else ""
        headers = [("Accept", "application/json"), ("User-Agent", "gpukeeper"), *self._headers]
        if self._more.disable_compression:  # else compressed: reading it over TLS costs us more than unpacking it
            headers.append(("Accept-Encoding", "identity"))
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30)
        return httpx2.AsyncClient(**parameters, headers=headers, limits=limits)

    async def ready(self) -> None:
        """Get credentials from the plugin, if there are none or they expire."""
        if self.plugin is not None:
            await self.plugin.ready()

    async def renew(self, count: int) -> bool:
        """Log in again after a 401. False: there are no other credentials."""
        if self.plugin is None:
            return False
        if self.plugin.runs == count:  # not yet renewed for another request
            await self.plugin.renew()
        return True

    @property
    def count(self) -> int:
        """Number of logins."""
        return self.plugin.runs if self.plugin else 0

    @property
    def certificate_changed(self) -> bool:
        """Since `client()`: open connections still carry the old one."""
        made_with = self.plugin.certificate if self.plugin else ""
        return made_with != self._made_with or self._stamps() != self._seen

    def _parameters(self) -> dict[str, Any]:
        config = self._config._replace(user=_with_certificate(self._config.user, self.plugin))
        connection = ConnectionParams(timeout=httpx2.Timeout(None), proxy=self._more.proxy_url, http2=False)
        try:
            found = connection.httpx_params(config)
        except (ConfigError, OSError, ValueError) as error:
            raise UsageError(f"cannot log in to {self.place}: {_in_words(error)}") from error
        if config.cluster.certificate_auth or config.cluster.certificate_auth_data:
            # Python 3.13 refuses authorities without key identifiers; kubectl takes them, and many clusters have them.
            found["verify"].verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self.plugin is not None:
            found["auth"] = self.plugin
        return found

    def _stamps(self) -> tuple[int, ...]:
        """When the files we log in with were last written: certificates are replaced while we run."""
        user = self._config.user or UserEntry()
        files = (user.client_cert, user.client_key, self._config.cluster.certificate_auth)
        return tuple(_written(file) for file in files if file)


class UserOptions(msgspec.Struct, rename="kebab"):
    """What lightkube does not read of a user."""

    exec: ExecSpec | None = None
    as_: str | None = msgspec.field(default=None, name="as")
    as_uid: str | None = None
    as_groups: list[str] | None = None
    as_user_extra: dict[str, list[str]] | None = None


class Extension(msgspec.Struct):
    name: str = ""
    extension: Any = None


class ClusterOptions(msgspec.Struct, rename="kebab"):
    """What lightkube does not read of a cluster."""

    tls_server_name: str | None = None
    proxy_url: str | None = None
    disable_compression: bool | None = None
    extensions: list[Extension] | None = None


class ConfigEntry(msgspec.Struct):
    name: str
    cluster: dict[str, Any] | None = None
    context: dict[str, Any] | None = None
    user: dict[str, Any] | None = None


class ConfigFile(msgspec.Struct, rename="kebab"):
    current_context: str | None = None
    clusters: list[ConfigEntry] | None = None
    contexts: list[ConfigEntry] | None = None
    users: list[ConfigEntry] | None = None


class MergedConfig(msgspec.Struct):
    """All files together: of two entries with one name the first counts, as with kubectl."""

    current: str = ""
    clusters: dict[str, dict[str, Any]] = {}
    contexts: dict[str, dict[str, Any]] = {}
    users: dict[str, dict[str, Any]] = {}


def from_files(
    files: Sequence[Path], context: str | None, environ: Mapping[str, str], now: Callable[[], datetime]
) -> Login:
    merged = _merged(files)
    listed = ", ".join(map(str, files))
    name = context or merged.current
    there = ", ".join(sorted(merged.contexts)) or "none"
    if not name:
        raise UsageError(f"{listed}: no current-context is set; {CHOOSE}. Available: {there}")
    if name not in merged.contexts:
        raise UsageError(f'{listed}: context "{name}" not found; {CHOOSE}. Available: {there}')
    chosen = merged.contexts[name]
    cluster = _named(merged.clusters, chosen, "cluster", name, listed)
    user = _named(merged.users, chosen, "user", name, listed) if chosen.get("user") else {}
    where = f"{listed}: context {name}"
    if not cluster.get("server"):
        raise UsageError(f"{where}: its cluster has no server")
    if cluster.get("insecure-skip-tls-verify") and any(name.startswith("certificate-authority") for name in cluster):
        raise UsageError(f"{where}: its cluster has a certificate-authority and insecure-skip-tls-verify; remove one")
    for one in ("client-certificate", "client-key"):
        other = {"client-certificate": "client-key", "client-key": "client-certificate"}[one]
        if (user.get(one) or user.get(f"{one}-data")) and not (user.get(other) or user.get(f"{other}-data")):
            raise UsageError(f"{where}: its user has a {one} but no {other}")
    more = _converted(cluster, ClusterOptions, f"{where}: cluster")
    who = _converted(user, UserOptions, f"{where}: user")
    plugin = None if who.exec is None else _plugin(who.exec, cluster, more, where, environ, now)
    if any(user.get(one) for one in ("token", "tokenFile", "username")):
        plugin = None  # it is used only without other credentials
    user.pop("exec", None)
    config = SingleConfig(
        context_name=name,
        context=_converted({**chosen, "cluster": "it"}, ContextEntry, where),
        cluster=_converted(cluster, ClusterEntry, f"{where}: cluster"),
        user=_converted(user, UserEntry, f"{where}: user"),
    )
    return Login(_safe(name), config, more, who, plugin)


def from_service_account(directory: Path, environ: Mapping[str, str]) -> Login:
    """Inside a cluster. The token is replaced while we run; it is read again when it is not accepted any more."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        namespace = (directory / "namespace").read_text().strip()
    except OSError:
        namespace = ""
    config = KubeConfig.from_one(
        cluster=ClusterEntry(
            server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            certificate_auth=str(directory / "ca.crt"),
        ),
        user=UserEntry(token_file=str(directory / "token")),
        namespace=namespace,
    ).get()
    assert config is not None
    return Login("in-cluster", config, ClusterOptions(), UserOptions())


def utc_now() -> datetime:
    return datetime.now(UTC)


def _merged(files: Sequence[Path]) -> MergedConfig:
    all_ = MergedConfig()
    for file in files:
        found = _read(file)
        all_.current = all_.current or found.current_context or ""
        for one in found.clusters or ():
            all_.clusters.setdefault(one.name, _absolute(one.cluster or {}, ["certificate-authority"], file))
        for one in found.contexts or ():
            all_.contexts.setdefault(one.name, one.context or {})
        for one in found.users or ():
            all_.users.setdefault(one.name, _user(one.user or {}, file))
    return all_


def _read(file: Path) -> ConfigFile:
    """Its contents are secret: no message quotes them."""
    try:
        with file.open(encoding="utf-8") as text:
            found = safe_yaml().load(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{file}{line}: not valid YAML: {error.problem}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid YAML") from error
    return _converted({} if found is None else found, ConfigFile, str(file))


def _converted(found: object, type_: type[T], where: str) -> T:
    try:
        return msgspec.convert(found, type_)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error)[:1].lower()}{str(error)[1:]}") from error


def _absolute(entry: dict[str, Any], names: Sequence[str], file: Path) -> dict[str, Any]:
    """A relative path starts where its kubeconfig lies. Fields without a value are as good as absent."""
    entry = {name: value for name, value in entry.items() if value is not None and value != ""}
    for name in names:
        if isinstance(entry.get(name), str):
            entry[name] = str(file.absolute().parent / entry[name])
    return entry


def _user(entry: dict[str, Any], file: Path) -> dict[str, Any]:
    user = _absolute(entry, FILES_OF_A_USER, file)
    plugin = user.get("exec")
    if isinstance(plugin, dict) and "/" in str(plugin.get("command")):
        user["exec"] = _absolute(plugin, ["command"], file)  # without a slash it is searched in PATH
    return user


def _named(
    entries: Mapping[str, dict[str, Any]], context: Mapping[str, Any], what: str, name: str, listed: str
) -> dict[str, Any]:
    wanted = context.get(what)
    if not isinstance(wanted, str) or wanted not in entries:
        there = ", ".join(sorted(entries)) or "none"
        raise UsageError(
            f'{listed}: context {name} refers to the {what} "{wanted or ""}", which does not exist. Available: {there}'
        )
    return dict(entries[wanted])


def _plugin(
    spec: ExecSpec,
    cluster: Mapping[str, Any],
    more: ClusterOptions,
    where: str,
    environ: Mapping[str, str],
    now: Callable[[], datetime],
) -> Plugin:
    if spec.api_version not in EXEC_VERSIONS:
        known = ", ".join(EXEC_VERSIONS)
        raise UsageError(f"{where}: its login plugin uses {spec.api_version}; gpukeeper supports {known}")
    if spec.interactive_mode == "Always":
        raise UsageError(f"{where}: the login plugin {spec.command} requires a terminal (interactiveMode: Always)")
    return Plugin(spec, _cluster_info(cluster, more), environ, now)


def _cluster_info(cluster: Mapping[str, Any], more: ClusterOptions) -> dict[str, object]:
    """What a plugin gets with provideClusterInfo. A file is passed as its contents."""
    names = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    info: dict[str, object] = {name: cluster[name] for name in names if name in cluster}
    if file := cluster.get("certificate-authority"):
        try:
            info["certificate-authority-data"] = base64.b64encode(Path(file).read_bytes()).decode()
        except OSError as error:
            raise UsageError(f"the certificate-authority {file} cannot be read: {error.strerror}") from error
    for one in more.extensions or ():
        if one.name == EXEC + "exec":
            info["config"] = one.extension
    return info


def _with_certificate(user: UserEntry | None, plugin: Plugin | None) -> UserEntry:
    user = user or UserEntry()
    if plugin is None or not plugin.certificate:
        return user
    certificate, key = (base64.b64encode(text.encode()).decode() for text in (plugin.certificate, plugin.key))
    return msgspec.structs.replace(user, client_cert_data=certificate, client_key_data=key)


def _impersonation(user: UserOptions) -> list[tuple[str, str]]:
    """The headers of `kubectl --as`."""
    groups, extra = user.as_groups or [], user.as_user_extra or {}
    if not user.as_:
        if user.as_uid or groups or extra:
            raise UsageError("the kubeconfig's user has as-uid, as-groups or as-user-extra, but no `as`")
        return []
    headers = [("Impersonate-User", user.as_)]
    if user.as_uid:
        headers.append(("Impersonate-Uid", user.as_uid))
    headers += [("Impersonate-Group", group) for group in groups]
    headers += [(f"Impersonate-Extra-{quote(key, safe='')}", value) for key, many in extra.items() for value in many]
    return headers


def _safe(name: str) -> str:
    """A context's name as a part of a path. Two names stay two."""
    safe = re.sub(r"[^A-Za-z0-9._@-]+", "-", name)
    return name if safe == name and name.strip(".") else f"{safe}-{sha256(name.encode()).hexdigest()[:6]}"


def _written(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return 0


def _in_words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"a certificate or key cannot be used: {error.reason or error}"
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        return f"{named}{os.strerror(error.errno) if error.errno else error}"
    if isinstance(error, ConfigError):
        return str(error)
    return f"a certificate or key is not base64 ({type(error).__name__})"
