"""A whole DS01 host after the import: the rules decide over time about every kind of container that is there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpukeeper.config.importing.ds01 import EXEMPTIONS, OVERRIDES, Companions, import_limits
from gpukeeper.config.importing.result import Imported
from gpukeeper.config.load import load_text
from gpukeeper.config.units import read_span, span_in_words
from gpukeeper.model.decision import Action
from gpukeeper.model.policy import Policy
from gpukeeper.model.subject import State, Subject
from gpukeeper.platforms.docker.owners import KnownUsers, owned
from gpukeeper.platforms.docker.translate import GpuRequest, PlaceAndTime, container_subject
from gpukeeper.views.trial import TrialInput, TrialView, WorkloadWords, trial
from tests.unit.config.importing.ds01_table import NEVER, REPORTED, TABLE, Row, as_markdown, engine_parts
from tests.unit.platforms.docker.examples import container, ended, facts

HOST = Path(__file__).parent / "ds01_host"
GUIDE = Path(__file__).parents[4] / "docs" / "how-to" / "migrate-from-other-tools.md"
NOW = datetime(2026, 9, 10, 12, 0, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
USERS = {1000 + n: name for n, name in enumerate(("stu", "new", "res", "fac", "labadmin", "free", "slow", "grant"))}
USERS |= {1100: "always", 1101: "past"}


def of_the_host() -> Imported:
    beside = Companions(
        members={path.stem: path.read_text() for path in (HOST / "groups").iterdir()},
        overrides=(HOST / OVERRIDES).read_text(),
        exemptions=(HOST / EXEMPTIONS).read_text(),
    )
    return import_limits((HOST / "resource-limits.yaml").read_text(), "resource-limits.yaml", beside)


@pytest.fixture(scope="module")
def found() -> Imported:
    return of_the_host()


@pytest.fixture(scope="module")
def policy(found: Imported) -> Policy:
    return load_text(found.policy, "imported").policy


def subject_of(row: Row, policy: Policy, started: datetime, **state: str) -> Subject:
    parts = engine_parts(row, started.isoformat().replace("+00:00", "Z"))
    parts["state"] |= state
    one = container(**parts)
    homes = {f"/home/{name}/x": uid for uid, name in USERS.items()}
    people = KnownUsers(USERS, frozenset(USERS.values()), homes if row.home_of else {})
    known = {} if row.gpu else {"asks": GpuRequest(), "devices": ()}
    owner = owned(one, people, policy.owner_labels, row.image_labels)
    return container_subject(one, facts(owned=owner, image_labels=row.image_labels, **known), PlaceAndTime("ds01", NOW))


def course_of(policy: Policy, subject: Subject, *, busy: bool = False) -> TrialView:
    return trial(policy, TrialInput(words=WorkloadWords(busy=busy), subject=subject), NOW)


def stop_by(rule: str, seen: TrialView) -> str:
    acts = [one for one in seen.timeline if one.rule == rule]
    stop = next((one for one in acts if one.action is Action.STOP), None)
    if stop is not None:
        return span_in_words(stop.at - NOW)
    return REPORTED if any(one.action is Action.KEEP for one in acts) else NEVER


def results(row: Row, policy: Policy) -> tuple[str, str, str]:
    """Idle from now on, after ten hours of use; and in use since it was started now."""
    idle = course_of(policy, subject_of(row, policy, NOW - 10 * HOUR))
    busy = course_of(policy, subject_of(row, policy, NOW), busy=True)
    return idle.class_, stop_by("idle", idle), stop_by("max_runtime", busy)


def as_span(cell: str) -> timedelta:
    return timedelta.max if cell in (NEVER, REPORTED) else read_span(cell)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.what)
def test_every_container_is_decided_as_in_the_table_and_none_earlier_than_by_ds01(row: Row, policy: Policy) -> None:
    class_, idle, runtime = results(row, policy)
    assert (class_, idle, runtime) == (row.class_, *row.ours)
    earlier = [
        ours for ours, theirs in zip((idle, runtime), row.theirs, strict=True) if as_span(ours) < as_span(theirs)
    ]
    assert bool(earlier) == row.earlier


def test_what_is_earlier_is_listed(found: Imported) -> None:
    (row,) = [row for row in TABLE if row.earlier]
    assert "`devcontainer.metadata`" in row.what
    assert [one.what for one in found.not_translated if "devcontainer.metadata" in one.why] == ["container_types"]


def test_everything_that_is_not_translated_is_in_the_comments_of_the_policy(found: Imported) -> None:
    comments = " ".join(line.removeprefix("#").strip() for line in found.policy.splitlines() if line.startswith("#"))
    assert found.not_translated
    for one in found.not_translated:
        assert f"{one.where}: {one.what}" in comments
        assert " ".join(one.why.split()) in comments


def test_what_was_created_or_stopped_is_not_removed_earlier(policy: Policy) -> None:
    """There: after 30 minutes in both cases. A stop by hand keeps the GPU for its owner first."""
    row = TABLE[0]
    created = subject_of(row, policy, NOW, Status="created", Running=False, StartedAt="0001-01-01T00:00:00Z")
    assert created.state is State.CREATED
    assert [(one.action, one.at - NOW) for one in course_of(policy, created).timeline] == [(Action.REMOVE, HOUR / 2)]
    stopped = subject_of(row, policy, NOW - HOUR, **{**ended(ExitCode=143), "FinishedAt": "2026-09-10T12:00:00Z"})
    assert [(one.action, one.at - NOW) for one in course_of(policy, stopped).timeline][-1] == (Action.REMOVE, 7 * DAY)


def test_the_preset_alone_keeps_dev_containers_for_a_week() -> None:
    """C8.4: whatever the limits of their owner's group."""
    groups = "groups: {student: {members: [stu]}, faculty: {members: [fac]}}\nowner_labels: [ds01.user]\n"
    for preset in ("ds01", "shared-host"):
        policy = load_text(f"preset: {preset}\nmode: enforce\nscope: {{docker: {{}}}}\n{groups}").policy
        for row in (one for one in TABLE if one.class_ == "devcontainer"):
            seen = course_of(policy, subject_of(row, policy, NOW), busy=True)
            (limit,) = [one for one in seen.timeline if one.action in (Action.STOP, Action.KEEP)]
            assert (limit.rule, limit.at - NOW) == ("max_runtime", 7 * DAY), (preset, row.what)


def test_the_guide_has_this_table() -> None:
    assert as_markdown() in GUIDE.read_text()
