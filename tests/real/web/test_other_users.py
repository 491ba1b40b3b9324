"""What another user of the machine can do to a dashboard on loopback, over real sockets of two users."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet
from tests.real.web.serving import DEADLINE, Serving, until

USER = 64  # connections that one user may have
ADMIN, OTHER = 5001, 5002  # need no entry in /etc/passwd
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="processes of other users need root")


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """What is opened meanwhile is that user's."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class Shown(Serving):
    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def link(self, who: str) -> str:
        """The path that logs in."""
        found = (re.search(rf"log in as .*{who}:.*?:\d+(/\S+)", line) for line in self.log)
        return next((one[1] for one in found if one), "")

    def ask(self, uid: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        """As that user: the status, a cookie or where it sends to, and the page."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)) as connection:
            with as_user(uid):
                connection.connect()
            connection.request(method, path, headers=headers)
            reply = connection.getresponse()
            return (
                reply.status,
                reply.getheader("set-cookie") or reply.getheader("location") or "",
                reply.read().decode(),
            )


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    fleet = Fleet(tmp_path_factory.mktemp("demo"))
    served = Shown(fleet.start("demo", "--web", "0"))
    try:
        until(lambda: served.link("an admin"), "an admin can log in")
        yield served
    finally:
        served.end()


def test_the_cookie_of_an_admin_is_worth_nothing_to_another_user(shown: Shown) -> None:
    status, cookie, page = shown.ask(ADMIN, shown.link("an admin"), "POST")
    assert status == 303, page
    stolen = {"cookie": cookie.partition(";")[0]}
    assert "Log out" in shown.ask(ADMIN, "/", **stolen)[2]
    assert shown.ask(ADMIN, "/backtest", **stolen)[0] == 200, "a page for admins"
    secret = stolen["cookie"].partition("=")[2].rpartition(".")[0]
    for sent in (stolen, {"authorization": f"Bearer {secret}"}):
        status, _, page = shown.ask(OTHER, "/", **sent)
        assert "Log out" not in page
        assert shown.ask(OTHER, "/backtest", **sent)[0] != 200
    until(lambda: any(f"uid {OTHER}" in line for line in shown.log), "the daemon logs it")
    assert "Log out" in shown.ask(ADMIN, "/", **stolen)[2], "the admin goes on"


def test_thousands_of_connections_of_one_user_leave_the_dashboard_to_the_others(shown: Shown) -> None:
    """Each of them asks for a page and never reads it, which keeps the connection busy for as long as it can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8_192, hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(3_000):
            with as_user(OTHER):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", shown.port), DEADLINE))
            with suppress(ConnectionError):
                one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20)
        assert shown.ask(ADMIN, "/healthz")[0] == 200
        assert shown.ask(ADMIN, "/")[0] == 200
        (web,) = shown.web_pids()
        assert len(list(Path(f"/proc/{web}/fd").iterdir())) < USER + 32, "descriptors, its own included"
