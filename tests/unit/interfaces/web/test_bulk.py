"""Hold, release or stop several workloads: selected, previewed, confirmed; each with its own line and result."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpukeeper.engine.requests import Request, fulfil
from gpukeeper.interfaces.link import Answer, Credentials, Person
from gpukeeper.interfaces.web.pages.bulk import MOST_KEPT, BulkItem, BulkRun, BulkRuns
from gpukeeper.interfaces.web.security import COOKIE, Signer
from gpukeeper.interfaces.web.source import SourceLost
from gpukeeper.ledger.logins import LoginKind
from gpukeeper.model.errors import LeaseHeld
from gpukeeper.model.subject import State
from tests.cli.fleet import ago
from tests.unit.interfaces.web.sites import Dashboard, dashboard


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Dashboard]:
    with dashboard(tmp_path) as made:
        yield made


def selected(site: Dashboard, action: str, *names: str, person: str = "root", **more: str) -> Any:
    ids = [site.workload(name) for name in names]
    return site.post("/bulk", person, data={"action": action, "id": ids, **more})


def confirmed(site: Dashboard, preview: Any, person: str = "root") -> str:
    """The page with the results, when all are there."""
    assert preview.status_code == 200, preview.text
    (address,) = re.findall(r'action="(/bulk/[^"]+)"', preview.text)
    begun = site.post(address, person, follow_redirects=False)
    assert begun.status_code == 303
    token = address.rpartition("/")[2]
    site.call(lambda: finished(site, token))
    shown = site.get(begun.headers["location"], person)
    assert shown.status_code == 200
    return str(shown.text)


async def finished(site: Dashboard, token: str) -> None:
    await site.app.state.bulk.of("root", token).task


def lines(site: Dashboard, kind: str) -> list[dict[str, Any]]:
    return list(site.get(f"/api/v1/ledger?type={kind}", "root").json()["lines"])


def test_only_admins_can_select(site: Dashboard) -> None:
    assert 'type="checkbox"' in site.get("/workloads", "root").text
    for person in ("", "ann", "bob"):
        assert 'type="checkbox"' not in site.get("/workloads", person).text
    assert site.post("/bulk", "ann", data={"action": "hold", "id": site.workload("train")}).status_code == 403
    assert site.post("/bulk", data={"action": "hold"}).status_code == 401
    everything = site.get("/workloads?select=all", "root").text
    assert everything.count(" checked>") == everything.count('name="id"') == 2
    assert " checked>" not in site.get("/workloads", "root").text


def test_the_dashboard_of_a_fleet_offers_no_selection(site: Dashboard) -> None:
    """A preview is made by the daemon of a machine; the copy of a fleet cannot."""
    source = site.app.state.site.source
    source.settings = msgspec.structs.replace(source.settings, fleet=True)
    assert 'type="checkbox"' not in site.get("/workloads", "root").text


def test_a_preview_does_nothing_and_says_what_is_refused(site: Dashboard) -> None:
    page = selected(site, "stop", "train", "eval").text
    assert "Nothing was done yet" in page
    assert "stop docker/node-1/train" in page
    assert "it is not running (ended)" in page
    assert "1 of 2 would be refused" in page
    assert site.get(f"/api/v1/workloads/{site.workload('train')}", "root").json()["state"] == "running"
    for kind in ("intent", "outcome", "hold", "release"):
        assert lines(site, kind) == []


def test_what_was_previewed_is_done_with_a_line_and_a_result_each(site: Dashboard) -> None:
    page = confirmed(site, selected(site, "hold", "train", "eval", hours="2", reason="move"))
    assert "Finished: 2 done." in page
    assert page.count("is held until") == 2
    held = lines(site, "hold")
    assert {(one["by"], one["hold"]["reason"]) for one in held} == {("root", "move")}
    assert len(held) == 2
    assert all(one["via"].startswith("web, token ") for one in held)
    assert "2 done" in confirmed(site, selected(site, "release", "train", "eval"))
    assert len(lines(site, "release")) == 2
    assert "no hold that root may end" in selected(site, "release", "train").text


def test_one_that_failed_does_not_keep_the_others_from_being_done(site: Dashboard) -> None:
    page = confirmed(site, selected(site, "stop", "train", "eval"))
    assert "Finished: 1 done, 1 refused." in page
    assert [one["result"] for one in lines(site, "outcome")] == ["reclaimed"]


def test_what_changed_since_the_preview_is_left_alone(site: Dashboard, tmp_path: Path) -> None:
    preview = selected(site, "stop", "train")
    hold = selected(site, "hold", "train", "eval")
    site.fleet.add("train", state=State.RUNNING, started=ago(minutes=1), owner="ann", devices=("GPU-1",))
    for page, summary in ((confirmed(site, preview), "1 not done"), (confirmed(site, hold), "1 done, 1 not done")):
        assert f"Finished: {summary}." in page
        assert "has changed since the preview; nothing was done" in page
    assert lines(site, "outcome") == []
    assert [one["ref"]["name"] for one in lines(site, "hold")] == ["eval"]


def test_a_preview_is_confirmed_once_by_the_person_who_made_it(site: Dashboard) -> None:
    preview = selected(site, "hold", "train")
    (address,) = re.findall(r'action="(/bulk/[^"]+)"', preview.text)
    assert site.post(address, "ann").status_code == 403
    assert site.get(address, "ann").status_code == 404
    assert site.get(address, "root").status_code == 404  # not confirmed yet
    assert "1 done" in confirmed(site, preview)
    again = site.post(address, "root")
    assert again.status_code == 409
    assert "confirmed already" in again.text
    assert site.get(address, "ann").status_code == 404
    assert site.post("/bulk/unknown", "root").status_code == 409


def test_an_old_preview_is_refused(site: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    preview = selected(site, "hold", "train")
    (address,) = re.findall(r'action="(/bulk/[^"]+)"', preview.text)
    monkeypatch.setattr("gpukeeper.interfaces.web.pages.bulk.PREVIEW_LASTS", -1.0)
    assert site.post(address, "root").status_code == 409
    assert lines(site, "hold") == []


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"action": "hold"}, "No workload is selected"),
        ({"action": "remove", "id": "x"}, "Choose what to do: hold, release, stop"),
        ({"action": "hold", "id": "x", "hours": "many"}, "is not a number of hours"),
        ({"action": "stop", "id": [str(n) for n in range(101)]}, "101 workloads are selected; at most 100 at once"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(site: Dashboard, form: dict[str, Any], words: str) -> None:
    reply = site.post("/bulk", "root", data=form)
    assert reply.status_code == 400
    assert words in reply.text
    assert "Nothing was done" in reply.text


def test_what_does_not_exist_any_more_is_refused_in_the_preview(site: Dashboard) -> None:
    page = site.post("/bulk", "root", data={"action": "hold", "id": "0" * 18})
    assert page.status_code == 200
    assert "it does not exist any more" in page.text
    assert "<button class=" not in page.text.partition("<main")[2]


def test_the_forms_need_the_csrf_token(site: Dashboard) -> None:
    secret, signer = site.token("root", LoginKind.SESSION), Signer(b"k" * 32)
    cookie = {"cookie": f"{COOKIE}={signer.sign(secret)}"}
    form = {"action": "hold", "id": site.workload("train")}
    assert site.client.post("/bulk", headers=cookie, data=form).status_code == 403
    page = site.client.post("/bulk", headers=cookie, data={**form, "csrf": signer.csrf(secret)})
    (address,) = re.findall(r'action="(/bulk/[^"]+)"', page.text)
    assert site.client.post(address, headers=cookie).status_code == 403
    assert lines(site, "hold") == []


def test_the_daemon_decides_about_each(site: Dashboard) -> None:
    """Whatever the web process believes: who is no admin gets no preview, and may not act on the work of others."""
    asked = Request(verb="preview", action="stop", workload="train")
    secret = site.token("bob")
    source = site.app.state.site.source
    answer = site.call(lambda: source.ask(Credentials(secret=secret), "", asked))
    assert (answer.done, answer.words) == (False, "only an admin may preview requests for several workloads")


def test_a_stop_is_refused_in_the_preview_while_everything_is_paused_or_another_holds_it(site: Dashboard) -> None:
    assert site.post("/api/v1/pause", "root", json={"reason": "move"}).status_code == 200
    assert "everything is paused" in selected(site, "stop", "train").text
    assert site.post("/api/v1/resume", "root", json={}).status_code == 200
    assert site.post(f"/api/v1/workloads/{site.workload('train')}/hold", "ann", json={}).status_code == 200
    assert "is held by ann" in selected(site, "stop", "train").text
    assert "release the hold of ann." in selected(site, "release", "train").text


def answer(words: str, **more: Any) -> Answer:
    return Answer(id=1, person=Person(), done=not more, words=words, **more)


def test_a_pass_at_the_same_place_is_waited_for_and_a_lost_daemon_is_one_result_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpukeeper.interfaces.web.pages.bulk.LEASE_PAUSE", 0.0)
    asked: list[tuple[str, str]] = []

    async def ask(machine: str, request: Request) -> Answer:
        asked.append((request.workload, request.token))
        if request.workload == "lost":
            raise SourceLost("the daemon did not answer")
        if not request.token:
            return answer("stop it", exit_code=2, token="t")
        return answer("another pass", exit_code=LeaseHeld.exit_code) if len(asked) < 4 else answer("stopped")

    async def do() -> BulkRun:
        runs = BulkRuns()
        items = tuple(BulkItem("m", one, one, "ann", "", one, "r") for one in ("busy", "lost"))
        run = runs.add("root", "stop", None, "", items)
        runs.begin(run, ask)
        assert runs.busy("root")
        assert not runs.busy("ann")
        assert run.task is not None
        await run.task
        return run

    run = asyncio.run(do())
    assert [(one.state, one.words) for one in run.results] == [
        ("done", "stopped"),
        ("not done", "the daemon did not answer. See the history"),
    ]
    assert asked == [("busy", ""), ("busy", "t")] * 2 + [("lost", "")]


def test_previews_are_bounded_and_the_oldest_is_forgotten() -> None:
    runs = BulkRuns()
    made = [runs.add("root", "hold", None, "", ()) for _ in range(MOST_KEPT + 5)]
    assert [runs.of("root", one.token) is None for one in made] == [True] * 5 + [False] * MOST_KEPT


@pytest.mark.parametrize("verb", ["hold", "release", "stop", "remove"])
def test_a_request_with_the_revision_of_another_object_does_nothing(site: Dashboard, verb: str) -> None:
    keeper, book = site.session.keeper, site.session.book
    request = Request(verb=verb, workload="train", revision="0" * 24)
    reply = site.call(lambda: fulfil(keeper, book, "root", request, uid=0))
    assert not reply.done
    assert "has changed since the preview; nothing was done" in reply.words
    assert [lines(site, kind) for kind in ("hold", "release", "intent")] == [[], [], []]
