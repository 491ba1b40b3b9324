"""One machine of files with a daemon that copies to the fleet database, and accepts requests from it."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from gpukeeper.ledger.copy.inbox import SignedRequest, ask, reply_to, sign_request
from gpukeeper.model.subject import State
from tests.cli.fleet import Fleet, ago
from tests.real.postgres.fleet import FleetDatabase, wait_for

POLICY = """\
preset: development
mode: enforce
scope: {docker: {}}
admins: [root, ADMIN]
schedule: {every: 5s}
fleet:
  copy_to: COPY_TO
  password_file: PASSWORD
  machine: MACHINE
  request_key_file: KEY
  same_users: SAME
"""


class Daemon:
    """One machine of files, with its daemon."""

    def __init__(
        self, database: FleetDatabase, folder: Path, name: str, *, same_users: bool = True, key: str = ""
    ) -> None:
        self.database, self.name = database, name
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir()
        self.key_file = folder / "key"
        self.key = key or secrets.token_hex(32)
        self.key_file.write_text(self.key + "\n")
        self.key_file.chmod(0o600)
        settings = database.add(name)
        words = {
            "COPY_TO": settings.address,
            "PASSWORD": str(settings.password_file),
            "MACHINE": name,
            "KEY": str(self.key_file),
            "SAME": str(same_users).lower(),
        }
        text = POLICY
        for word, value in words.items():
            text = text.replace(word, value)
        self.fleet = Fleet(folder, text)
        self.fleet.add(
            "train", state=State.RUNNING, created=ago(hours=1), started=ago(hours=1), owner="ann", devices=("GPU-1",)
        )

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        child = self.process = self.fleet.start("serve")
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=60)

    def signed(self, verb: str = "hold", person: str = "ann", **more: Any) -> tuple[datetime, str, str]:
        now = datetime.now(UTC)
        request = {"verb": verb, "workload": "train", "seconds": 3600, "reason": "through the fleet"}
        given: dict[str, Any] = {
            "machine": self.name,
            "nonce": secrets.token_hex(16),
            "issued": now,
            "expires": now + timedelta(minutes=2),
            "person": person,
            "realm": "web-1",
            "request": msgspec.Raw(msgspec.json.encode(request)),
        } | {key: value for key, value in more.items() if key != "key"}
        return (given["expires"], *sign_request(SignedRequest(**given), more.get("key", self.key)))

    def ask(self, expires: datetime, document: str, signature: str) -> dict[str, Any]:
        """As the web server does. The reply, with its state."""
        with self.database.connect("gpukeeper_web") as connection:
            number = ask(connection, self.name, expires, document, signature)
            found: list[Any] = []

            def replied() -> bool:
                found[:] = [reply_to(connection, number)]
                return found[0] is not None

            wait_for(replied, "a reply")
        return {"state": found[0].state, **json.loads(found[0].body)}

    def passes(self) -> list[dict[str, Any]]:
        """None while the daemon is still creating its ledger."""
        ran = self.fleet.run("ledger", "list", "--last", "1000", "--json", "--type", "pass")
        return list(ran.json()["lines"]) if ran.code == 0 else []

    def holds(self) -> list[dict[str, Any]]:
        return self.fleet.lines("hold")
