"""The dashboard over real daemon parts in one process: no sockets, no web process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from starlette.applications import Starlette
from starlette.testclient import TestClient

from gpukeeper.engine.reclaim import reclaim
from gpukeeper.engine.requests import Request
from gpukeeper.interfaces.daemon.web import WebProcess
from gpukeeper.interfaces.link import Answer, Credentials, Question, SiteSettings, SourceSettings
from gpukeeper.interfaces.web.application import make_app
from gpukeeper.interfaces.web.security import Bucket
from gpukeeper.interfaces.web.source import Source
from gpukeeper.ledger.logins import LoginKind, open_logins
from gpukeeper.model.subject import State
from gpukeeper.views.live import MachineView, difference
from gpukeeper.wiring.session import Session, open_session
from tests.cli.fleet import Fleet, ago

HOUR = timedelta(hours=1)
POLICY = "preset: ds01\nmode: enforce\nscope: {docker: {}}\nadmins: [root]\n"


class InProcess(Source):
    def __init__(self, web: WebProcess, *, anonymous: bool, site: SiteSettings) -> None:
        key = b"k" * 32
        super().__init__(SourceSettings(key=key, anonymous=anonymous, session_seconds=3600, version="0", site=site))
        self.web = web
        self._sent: MachineView | None = None
        self.publishes = True  # False: the view stays as it is

    @property
    def revocations(self) -> int:
        return self.web.revocations.count

    async def ask(self, credentials: Credentials, machine: str, request: Request) -> Answer:
        answer = await self.web.answer(Question(id=1, credentials=credentials, request=request))
        if self.publishes:
            await self.publish()
        return answer

    async def publish(self) -> None:
        view = await self.web.view()
        self.change(difference(self._sent, view), view)
        self._sent = view


class Dashboard:
    """`ann` has a running workload, `bob` one that ended; `root` is an admin."""

    def __init__(self, client: TestClient, app: Starlette, session: Session, logins: Any, fleet: Fleet) -> None:
        self.client, self.app, self.session, self.logins, self.fleet = client, app, session, logins, fleet
        self._tokens: dict[str, str] = {}

    def call(self, work: Callable[[], Any]) -> Any:
        assert self.client.portal is not None
        return self.client.portal.call(work)

    def token(self, person: str, kind: LoginKind = LoginKind.TOKEN, lasts: timedelta = HOUR) -> str:
        now = self.session.keeper.clock.now()
        made = self.call(lambda: self.logins.create(kind, person, 0 if person == "root" else 1000, now, lasts, "test"))
        return cast(str, made.secret)

    def bearer(self, person: str) -> dict[str, str]:
        if person not in self._tokens:
            self._tokens[person] = self.token(person)
        return {"authorization": f"Bearer {self._tokens[person]}"}

    def get(self, path: str, person: str = "", **more: Any) -> Any:
        headers = {**(self.bearer(person) if person else {}), **more.pop("headers", {})}
        return self.client.get(path, headers=headers, **more)

    def post(self, path: str, person: str = "", **more: Any) -> Any:
        headers = {**(self.bearer(person) if person else {}), **more.pop("headers", {})}
        return self.client.post(path, headers=headers, **more)

    def workload(self, name: str) -> str:
        found = self.get("/api/v1/workloads", "root").json()["workloads"]
        return cast(str, next(one["id"] for one in found if one["name"] == name))


@contextmanager
def dashboard(
    folder: Path,
    *,
    anonymous: bool = True,
    policy: str = POLICY,
    client_address: str = "10.0.0.5",
    raising: bool = True,
    limits: Bucket | None = None,
) -> Iterator[Dashboard]:
    fleet = Fleet(folder, policy)
    fleet.add(
        "train", state=State.RUNNING, started=ago(hours=3), owner="ann", devices=("GPU-1",), labels={"k": "secret"}
    )
    fleet.ended("eval", days=1, owner="bob")
    session = open_session(fleet.policy, write=True, environ=fleet.env())
    session.record_hours(lambda words: None)
    logins = open_logins(session.ledger.path)
    listener = SimpleNamespace(getsockname=lambda: ("127.0.0.1" if anonymous else "10.0.0.1", 80))
    session.keeper.live.enabled = session.keeper.request_state.enabled = True
    web = WebProcess(session, logins, cast(Any, listener), lambda words: None)
    site = asyncio.run(web.settings.setup()).site if "web:" in policy else SiteSettings()
    source = InProcess(web, anonymous=anonymous, site=site)
    app = make_app(source)
    if limits is not None:
        app.state.site.reads = app.state.site.changes = app.state.site.logins = limits

    async def begin() -> None:
        await reclaim(session.keeper, session.keeper.platforms[0], session.book, act=False)
        await source.publish()

    try:
        with TestClient(app, client=(client_address, 50000), raise_server_exceptions=raising) as client:
            made = Dashboard(client, app, session, logins, fleet)
            made.call(begin)
            yield made
    finally:
        web.close()
        logins.close()
        session.close()
