"""The demo: deterministic by seed, touches nothing, and ends with what was reclaimed and why."""

from __future__ import annotations

from tests.cli.fleet import Fleet


def test_the_same_seed_gives_the_same_week(fleet: Fleet) -> None:
    one = fleet.run("demo", "--seed", "7", "--days", "1", "--once", "--json")
    two = fleet.run("demo", "--seed", "7", "--days", "1", "--once", "--json")
    assert one.code == two.code == 0, one.err
    assert one.out == two.out
    assert one.json()["schema"] == "gpukeeper/demo/v1"
    assert one.json()["reclaimed"] > 10
    assert not fleet.state.exists()


def test_it_ends_with_what_was_reclaimed_and_why(fleet: Fleet) -> None:
    ran = fleet.run("demo", "--days", "1", "--once")
    assert ran.code == 0
    assert "BECAUSE OF" in ran.out
    assert "Nothing real was touched" in ran.out
