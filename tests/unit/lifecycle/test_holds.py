"""Who may hold what, and for how long (C8.5: a repeated touch held for ever)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gpukeeper.lifecycle.holds import NotAllowed, may_act, may_hold, may_touch, release_of
from gpukeeper.lifecycle.rules.hold import held_within
from gpukeeper.lifecycle.settings import Rulebook
from gpukeeper.model.decision import View
from gpukeeper.model.event import Held
from gpukeeper.model.fold import remember
from gpukeeper.model.subject import EMPTY, Hold, Memory
from gpukeeper.model.unknown import Unknown
from tests.unit.lifecycle.examples import BOOK, DAY, EVAL, HOUR, MINUTE, NOW, POLICY, subject


def view(*holds: Hold, **facts: Any) -> View:
    return View(subject(**facts), (), Memory(holds=holds))


def held(start: timedelta, end: timedelta, **more: Any) -> Hold:
    """A hold between two spans before now."""
    return Hold("ann", NOW - start, NOW - end, **more)


def test_the_owner_may_hold_for_as_long_as_the_class_allows() -> None:
    granted = may_hold(view(), BOOK, "ann", None, NOW, reason="lunch")
    assert granted == Hold("ann", NOW, NOW + DAY, "lunch", devices=("GPU-0",))


def test_the_owner_may_ask_for_less() -> None:
    granted = may_hold(view(), BOOK, "ann", 2 * HOUR, NOW)
    assert isinstance(granted, Hold)
    assert granted.until == NOW + 2 * HOUR


def test_nobody_holds_what_is_not_theirs() -> None:
    refused = may_hold(view(), BOOK, "bob", HOUR, NOW)
    assert isinstance(refused, NotAllowed)
    assert "docker/node-3/eval belongs to ann; bob may not change it" in refused.why


def test_what_has_no_known_owner_is_only_an_admins_to_hold() -> None:
    for owner in (None, Unknown("passwd lookup failed")):
        refused = may_touch(view(owner=owner), BOOK, "ann")
        assert refused is not None
        assert "has no known owner" in refused.why
        assert may_touch(view(owner=owner), BOOK, "root") is None


def test_a_hold_needs_a_length() -> None:
    for span in (timedelta(), -HOUR):
        assert may_hold(view(), BOOK, "ann", span, NOW) == NotAllowed("a hold needs a length such as 2h or 1d")


def test_a_user_may_not_hold_longer_than_the_class_allows() -> None:
    refused = may_hold(view(), BOOK, "ann", 2 * DAY, NOW)
    assert refused == NotAllowed("a hold may last 1d at most; 2d was requested")


def test_an_admin_may_hold_anything_for_any_time() -> None:
    granted = may_hold(view(), BOOK, "root", 90 * DAY, NOW, suspends=("max_runtime",))
    assert granted == Hold("root", NOW, NOW + 90 * DAY, "", admin=True, suspends=("max_runtime",))


def test_only_an_admin_chooses_what_a_hold_suspends() -> None:
    refused = may_hold(view(), BOOK, "ann", HOUR, NOW, suspends=("max_runtime",))
    assert refused == NotAllowed("only an admin may choose what a hold suspends")


def test_without_known_limits_a_day_is_the_longest() -> None:
    granted = may_hold(view(class_=Unknown("inspect timed out")), BOOK, "ann", None, NOW)
    assert isinstance(granted, Hold)
    assert granted.until == NOW + DAY


def test_holds_add_up_within_a_rolling_time() -> None:
    """20h of the last 72h were held, 24h is the limit: 4h are left."""
    granted = may_hold(view(held(60 * HOUR, 40 * HOUR)), BOOK, "ann", 10 * HOUR, NOW)
    assert isinstance(granted, Hold)
    assert granted.until == NOW + 4 * HOUR


def test_a_used_up_total_is_refused_with_advice() -> None:
    refused = may_hold(view(held(40 * HOUR, 10 * HOUR)), BOOK, "ann", HOUR, NOW)
    assert isinstance(refused, NotAllowed)
    assert refused.why.startswith("it was held for 1d6h of the last 3d, and 1d is the limit.")


def test_holds_before_the_rolling_time_do_not_count() -> None:
    assert held_within((held(9 * DAY, 4 * DAY),), NOW - 3 * DAY, NOW) == timedelta()
    assert held_within((held(4 * DAY, 2 * DAY),), NOW - 3 * DAY, NOW) == DAY


def test_overlapping_holds_count_once() -> None:
    twice = (held(10 * HOUR, 2 * HOUR), held(8 * HOUR, 4 * HOUR), held(3 * HOUR, -HOUR))
    assert held_within(twice, NOW - 3 * DAY, NOW) == 10 * HOUR


def test_an_admins_hold_does_not_use_up_the_users_total() -> None:
    assert held_within((held(DAY, HOUR, admin=True),), NOW - 3 * DAY, NOW) == timedelta()


def test_only_the_part_of_a_hold_that_is_over_counts() -> None:
    assert held_within((held(HOUR, -5 * HOUR),), NOW - 3 * DAY, NOW) == HOUR


def test_many_short_holds_do_not_make_a_long_one_forgotten() -> None:
    """C8.5: whoever held it for the whole total cannot start over by taking holds of a minute."""
    memory: Memory | None = EMPTY
    lines = [held(2 * DAY, DAY), *(held(n * MINUTE, (n - 1) * MINUTE) for n in range(60, 0, -1))]
    for one in lines:
        assert memory is not None
        memory = remember(memory, Held(at=one.at, ref=EVAL, by="ann", hold=one))
    assert memory is not None
    assert isinstance(may_hold(View(subject(), (), memory), BOOK, "ann", DAY, NOW), NotAllowed)


def test_many_users_holds_do_not_make_an_admins_hold_forgotten() -> None:
    """Promise 2: a valid hold suspends what it names until it ends, whatever is asked for after it."""
    admins = Hold("root", NOW - HOUR, NOW + 9 * DAY, admin=True, suspends=("max_runtime",))
    memory: Memory | None = Memory(holds=(admins,))
    for n in range(60):
        assert memory is not None
        hold = Hold("ann", NOW + n * MINUTE, NOW + (n + 1) * MINUTE)
        memory = remember(memory, Held(at=hold.at, ref=EVAL, by="ann", hold=hold))
    assert memory is not None
    assert admins in memory.holds


def test_the_admins_are_the_policys() -> None:
    book = Rulebook(type(POLICY)(scope=POLICY.scope, classes=POLICY.classes, admins=("chief",)))
    assert may_touch(view(), book, "chief") is None
    assert may_touch(view(), book, "root") is not None


def on(device: str, start: timedelta, end: timedelta) -> Hold:
    return held(start, end, devices=(device,))


def test_a_new_container_does_not_begin_a_new_count() -> None:
    """C8.5: per user and GPU, too. 20h were held elsewhere on the same GPU, so 4h are left."""
    elsewhere = (on("GPU-0", 40 * HOUR, 20 * HOUR), on("GPU-1", 60 * HOUR, 41 * HOUR))
    granted = may_hold(View(subject(), elsewhere=elsewhere), BOOK, "ann", None, NOW)
    assert isinstance(granted, Hold)
    assert granted.until == NOW + 4 * HOUR


def test_every_gpu_is_counted_on_its_own_and_the_fullest_decides() -> None:
    elsewhere = (on("GPU-0", 60 * HOUR, 50 * HOUR), on("GPU-1", 40 * HOUR, 26 * HOUR))
    granted = may_hold(View(subject(devices=("GPU-0", "GPU-1")), elsewhere=elsewhere), BOOK, "ann", None, NOW)
    assert isinstance(granted, Hold)
    assert granted.until == NOW + 10 * HOUR
    assert granted.devices == ("GPU-0", "GPU-1")


def test_a_gpu_held_up_elsewhere_is_refused_by_name() -> None:
    refused = may_hold(View(subject(), elsewhere=(on("GPU-0", 30 * HOUR, HOUR),)), BOOK, "ann", HOUR, NOW)
    assert isinstance(refused, NotAllowed)
    assert refused.why.startswith(
        "GPU GPU-0, counted over all workloads of its owner, was held for 1d5h of the last 3d"
    )


def test_unknown_devices_share_no_count() -> None:
    """Which GPUs it has is not known: only its own holds are surely of it, and a hold keeps."""
    view = View(subject(devices=Unknown("inspect timed out")), elsewhere=(on("GPU-0", 30 * HOUR, HOUR),))
    assert isinstance(may_hold(view, BOOK, "ann", HOUR, NOW), Hold)


def test_a_release_by_a_user_ends_the_holds_of_users_and_not_that_of_an_admin() -> None:
    users, admins = Hold("ann", NOW - HOUR, NOW + HOUR), Hold("root", NOW - HOUR, NOW + DAY, admin=True)
    over = Hold("eve", NOW - DAY, NOW - HOUR)
    found = view(users, Hold("bob", NOW - HOUR, NOW + HOUR), admins, over)
    ended, left = release_of(found, BOOK, "ann", NOW)
    assert ended.words == ("the hold of ann", "the hold of bob")
    assert [words.partition(" until")[0] for words in left] == ["by root"]
    ended, left = release_of(found, BOOK, "ann", NOW, own=True)
    assert ended.words == ("the hold of ann",)
    assert [words.partition(" until")[0] for words in left] == ["by bob", "by root"]
    assert release_of(found, BOOK, "root", NOW)[0].words == ("the hold of ann", "the hold of bob", "the hold of root")


def test_to_stop_or_remove_it_an_owner_must_be_verified() -> None:
    """A label that every user can write gives no power over the work of others."""
    assert may_act(view(owner="ann", owner_verified=True), BOOK, "ann") is None
    refused = may_act(view(owner="ann", owner_verified=False), BOOK, "ann")
    assert isinstance(refused, NotAllowed)
    assert "only claimed" in refused.why
    assert may_act(view(owner="ann", owner_verified=False), BOOK, "root") is None
    assert isinstance(may_act(view(owner="ann", owner_verified=True), BOOK, "bob"), NotAllowed)
