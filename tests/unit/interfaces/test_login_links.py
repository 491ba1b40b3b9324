"""Where the link of `gpukeeper login` leads."""

from __future__ import annotations

import asyncio
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.daemon.requests import Identity, WebLogins, log_in
from gpukeeper.interfaces.http_pages import Endpoint
from gpukeeper.ledger.logins import open_logins
from gpukeeper.lifecycle.settings import Rulebook


@pytest.mark.parametrize(
    ("address", "policy", "begins"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:8790/login/"),  # as the log prints it, so that the cookie counts there
        ("::1", "", "http://[::1]:8790/login/"),
        ("0.0.0.0", "", "http://localhost:8790/login/"),
        ("10.0.0.5", "", "http://10.0.0.5:8790/login/"),
        ("127.0.0.1", "web: {url: https://gpu.example}", "https://gpu.example/login/"),
    ],
)
def test_a_link_leads_to_the_address_that_browsers_use(address: str, policy: str, begins: str, tmp_path: Path) -> None:
    logins = open_logins(tmp_path / "state" / "ledger.db")
    book = Rulebook(load_text(f"scope: {{docker: {{}}}}\n{policy}", "test").policy)
    with socket.socket() as listener:
        found = WebLogins(logins, Endpoint(port=8790, address=address), listener)
        asked = log_in(found, book, Identity(name="ann", uid=1000), Request(verb="login"), datetime.now(UTC))
        reply = asyncio.run(asked)
    logins.close()
    assert reply.done
    assert reply.token.startswith(begins)
