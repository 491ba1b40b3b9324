"""A daemon with a dashboard, as its policy serves it: TLS, a reverse proxy, hosts, and what is refused at the start."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gpukeeper.model.subject import State
from tests.cli.fleet import POLICY, Fleet, ago
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

ME = pwd.getpwuid(os.getuid()).pw_name
OTHER = "nobody" if ME != "nobody" else "root"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


class Served:
    def __init__(self, fleet: Fleet, url: str, log: list[str]) -> None:
        self.fleet, self.url, self.log = fleet, url, log
        self.context: ssl.SSLContext | None = None

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
        """Headers with underscores for hyphens."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=PATIENCE, context=self.context)
        else:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            sent["content-type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), reply.msg
        finally:
            connection.close()


@contextmanager
def serving(folder: Path, web: str, *words: str) -> Iterator[Served]:
    fleet = Fleet(folder, f"{POLICY}web: {web}\n")
    fleet.add("train", state=State.RUNNING, started=ago(hours=3), owner=ME, devices=("GPU-1",))
    daemon = fleet.start("serve", "--web", "0", *words)
    try:
        yield _served(fleet, daemon)
    finally:
        daemon.terminate()
        daemon.communicate(timeout=PATIENCE)


def _served(fleet: Fleet, daemon: subprocess.Popen[str]) -> Served:
    assert daemon.stderr is not None
    url, log = "", []
    for line in daemon.stderr:
        log.append(line)
        if found := re.search(r"dashboard on (https?://[^/\s]+)", line):
            url = found[1]
        if "listening on" in line:
            return _ready(Served(fleet, url.replace("0.0.0.0", "127.0.0.1"), log))
    pytest.fail(f"the daemon ended: {log}")


def _ready(served: Served) -> Served:
    """Once the first pass was published."""
    served.context = ssl.create_default_context()
    served.context.check_hostname, served.context.verify_mode = False, ssl.CERT_NONE
    token = served.fleet.run("login", "--token", "wait", "--json").json()["secret"]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        status, text, _ = served.ask("GET", "/api/v1/workloads", Authorization=f"Bearer {token}")
        if status == 200 and json.loads(text)["workloads"]:
            return served
    pytest.fail("no workload was published within 60 s")


@needs_openssl
def test_https_with_a_certificate_from_files(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "localhost")
    web = f"{{url: 'https://localhost', tls: {{certificate: {certificate}, key: {key}}}}}"
    with serving(tmp_path, web) as served:
        assert served.url.startswith("https://127.0.0.1:")
        served.url = served.url.replace("127.0.0.1", "localhost")
        served.context = ssl.create_default_context(cafile=str(certificate))
        status, text, headers = served.ask("GET", "/")
        assert (status, "GPUs" in text) == (200, True)
        assert headers["strict-transport-security"] == "max-age=2592000"
        link = served.fleet.run("login", "--json").json()["secret"]
        assert link.startswith("https://localhost/login/")
        status, _, headers = served.ask("POST", urlsplit(link).path)
        assert status == 303
        assert {"Secure", "HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))
        served.context = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            served.ask("GET", "/")


def test_the_header_of_a_proxy_on_this_machine_and_its_line_in_the_ledger(tmp_path: Path) -> None:
    web = f"{{proxy: {{header: X-Forwarded-User, from: [127.0.0.1], user: {ME}}}}}"
    with serving(tmp_path, web) as served:
        status, text, _ = served.ask("GET", "/api/v1/workloads", X_Forwarded_User=ME, X_Forwarded_For="203.0.113.9")
        assert status == 200
        id_ = json.loads(text)["workloads"][0]["id"]
        page, hold = f"/workload/{id_}", f"/api/v1/workloads/{id_}/hold"
        body, proxied = {"seconds": 3600}, {"X_Forwarded_User": ME, "X_Forwarded_For": "198.51.100.1, 203.0.113.9"}
        assert served.ask("POST", hold, body, **proxied)[0] == 403  # no CSRF token
        found = re.search(r'name="csrf" value="([0-9a-f]+)"', served.ask("GET", page, **proxied)[1])
        assert found is not None
        status, text, _ = served.ask("POST", hold, body, **proxied, X_CSRF_Token=found[1])
        assert (status, json.loads(text)["done"]) == (200, True)
        assert served.ask("GET", "/", X_Forwarded_User="ann bob")[0] == 400
        assert served.ask("GET", "/", X_Forwarded_User="")[0] == 303  # the proxy reports nobody: log in
        (line,) = served.fleet.lines("hold")
        assert (line["by"], line["via"]) == (ME, "web, proxy 127.0.0.1, from 203.0.113.9")


def test_the_header_counts_from_the_proxys_user_only(tmp_path: Path) -> None:
    web = f"{{proxy: {{header: X-Forwarded-User, from: [127.0.0.1], user: {OTHER}}}}}"
    with serving(tmp_path, web) as served:
        status, text, _ = served.ask("GET", "/", X_Forwarded_User="root")
        assert status == 200  # as everybody on this machine
        assert "Log out" not in text
        assert served.ask("POST", "/api/v1/pause", {"reason": "x"}, X_Forwarded_User="root")[0] == 401
        metrics = served.ask("GET", "/metrics")[1]
        assert 'reason="proxy header"} 2' in metrics
        assert "gpukeeper_info{" in metrics


def test_on_loopback_a_name_of_another_site_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, "{url: 'https://gpu.example'}") as served:
        status, text, _ = served.ask("GET", "/api/v1/gpus", Host="evil.example")
        assert status == 421
        assert 'not "evil.example"' in json.loads(text)["error"]
        for host, expected in (("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:9", 200), ("gpu.example", 401)):
            assert served.ask("GET", "/api/v1/gpus", Host=host)[0] == expected, host


def test_without_encryption_other_machines_are_not_served(tmp_path: Path) -> None:
    ran = Fleet(tmp_path).run("serve", "--web", "0.0.0.0:0")
    assert ran.code == 2
    assert "without encryption" in ran.err
    assert "web.plain_http: true" in ran.err


def test_without_encryption_on_request_there_is_a_warning(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, f"{POLICY}web: {{plain_http: true}}\n")
    fleet.add("train", state=State.RUNNING, started=ago(hours=3), owner=ME, devices=("GPU-1",))
    daemon = fleet.start("serve", "--web", "0.0.0.0:0")
    try:
        served = _served(fleet, daemon)
        assert any("WARNING: the dashboard is served on 0.0.0.0 without TLS" in line for line in served.log)
        assert served.ask("GET", "/api/v1/gpus")[0] == 401
        token = fleet.run("login", "--token", "test", "--json").json()["secret"]
        health = json.loads(served.ask("GET", "/api/v1/health", Authorization=f"Bearer {token}")[1])
        assert "without TLS" in health["web_warnings"][0]
    finally:
        daemon.terminate()
        daemon.communicate(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("web", "words"),
    [
        ("{user: no-such-user}", 'this machine has no user "no-such-user"'),
        ("{proxy: {header: X-User, from: [127.0.0.1], user: no-such-user}}", "web.proxy.user: this machine has no"),
        ("{tls: {certificate: FOLDER/a.crt, key: FOLDER/a.key}}", "could not be read: No such file"),
    ],
)
def test_what_this_machine_does_not_have_is_refused_at_the_start(tmp_path: Path, web: str, words: str) -> None:
    ran = Fleet(tmp_path, f"{POLICY}web: {web.replace('FOLDER', str(tmp_path))}\n").run("serve", "--web", "0")
    assert ran.code == 2
    assert words in ran.err


@needs_openssl
def test_a_key_that_others_can_read_or_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "localhost")
    other = tmp_path / "other"
    other.mkdir()
    key.chmod(0o644)
    fleet = Fleet(tmp_path, f"{POLICY}web: {{tls: {{certificate: {certificate}, key: {key}}}}}\n")
    assert "can be read by others (mode 0644)" in fleet.run("serve", "--web", "0").err
    fleet.write_policy(
        f"{POLICY}web: {{tls: {{certificate: {certificate}, key: {make_certificate(other, 'x')[1]}}}}}\n"
    )
    assert "the key belongs to another certificate" in fleet.run("serve", "--web", "0").err
    assert "the key belongs to another certificate" in fleet.run("doctor").out
    fleet.write_policy(f"{POLICY}web: {{tls: {{certificate: {certificate}, key: {key}}}}}\n")
    key.chmod(0o600)
    key.write_text("no key")
    assert "one of them is not a PEM file" in fleet.run("doctor").out


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName=DNS:{name}"),
        ],
        check=True,
        capture_output=True,
    )
    key.chmod(0o600)
    return certificate, key
