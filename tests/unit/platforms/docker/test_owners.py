"""Whose container is it: every hint, every conflict."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.unknown import Unknown
from gpukeeper.platforms.docker.owners import KnownUsers, Ownership, candidates, folders_of, owned
from tests.unit.platforms.docker.examples import container

HOME = {"/home/ann/x": 1001, "/home/bob/y": 1002, "/srv/data": None}


def whose(
    *, trusted: tuple[str, ...] = (), silent: Unknown | None = None, folders: Any = HOME, **parts: Any
) -> Ownership:
    processes, image_labels = parts.pop("processes", ()), parts.pop("image_labels", {})
    people = KnownUsers({1001: "ann", 1002: "bob", 0: "root"}, frozenset({"ann", "bob"}), folders, processes, silent)
    return owned(container(**parts), people, trusted, image_labels)


def bind(*paths: str) -> list[dict[str, str]]:
    return [{"Type": "bind", "Source": path, "Destination": f"/m{number}"} for number, path in enumerate(paths)]


def test_nobody_is_an_answer() -> None:
    assert whose() == Ownership(None, False, (), ())


@pytest.mark.parametrize("label", ["ds01.user", "aime.mlc.USER", "aime.mlc"])
def test_a_label_alone_is_only_a_claim(label: str) -> None:
    found = whose(labels={label: "bob"})
    assert (found.owner, found.verified, found.only_claimed) == ("bob", False, True)
    assert found.findings


def test_the_order_of_evidence() -> None:
    """C12.1: every piece names somebody else. Without the first one the next counts."""
    users = {1001: "site", 1002: "bob", 1003: "named", 1004: "runs", 1005: "works", 1006: "ds01", 1007: "aime"}
    parts: dict[str, Any] = {
        "labels": {"site.owner": "site", "aime.mlc.USER": "aime", "ds01.user": "ds01"},
        "mounts": bind("/home/bob/x"),
        "name": "/train._.1003",
        "config": {"User": "1004"},
    }
    people = KnownUsers(users, frozenset(users.values()), {"/home/bob/x": 1002}, (1005,))
    order = []

    def next_one() -> None:
        found = owned(container(**parts), people, ("site.owner",))
        order.append((found.owner, found.verified, found.only_claimed))

    next_one()
    del parts["labels"]["site.owner"]
    next_one()
    parts["mounts"], people = [], KnownUsers(users, people.names, {}, (1005,))
    next_one()
    parts["name"] = "/train"
    next_one()
    parts["config"] = {}
    next_one()
    people = KnownUsers(users, people.names, {})
    next_one()
    del parts["labels"]["ds01.user"]
    next_one()
    assert order == [
        ("site", False, False),  # the mounted home of another user is as good, so that neither is proven
        ("bob", True, False),
        ("named", False, False),
        ("runs", False, False),
        ("works", False, False),
        ("ds01", False, True),
        ("aime", False, True),
    ]


def test_a_label_that_only_the_wrapper_can_set_is_accepted() -> None:
    found = whose(labels={"ds01.user": "ann"}, trusted=("ds01.user",))
    assert (found.owner, found.verified, found.findings) == ("ann", True, ())


@pytest.mark.parametrize("label", ["ds01.user", "site.owner"])
def test_a_trusted_label_that_came_with_the_image_is_only_a_claim(label: str) -> None:
    """Otherwise the author of an image would own every container that others start from it."""
    found = whose(labels={label: "bob"}, trusted=(label,), image_labels={label: "bob"})
    assert (found.owner, found.verified, found.only_claimed) == ("bob", False, True)
    set_anew = whose(labels={label: "ann"}, trusted=(label,), image_labels={label: "bob"})
    assert (set_anew.owner, set_anew.verified) == ("ann", True)


def test_without_a_read_of_the_image_a_trusted_label_is_not_verified_and_nothing_gets_stricter() -> None:
    silent = Unknown("its image cannot be inspected")
    running = whose(labels={"ds01.user": "ann"}, trusted=("ds01.user",), image_labels=silent, state={"Running": True})
    assert (running.owner, running.verified) == (silent, False)
    ended = whose(labels={"ds01.user": "ann"}, trusted=("ds01.user",), image_labels=silent, state={"Running": False})
    assert (ended.owner, ended.verified, ended.only_claimed) == ("ann", False, False)


def test_a_directory_that_is_only_read_makes_nobody_the_verified_owner() -> None:
    """Otherwise the owner of a shared dataset would own every container that reads it."""
    read = [{**mount, "RW": False} for mount in bind("/home/ann/x")]
    found = whose(mounts=read)
    assert (found.owner, found.verified) == ("ann", False)
    assert found.evidence == ("/home/ann/x belongs to ann, mounted read-only",)
    both = whose(mounts=[*read, *bind("/home/bob/y")])
    assert (both.owner, both.verified) == ("bob", True)


def test_a_label_counts_with_a_sign_beside_it() -> None:
    """C12.1"""
    found = whose(labels={"aime.mlc.USER": "ann"}, config={"User": "1001:1001"})
    assert (found.owner, found.verified, found.only_claimed) == ("ann", False, False)


@pytest.mark.parametrize(
    "parts",
    [
        {"labels": {"devcontainer.local_folder": "/home/ann/x"}, "mounts": bind("/home/ann/x")},
        {"mounts": bind("/home/ann/x")},
    ],
)
def test_a_mounted_directory_in_a_home_is_good_evidence(parts: dict[str, Any]) -> None:
    found = whose(**parts)
    assert (found.owner, found.verified) == ("ann", True)
    assert found.evidence == ("/home/ann/x belongs to ann",)


@pytest.mark.parametrize(
    "labels",
    [
        {"devcontainer.local_folder": "/home/ann/x"},
        {"com.docker.compose.project.config_files": "/srv/data,/home/ann/x"},
    ],
)
def test_a_directory_that_only_a_label_names_tells_the_owner_and_wins_no_time(labels: dict[str, str]) -> None:
    found = whose(labels=labels)
    assert (found.owner, found.verified, found.only_claimed) == ("ann", False, False)
    assert found.evidence == ("/home/ann/x belongs to ann, which only a label names",)


def test_another_users_name_on_ones_own_directory_is_a_conflict() -> None:
    found = whose(labels={"ds01.user": "bob"}, mounts=bind("/home/ann/x"))
    assert found.owner == "ann"
    assert "ambiguous" in found.findings[0]


def test_directories_of_two_people_verify_neither() -> None:
    found = whose(mounts=bind("/home/ann/x", "/home/bob/y"))
    assert not found.verified
    assert "bob" in found.findings[0]


def test_of_two_directories_the_one_that_something_agrees_with_counts() -> None:
    assert whose(mounts=bind("/home/ann/x", "/home/bob/y"), config={"User": "1002"}).owner == "bob"


@pytest.mark.parametrize(
    "parts", [{"name": "/train._.1001"}, {"config": {"User": "1001:100"}}, {"processes": (0, 1001)}]
)
def test_weak_signs(parts: dict[str, Any]) -> None:
    assert whose(**parts).owner == "ann"


@pytest.mark.parametrize(
    "parts",
    [{"config": {"User": "0"}}, {"config": {"User": "root"}}, {"processes": (0,)}, {"mounts": bind("/srv/data")}],
)
def test_what_says_nothing(parts: dict[str, Any]) -> None:
    assert whose(**parts).owner is None


def test_whom_this_machine_does_not_know_is_a_finding() -> None:
    found = whose(labels={"ds01.user": "mallory"}, name="/x._.4711")
    assert found.owner is None
    assert len(found.findings) == 2


def test_a_directory_that_could_not_be_read_makes_the_owner_unknown() -> None:
    folders = {"/home/ann/x": Unknown("no answer")}
    assert isinstance(whose(mounts=bind("/home/ann/x"), folders=folders).owner, Unknown)


def test_a_directory_that_does_not_answer_makes_nobody_a_stranger() -> None:
    """Otherwise an outage puts everybody into the strictest class."""
    assert isinstance(whose(labels={"ds01.user": "carol"}, silent=Unknown("no answer")).owner, Unknown)


@pytest.mark.parametrize("path", ["c:\\Users\\ann", "\\\\wsl$\\x", "relative", "/a\0b"])
def test_paths_of_another_machine_are_none(path: str) -> None:
    assert folders_of(container(labels={"devcontainer.local_folder": path})) == ()


def test_endless_lists_of_directories_are_cut() -> None:
    many = ",".join(f"/x/{number}" for number in range(100_000))
    assert len(folders_of(container(labels={"com.docker.compose.project.config_files": many}))) < 1000


@pytest.mark.parametrize("digits", ["9" * 5000, "٣", "²", "-1", "1e3", " 1001"])
def test_digits_of_any_kind_break_nothing(digits: str) -> None:
    """A label of five thousand digits must not end the look at everybody's containers."""
    parts: dict[str, Any] = {
        "labels": {"ds01.user": digits},
        "name": f"/x._.{digits}",
        "config": {"User": digits},
    }
    assert candidates(container(**parts))[1] == set()
    assert whose(**parts).owner is None


@given(st.text(), st.text(), st.text(), st.text())
def test_no_words_break_the_search_for_an_owner(label: str, path: str, name: str, user: str) -> None:
    folders = {f"/home/{path}": 1001}
    parts: dict[str, Any] = {"labels": {"ds01.user": label}, "name": name, "config": {"User": user}}
    found = whose(mounts=bind(f"/home/{path}"), folders=folders, **parts)
    assert all(words.isprintable() for words in (*found.evidence, *found.findings))
