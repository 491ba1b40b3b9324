"""Who we are: kubeconfigs good and broken, tokens that change, certificates, plugins as real programs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.clients.kubernetes import auth
from gpukeeper.clients.kubernetes.connect import Cluster
from gpukeeper.clients.kubernetes.exchange import ApiError, ClusterUnavailable
from gpukeeper.clients.kubernetes.wire import Root
from gpukeeper.model.errors import UsageError
from tests.patience import PATIENCE, growing
from tests.unit.clients.kubernetes.scripted_api import Reply, ScriptedApi, Time, ask, kubeconfig, listening, refused

V1 = "client.authentication.k8s.io/v1"
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
FINE = Reply({"kind": "x"})
NO = Reply(refused(401, "Unauthorized"), 401)


def read(*files: Path, context: str | None = None) -> auth.Login:
    return auth.from_files(files, context, {}, auth.utc_now)


def written(file: Path, **entries: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({name.replace("_", "-"): value for name, value in entries.items()}))
    return file


def an_api() -> ScriptedApi:
    api = ScriptedApi()
    api.says("GET /x", FINE)
    return api


async def get(cluster: Cluster) -> str:
    return (await cluster.get("/x", Root)).kind


# Files


def test_of_several_files_the_first_to_name_a_thing_counts(tmp_path: Path) -> None:
    one = written(
        tmp_path / "a" / "one",
        clusters=[{"name": "c", "cluster": {"server": "http://one"}}],
        contexts=None,
        users=None,
    )
    two = written(
        tmp_path / "b" / "two",
        current_context="lab",
        clusters=[{"name": "c", "cluster": {"server": "http://two"}}, {"name": "d", "cluster": {"server": "http://d"}}],
        contexts=[
            {"name": "lab", "context": {"cluster": "c", "user": "me", "namespace": "research"}},
            {"name": "other", "context": {"cluster": "d"}},
        ],
        users=[{"name": "me", "user": {"tokenFile": "token"}}],
    )
    three = written(
        tmp_path / "three",
        current_context="other",
        contexts=[{"name": "lab", "context": {"cluster": "d"}}],
        users=[{"name": "me", "user": {"token": "wrong"}}],
    )
    login = read(one, two, three)
    assert (login.place, login.namespace, login.address) == ("lab", "research", "http://one")
    assert login._config.user is not None
    assert login._config.user.token_file == str(tmp_path / "b" / "token")  # relative to its own file
    assert read(one, two, three, context="other").address == "http://d"
    assert read(three, two, one).address == "http://d"


def test_a_context_without_a_namespace_means_default(tmp_path: Path) -> None:
    file = written(
        tmp_path / "config",
        current_context="lab",
        clusters=[{"name": "c", "cluster": {"server": "http://c"}}],
        contexts=[{"name": "lab", "context": {"cluster": "c", "user": "", "namespace": ""}}],
    )
    assert read(file).namespace == "default"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("prod-a", "prod-a"),
        ("kubernetes-admin@kubernetes", "kubernetes-admin@kubernetes"),
        ("arn:aws:eks:eu-1:12:cluster/prod", "arn-aws-eks-eu-1-12-cluster-prod-4c290f"),
        ("..", "..-5ec1f7"),
    ],
)
def test_a_place_is_safe_in_a_path(name: str, place: str) -> None:
    assert auth._safe(name) == place
    assert auth._safe("a/b") != auth._safe("a:b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no current-context is set"),
        ("current-context: [", r"config:1: not valid YAML"),
        ("a: 1\na: 2", "not valid YAML"),
        ("\x00", "not valid YAML"),
        (
            "[" * 60 + "]" * 60,
            "not valid YAML",
        ),  # 500 levels take three seconds, ten times as many a hundred times as long
        ("- a", r"expected `object`, got `array`"),
        ("just text", r"expected `object`, got `str`"),
        ("clusters: 5", r"expected `array \| null`"),
        ("current-context: lab", 'context "lab" not found; set .* Available: none'),
        ("contexts: [{name: a, context: {}}, {name: b}]", "no current-context is set; .*Available: a, b"),
        (
            "current-context: a\ncontexts: [{name: a}]",
            'context a refers to the cluster "", which does not exist. Available: none',
        ),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
            "clusters: [{name: c, cluster: {server: 'http://c'}}]",
            'context a refers to the user "u", which does not exist. Available: none',
        ),
        (
            "current-context: a\ncontexts: [{name: a, context: {cluster: c}}]\nclusters: [{name: c, cluster: null}]",
            "its cluster has no server",
        ),
    ],
)
def test_a_broken_kubeconfig_shows_where_and_what(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"token": 5}, r"context lab: user: expected `str.*\$.token"),
        ({"client-certificate-data": "AAAA"}, "a client-certificate but no client-key"),
        ({"client-key": "key"}, "a client-key but no client-certificate"),
        ({"client-certificate": "none", "client-key": "none"}, "No such file"),
        ({"client-certificate-data": "!", "client-key-data": "!"}, "cannot log in to lab"),
        ({"client-certificate-data": "AAAA", "client-key-data": "AAAA"}, "certificate or key cannot be used"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider not supported"),
        ({"as-groups": ["admins"]}, "no `as`"),
        ({"as-uid": "7"}, "no `as`"),
        (
            {"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v2"}},
            "uses client.*gpukeeper supports",
        ),
        ({"exec": {"command": "x", "apiVersion": V1, "interactiveMode": "Always"}}, "requires a terminal"),
        ({"exec": {"apiVersion": V1}}, "missing required field `command`"),
    ],
)
def test_a_user_that_cannot_be_used_is_reported(user: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(kubeconfig(tmp_path / "config", "https://127.0.0.1:1", user))


def test_no_secret_is_quoted_in_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("users: [{name: me, user: {token: s3cret, token: s3cret, tokenFile: }}]\n  s3cret: [")
    with pytest.raises(UsageError) as caught:
        read(file)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"certificate-authority": "none"}, "No such file"),
        ({"certificate-authority-data": "AAAA"}, "cannot log in to lab"),
        ({"certificate-authority-data": "AAAA", "insecure-skip-tls-verify": True}, "remove one"),
    ],
)
def test_an_authority_that_cannot_be_used_is_reported(cluster: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        read(kubeconfig(tmp_path / "config", "https://127.0.0.1:1", {}, cluster))


def test_a_kubeconfig_that_may_not_be_read_reports_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read(tmp_path)


# Tokens and names


def test_a_token_is_shown(tmp_path: Path) -> None:
    api = an_api()
    assert ask(api, get, tmp_path, user={"token": "t0"}) == "x"
    assert api.asked[0].header("Authorization") == "Bearer t0"


def test_a_name_and_password_are_shown(tmp_path: Path) -> None:
    api = an_api()
    ask(api, get, tmp_path, user={"username": "ann", "password": "p"})
    assert api.asked[0].header("Authorization") == f"Basic {base64.b64encode(b'ann:p').decode()}"


def test_who_has_no_credentials_shows_none(tmp_path: Path) -> None:
    api = an_api()
    ask(api, get, tmp_path)
    assert api.asked[0].header("Authorization") is None


def test_we_are_whom_the_kubeconfig_says_we_act_as(tmp_path: Path) -> None:
    api = an_api()
    user = {
        "token": "t0",
        "as": "bob",
        "as-uid": "u-7",
        "as-groups": ["one", "two"],
        "as-user-extra": {"example.org/Team": ["a", "b"]},
    }
    ask(api, get, tmp_path, user=user)
    shown = [(name.lower(), value) for name, value in api.asked[0].headers if name.lower().startswith("impersonate")]
    assert sorted(shown) == [
        ("impersonate-extra-example.org%2fteam", "a"),
        ("impersonate-extra-example.org%2fteam", "b"),
        ("impersonate-group", "one"),
        ("impersonate-group", "two"),
        ("impersonate-uid", "u-7"),
        ("impersonate-user", "bob"),
    ]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_token_in_a_file_is_read_again_when_it_is_refused(method: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    api = ScriptedApi()
    api.says(f"{method} /x", FINE, NO, FINE)

    async def rotated(cluster: Cluster) -> None:
        for text in ("old", "new"):
            token.write_text(text)
            if method == "GET":
                await cluster.get("/x", Root)
            else:
                await cluster.delete("/x", {"preconditions": {"uid": "u"}})

    ask(api, rotated, tmp_path, user={"tokenFile": "token"})
    shown = [one.header("Authorization") for one in api.asked]
    assert shown == ["Bearer old", "Bearer old", "Bearer new"]


def test_a_token_file_that_is_gone_is_silence(tmp_path: Path) -> None:
    with pytest.raises(ClusterUnavailable, match=r"cannot log in to lab: Token file .* not found"):
        ask(an_api(), get, tmp_path, user={"tokenFile": "none"})


def test_a_refused_token_shows_what_to_do(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /x", NO)
    with pytest.raises(ApiError, match="log in again") as caught:
        ask(api, get, tmp_path, user={"token": "t0"})
    assert caught.value.is_denied
    assert len(api.asked) == 1


def test_a_token_beside_a_plugin_wins(tmp_path: Path) -> None:
    api = an_api()
    ask(api, get, tmp_path, user={"token": "t0", "exec": {"apiVersion": V1, "command": "no-such-plugin"}})
    assert api.asked[0].header("Authorization") == "Bearer t0"


# Plugins


PLUGIN = """
    import json, os, pathlib, sys
    here = pathlib.Path(__file__).parent
    told = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
    with (here / "runs").open("a") as runs:
        runs.write(json.dumps({"told": told, "args": sys.argv[1:], "own": os.environ.get("OWN")}) + "\\n")
    number = len((here / "runs").read_text().splitlines())
    status = {"token": f"t{number}", **json.loads((here / "status").read_text())}
    print(json.dumps({"apiVersion": told["apiVersion"], "kind": "ExecCredential", "status": status}))
"""


def plugin(folder: Path, program: str = PLUGIN, **status: Any) -> dict[str, Any]:
    """A user whose credentials come from a little program. Its command is relative to the kubeconfig."""
    (folder / "status").write_text(json.dumps(status))
    script = folder / "plugin"
    script.write_text(f"#!{sys.executable}\n{textwrap.dedent(program)}")
    script.chmod(0o755)
    own = [{"name": "OWN", "value": "yes"}]
    return {"exec": {"apiVersion": V1, "command": "./plugin", "args": ["get", "token"], "env": own}}


def runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs").read_text().splitlines()]


@pytest.mark.parametrize("version", ["v1", "v1beta1", "v1alpha1"])
def test_a_plugin_gives_the_token_and_is_queried_once(version: str, tmp_path: Path) -> None:
    user = plugin(tmp_path)
    user["exec"]["apiVersion"] = f"client.authentication.k8s.io/{version}"
    api = an_api()

    async def many(cluster: Cluster) -> None:
        await asyncio.gather(*(get(cluster) for _ in range(10)))

    ask(api, many, tmp_path, user=user)
    assert {one.header("Authorization") for one in api.asked} == {"Bearer t1"}
    (run,) = runs(tmp_path)
    assert (run["args"], run["own"]) == (["get", "token"], "yes")
    assert run["told"] == {
        "apiVersion": f"client.authentication.k8s.io/{version}",
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }


def test_a_plugin_is_told_of_the_cluster_where_it_wants_to_be(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")[0]
    user = plugin(tmp_path)
    user["exec"]["provideClusterInfo"] = True
    more = {
        "certificate-authority": authority.name,
        "tls-server-name": "api.lab",
        "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": 5}}],
    }
    login = read(kubeconfig(tmp_path / "config", "https://127.0.0.1:1", user, more))
    asyncio.run(login.ready())
    assert runs(tmp_path)[0]["told"]["spec"]["cluster"] == {
        "server": "https://127.0.0.1:1",
        "tls-server-name": "api.lab",
        "certificate-authority-data": base64.b64encode(authority.read_bytes()).decode(),
        "config": {"audience": 5},
    }
    assert login.extensions == {"sni_hostname": "api.lab"}


def test_a_token_is_renewed_before_it_ends(tmp_path: Path) -> None:
    time = [NOW]
    user = plugin(tmp_path, expirationTimestamp="2026-05-01T13:00:00Z")
    login = auth.from_files([kubeconfig(tmp_path / "config", "http://x", user)], None, os.environ, lambda: time[0])

    async def over_time() -> list[int]:
        seen = []
        for minutes in (0, 30, 59, 60):
            time[0] = NOW + timedelta(minutes=minutes)
            await login.ready()
            seen.append(len(runs(tmp_path)))
        return seen

    assert asyncio.run(over_time()) == [1, 1, 1, 2]


def test_a_token_that_is_refused_is_renewed_once_for_all(tmp_path: Path) -> None:
    user = plugin(tmp_path)
    api = ScriptedApi()

    async def only_the_second(request: Any) -> Any:
        from aiohttp import web

        good = request.headers["Authorization"] == "Bearer t2"
        return web.json_response({"kind": "x"} if good else refused(401, "Unauthorized"), status=200 if good else 401)

    api.says("GET /x", only_the_second)

    async def many(cluster: Cluster) -> list[str]:
        return await asyncio.gather(*(get(cluster) for _ in range(5)))

    assert ask(api, many, tmp_path, user=user) == ["x"] * 5
    assert len(runs(tmp_path)) == 2


def test_a_plugin_whose_tokens_are_always_refused_ends(tmp_path: Path) -> None:
    api = ScriptedApi()
    api.says("GET /x", NO)
    with pytest.raises(ApiError):
        ask(api, get, tmp_path, user=plugin(tmp_path))
    assert (len(api.asked), len(runs(tmp_path))) == (2, 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('you are not logged in')", "exit code 1: you are not logged in"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9: no output"),
        ("print('hello')", "not an ExecCredential"),
        ("print('{}')", "returned nothing in no version"),
        (
            f"""print('{{"apiVersion": "{V1}beta1", "kind": "ExecCredential"}}')""",
            "returned ExecCredential in .*v1beta1",
        ),
        (f"""print('{{"apiVersion": "{V1}", "kind": "ExecCredential"}}')""", "has no status"),
        (f"""print('{{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {{}}}}')""", "neither a token nor"),
    ],
)
def test_a_plugin_that_fails_shows_how(program: str, words: str, tmp_path: Path) -> None:
    api = an_api()
    with pytest.raises(ClusterUnavailable, match=f"login plugin .*/plugin of the kubeconfig failed: .*{words}"):
        ask(api, get, tmp_path, user=plugin(tmp_path, program))
    assert api.asked == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"expirationTimestamp": "soon"}, "expirationTimestamp: 'soon' is not a time"),
        ({"clientCertificateData": "x"}, "certificate without a key"),
        ({"token": 5}, "not an ExecCredential"),
    ],
)
def test_a_plugins_answer_that_makes_no_sense_is_reported(status: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterUnavailable, match=words):
        ask(an_api(), get, tmp_path, user=plugin(tmp_path, **status))


def test_a_plugin_that_is_not_installed_shows_how_to_get_it(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": V1, "command": "no-such-plugin", "installHint": "Get it with: brew install it"}}
    with pytest.raises(ClusterUnavailable, match=r"no-such-plugin .*No such file.*Get it with: brew install it"):
        ask(an_api(), get, tmp_path, user=user)


def test_a_plugin_that_never_answers_is_ended_with_what_it_started(tmp_path: Path) -> None:
    program = """
        import os, pathlib, subprocess
        child = subprocess.Popen(["sleep", "600"])
        pids = pathlib.Path(__file__).with_name("new")
        pids.write_text(f"{os.getpid()} {child.pid}")
        pids.rename(pids.with_name("pids"))
        child.wait()
    """
    user = plugin(tmp_path, program)
    spec = auth.ExecSpec(V1, str(tmp_path / "plugin"))
    assert user["exec"]["command"] == "./plugin"
    for seconds in growing(3):
        stuck = auth.Plugin(spec, {}, os.environ, auth.utc_now, deadline=timedelta(seconds=seconds))
        with pytest.raises(ClusterUnavailable, match=r"timeout: no output within \w+; run it once manually"):
            asyncio.run(stuck.ready())
        if (tmp_path / "pids").exists():
            break
    own, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_running(own)
    ends = time.monotonic() + PATIENCE  # its parent was waited for; it has been killed, and the kernel takes its time
    while is_running(child):
        assert time.monotonic() < ends


def is_running(pid: int) -> bool:
    """A process that ended and was not yet collected by its parent runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False


# Certificates


def certificate(folder: Path, name: str, authority: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
    """An authority, or one that it vouches for; good for 127.0.0.1."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    curve = "ec_paramgen_curve:prime256v1"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", curve, "-nodes", "-days", "2"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:api.lab", "-keyout", str(key)]
    signed: list[str] = []
    if authority is not None:
        signed = [
            "-CA",
            str(authority[0]),
            "-CAkey",
            str(authority[1]),
            "-addext",
            "basicConstraints=critical,CA:FALSE",
        ]
    subprocess.run([*new, *names, "-out", str(cert), *signed], check=True, capture_output=True)
    return cert, key


def over_tls(
    folder: Path,
    what: Callable[[Cluster], Awaitable[str]],
    user: Callable[[tuple[Path, Path]], dict[str, Any]],
    cluster: Callable[[Path], dict[str, Any]] = lambda authority: {"certificate-authority": authority.name},
    server: str = "server",
) -> ScriptedApi:
    authority = certificate(folder, "authority")
    cert, key = certificate(folder, server, authority)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority[0]))
    tls.load_cert_chain(str(cert), str(key))
    tls.verify_mode = ssl.CERT_OPTIONAL
    api = an_api()

    async def run() -> None:
        async with listening(api, tls):
            file = kubeconfig(folder / "config", api.address, user(authority), cluster(authority[0]))
            time = Time()
            one = Cluster(auth.from_files([file], None, os.environ, auth.utc_now), clock=time.clock, sleep=time.sleep)
            async with one.opened():
                assert await what(one) == "x"

    asyncio.run(run())
    return api


def test_a_certificate_in_files_is_shown_and_a_new_one_used_at_once(tmp_path: Path) -> None:
    made: list[tuple[Path, Path]] = []

    def user(authority: tuple[Path, Path]) -> dict[str, Any]:
        made.append(authority)
        certificate(tmp_path, "ann", authority)
        return {"client-certificate": "ann.crt", "client-key": "ann.key"}

    async def twice(cluster: Cluster) -> str:
        await get(cluster)
        (tmp_path / "ann.key").write_text("being written")
        await get(cluster)  # on the old connection: the pair does not fit just now
        new = certificate(tmp_path, "bob", made[0])
        for file, name in zip(new, ("ann.crt", "ann.key"), strict=True):
            file.replace(tmp_path / name)
        return await get(cluster)

    assert over_tls(tmp_path, twice, user).peers == ["ann", "ann", "bob"]


def test_a_certificate_in_the_kubeconfig_is_shown(tmp_path: Path) -> None:
    def user(authority: tuple[Path, Path]) -> dict[str, Any]:
        cert, key = (base64.b64encode(file.read_bytes()).decode() for file in certificate(tmp_path, "ann", authority))
        return {"client-certificate-data": cert, "client-key-data": key}

    def cluster(authority: Path) -> dict[str, Any]:
        return {"certificate-authority-data": base64.b64encode(authority.read_bytes()).decode()}

    assert over_tls(tmp_path, get, user, cluster).peers == ["ann"]


def test_a_plugins_certificate_is_shown_and_replaced(tmp_path: Path) -> None:
    def given(authority: tuple[Path, Path], name: str) -> dict[str, Any]:
        cert, key = certificate(tmp_path, name, authority)
        return {"clientCertificateData": cert.read_text(), "clientKeyData": key.read_text(), "token": ""}

    made: list[tuple[Path, Path]] = []

    def user(authority: tuple[Path, Path]) -> dict[str, Any]:
        made.append(authority)
        return plugin(tmp_path, **given(authority, "ann"))

    async def renewed(cluster: Cluster) -> str:
        await get(cluster)
        (tmp_path / "status").write_text(json.dumps(given(made[0], "bob")))
        assert await cluster._connections.log_in_again(1)
        return await get(cluster)

    api = over_tls(tmp_path, renewed, user)
    assert api.peers == ["ann", "bob"]
    assert {one.header("Authorization") for one in api.asked} == {None}


def test_a_server_that_nobody_vouches_for_is_not_talked_to(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    certificate(other, "authority")
    with pytest.raises(ClusterUnavailable, match=r"certificate verify failed.*check the certificate-authority"):
        over_tls(tmp_path, get, lambda _: {"token": "t"}, lambda _: {"certificate-authority": "other/authority.crt"})


def test_a_server_with_another_name_is_not_talked_to_unless_that_name_is_expected(tmp_path: Path) -> None:
    def named(name: str) -> Callable[[Path], dict[str, Any]]:
        return lambda authority: {"certificate-authority": str(authority), "tls-server-name": name}

    assert over_tls(tmp_path, get, lambda _: {}, named("api.lab")).peers == [None]
    with pytest.raises(ClusterUnavailable, match="cannot be reached"):
        over_tls(tmp_path, get, lambda _: {}, named("api.prod"))


def test_verification_is_skipped_where_the_kubeconfig_reports_it(tmp_path: Path) -> None:
    assert over_tls(tmp_path, get, lambda _: {}, lambda _: {"insecure-skip-tls-verify": True}).peers == [None]


# Inside a cluster


def test_inside_a_cluster_the_service_account_is_used_and_its_token_may_change(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "authority")
    cert, key = certificate(tmp_path, "server", authority)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(str(cert), str(key))
    api = ScriptedApi()
    api.says("GET /x", FINE, NO, FINE)
    account = tmp_path / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(authority[0].read_bytes())
    (account / "namespace").write_text("gpukeeper\n")
    (account / "token").write_text("old")

    async def run() -> Cluster:
        async with listening(api, tls):
            host, _, port = api.address.removeprefix("https://").partition(":")
            environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            cluster = Cluster.from_environment(environ, None, 20, 30, account=account)
            async with cluster.opened():
                await get(cluster)
                (account / "token").write_text("new")
                await get(cluster)
            return cluster

    cluster = asyncio.run(run())
    assert (cluster.place, cluster.namespace) == ("in-cluster", "gpukeeper")
    assert [one.header("Authorization") for one in api.asked] == ["Bearer old", "Bearer old", "Bearer new"]


def test_an_address_of_ipv6_is_written_as_one(tmp_path: Path) -> None:
    certificate(tmp_path, "ca")
    login = auth.from_service_account(
        tmp_path, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    )
    assert login.address == "https://[fd00::1]:443"
    assert login.namespace == "default"


def test_a_proxy_of_the_kubeconfig_is_used(tmp_path: Path) -> None:
    """The request arrives at the proxy, with the cluster's address in it."""
    api = ScriptedApi()
    api.says("GET /x", FINE)

    async def run() -> str:
        async with listening(api):
            file = kubeconfig(tmp_path / "config", "http://cluster.invalid", {}, {"proxy-url": api.address})
            cluster = Cluster(auth.from_files([file], None, {}, auth.utc_now))
            async with cluster.opened():
                return await get(cluster)

    assert asyncio.run(run()) == "x"
    assert api.asked[0].header("Host") == "cluster.invalid"
