"""Every kind of channel that a policy can name: what it takes, what it refuses, and that it shows no secret."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.config.show import part_of, rows
from gpukeeper.model.errors import PolicyError
from gpukeeper.notify.catalog import ADMIN_KINDS, admin_channels

SECRET = "hush"


class Case(NamedTuple):
    good: str  # as a policy has it, with SECRET where one may be
    bad: tuple[str, ...]


CASES = {
    "command": Case(
        f"[/usr/bin/curl, --data, {SECRET}]", ("curl", f"[{SECRET}, /usr/bin/curl]", "[]", "{a: b}", "[1]")
    ),
    "apprise": Case("/etc/gpukeeper/admins.url", (f"slack://{SECRET}", f"[{SECRET}, /x]", "[]", "/etc/../x", "[1]")),
}


def policy(kind: str, words: str) -> str:
    return f"scope: {{docker: {{}}}}\nnotify: {{admins: [{{{kind}: {words}}}]}}\n"


def test_every_kind_has_a_case() -> None:
    assert set(CASES) == set(ADMIN_KINDS)


@pytest.mark.parametrize("kind", CASES)
def test_a_kind_makes_a_channel_from_its_words(kind: str) -> None:
    for words in (CASES[kind].good, ADMIN_KINDS[kind].example):
        settings = load_text(policy(kind, words)).policy.notify
        log, made = admin_channels(settings, lambda words: None)
        assert log.name == "log"
        assert made.name.startswith(kind)
        assert SECRET not in made.name


@pytest.mark.parametrize("kind", CASES)
def test_no_secret_is_shown(kind: str) -> None:
    found = part_of(rows(load_text(policy(kind, CASES[kind].good))), "notify")
    assert [row.text.partition(":")[0] for row in found if row.setting.startswith("notify.admins")] == [kind]
    assert SECRET not in "".join(row.text for row in found)


@pytest.mark.parametrize(("kind", "words"), [(kind, words) for kind, case in CASES.items() for words in case.bad])
def test_what_cannot_be_used_is_refused_without_being_repeated(kind: str, words: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_text(policy(kind, words))
    assert f"notify.admins[0]: {kind}: " in str(caught.value)
    assert "Write it like" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("[{kommand: [/bin/x]}]", 'Did you mean "command"?'),
        ("[{}]", "this is not a channel"),
        ("[/bin/mail]", "this is not a channel"),
        ("[{command: [/bin/x], log: [y]}]", "this is not a channel"),
    ],
)
def test_an_entry_is_one_known_channel(words: str, said: str) -> None:
    with pytest.raises(PolicyError, match="notify") as caught:
        load_text(f"scope: {{docker: {{}}}}\nnotify: {{admins: {words}}}\n")
    assert said in str(caught.value)


def test_without_settings_there_is_the_log() -> None:
    settings = load_text("scope: {docker: {}}\n").policy.notify
    assert [one.name for one in admin_channels(settings, lambda words: None)] == ["log"]
