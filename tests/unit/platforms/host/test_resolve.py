"""The way to a root: through links of root or our own, and nobody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpukeeper.model.decision import Changed, Refused
from gpukeeper.model.policy import PlaceScope, Reports
from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.host.connect import ForeignLink, opened, resolved_path
from tests.unit.platforms.host.machine import Machine

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to somebody else")


def machine(root: Path, kind: str) -> Machine:
    return Machine(root, reports=Reports(roots=(str(root),), keep_last=0) if kind == "report" else None)


def swapped(path: Path, target: Path, owner: int) -> None:
    """As its owner can do with a folder of his, or anybody where anybody may rename."""
    path.rename(path.with_name("moved"))
    path.symlink_to(target)
    os.lchown(path, owner, owner)


@needs_root
@pytest.mark.parametrize("where", ["results", "alice"])
@pytest.mark.parametrize("kind", ["tree", "report"])
def test_nothing_is_found_or_removed_behind_another_users_link(tmp_path: Path, kind: str, where: str) -> None:
    root, bobs = tmp_path / "alice" / "results", tmp_path / "bob"
    for folder in (root, bobs, bobs / "results"):
        folder.mkdir(parents=True)
    on = machine(root, kind)
    on.tree("tmp-a")
    there = machine(bobs / "results" if where == "alice" else bobs, kind)
    theirs = there.tree("tmp-thesis")
    seen, bobs_seen = on.observe()["tmp-a"], there.observe()["tmp-thesis"]
    swapped(root if where == "results" else root.parent, bobs, NOBODY)

    why = "is reached through a link of "
    pages = on.run(_pages(on))
    assert [one for page in pages for one in page.subjects if one.ref.kind == kind] == []
    assert [one.why.startswith(why) for page in pages for one in page.unseen] == [True]
    for one in (seen, bobs_seen):
        looked = on.read(one)
        assert isinstance(looked, Unknown), "what cannot be looked for is not gone"
        assert "use its target in the policy" in looked.why
        assert isinstance(on.remove(one), Changed | Refused)
    assert theirs.is_dir()


async def _pages(on: Machine) -> list[object]:
    return [page async for page in on.platform.observe(PlaceScope())]


@needs_root
def test_nothing_is_saved_from_or_brought_back_behind_another_users_link(tmp_path: Path) -> None:
    root, bobs = tmp_path / "results", tmp_path / "bob"
    root.mkdir(), bobs.mkdir()
    on = machine(root, "report")
    on.tree("tmp-a")
    seen = on.observe()["tmp-a"]
    evidence = on.run(on.platform.capture(seen, ()))
    swapped(root, bobs, NOBODY)
    saved = on.run(on.platform.capture(seen, ()))
    assert isinstance(saved, Unknown)
    assert "a link of" in saved.why
    answer = on.run(on.platform.restore(seen.ref, evidence))
    assert isinstance(answer, Refused)
    assert "a link of" in answer.why
    assert list(bobs.iterdir()) == []


@needs_root
def test_another_root_is_handled_as_usual(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir(), bad.mkdir()
    (good / "run-1").mkdir()
    on = Machine(good, reports=Reports(roots=(str(bad), str(good)), keep_last=0))
    swapped(bad, good, NOBODY)
    assert isinstance(on.read(on.observe()["run-1"]).size, int)
    on.remove(on.observe()["run-1"])
    assert on.names() == []


def test_a_link_of_our_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "short").symlink_to("big")
    on = Machine(tmp_path / "short")
    on.tree("tmp-a")
    on.remove(on.observe()["tmp-a"])
    assert list((tmp_path / "big").iterdir()) == []


@pytest.mark.parametrize(
    "path", ["a/b/c", "a/../a/./b//c", "up/a/b", "far/b", "far/../a", "chain/c", "nothing/at/all", "a/b/file/x"]
)
def test_a_path_leads_where_the_system_says(tmp_path: Path, path: str) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "up").symlink_to("a/..")
    (tmp_path / "far").symlink_to(tmp_path / "a")
    (tmp_path / "chain").symlink_to("far/b")
    assert resolved_path(f"{tmp_path}/{path}") == os.path.realpath(f"{tmp_path}/{path}")


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links") as caught:
        resolved_path(str(tmp_path / "a"))
    assert not isinstance(caught.value, ForeignLink)


def test_a_link_that_came_after_resolving_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    found = resolved_path(str(tmp_path / "a" / "b"))
    with opened(found) as fd:
        assert os.path.samestat(os.fstat(fd), (tmp_path / "a" / "b").stat())
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").symlink_to("moved")
    with pytest.raises(NotADirectoryError), opened(found):
        pass
