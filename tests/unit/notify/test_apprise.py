"""Why apprise did not send: always in our own words, since its log may contain secrets."""

from __future__ import annotations

import asyncio
import re
import sys
import time
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.model.ports import Message, MessageKind, NotDelivered
from gpukeeper.notify.apprise import Apprise, body_of, harmless
from gpukeeper.notify.apprise_child import NOT_INSTALLED, cause_of
from gpukeeper.notify.terminals import as_written

TEST = Message(kind=MessageKind.TEST, about="test", text="x", at=datetime(2026, 5, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("line", "words", "transient"),
    [
        ("Failed to send JSON notification: hush, error=500.", "HTTP 500", True),
        ("Failed to send Slack notification to hush: Forbidden, error=403.", "HTTP 403", False),
        ("error=429", "HTTP 429", True),
        ("Socket Exception: [Errno 111] Connection refused hush", "refused", True),
        ("Socket Exception: timed out hush", "timed out", True),
        ("Socket Exception: (535, b'5.7.8 hush')", "credentials", False),
        ("Socket Exception: {'hush@x.org': (550, b'no such user')}", "recipient", False),
        ("Socket Exception: certificate verify failed hush", "TLS", True),
        ("hush", "did not accept", True),
    ],
)
def test_a_failure_is_classified_and_never_repeated(line: str, words: str, transient: bool) -> None:
    found = cause_of([line])
    assert words in found.why
    assert found.transient is transient
    assert "hush" not in found.why


def send(folder: Path, text: str) -> str:
    program, url = folder / "child", folder / "url"
    program.write_text(text)
    url.write_text("json://127.0.0.1/hush")
    url.chmod(0o600)
    made = Apprise(str(url), child=[sys.executable, str(program)])

    async def one() -> str:
        answer = await made.send(TEST)
        await made.close()
        assert isinstance(answer, NotDelivered)
        return answer.why

    return asyncio.run(one())


def test_without_apprise_it_says_how_to_install_it(tmp_path: Path) -> None:
    assert "pip install '.[notify]'" in send(tmp_path, f"raise SystemExit({NOT_INSTALLED})")


@pytest.mark.parametrize(
    "text", ["", "print(flush=True)", "print('{}', flush=True)\ninput()\nprint('hush', flush=True)\ninput()"]
)
def test_a_process_that_ends_or_talks_nonsense_is_a_transient_failure(text: str, tmp_path: Path) -> None:
    assert "the process that runs apprise ended" in send(tmp_path, text)


def test_text_of_others_makes_no_links_and_no_mentions() -> None:
    assert harmless("a<b>\r\n@here \x1b[2J") == "a\u2039b\u203a\ufffd\ufffd@ here \ufffd[2J"
    assert body_of(TEST) == "x"


@pytest.mark.parametrize("group", ["all", "channel", "everyone", "here", "room", "stream", "topic"])
@pytest.mark.parametrize("written", ["@{}", "@**{}**", "@_**{}**", "x@{}", "@@{}", "@{}@{}", "\u200b@{}"])
@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_no_service_takes_a_name_as_a_mention_of_all_members(
    group: str, written: str, case: Callable[[str], str]
) -> None:
    """Mattermost does not distinguish cases, Zulip writes @**all**, Matrix @room."""
    words = harmless(written.replace("{}", case(group)))
    assert not re.search(rf"@[*_]*{group}", words, re.IGNORECASE)
    assert re.search(group, words, re.IGNORECASE), "people still read it"


@pytest.mark.parametrize("text", ["[Keep it](https://evil.example)", "![](https://evil.example)"])
def test_no_service_takes_a_name_as_a_link_with_other_words(text: str) -> None:
    assert "](" not in harmless(text)


@given(st.text())
def test_no_text_has_more_than_one_line_or_drives_what_shows_it(text: str) -> None:
    """Line ends of Unicode, and characters that reverse the direction, too."""
    for words in (harmless(text), as_written(text).decode()[len("\r\n\a") : -len("\r\n")]):
        assert len(words.splitlines()) <= 1
        assert not any(unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for one in words)


def test_a_mail_has_the_time_of_this_machine_and_says_where_its_command_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative time in a mail says little: it is read later. And its reader may sit at another machine."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        text = (
            "docker/node-1/train: will be stopped at 2026-03-02 09:30 UTC (in 1h). Keep it: gpukeeper workload hold x"
        )
        warning = Message(
            kind=MessageKind.WARNING, about="w", text=text, at=TEST.at, host="node-1", link="https://g/find"
        )
        assert body_of(warning) == (
            "docker/node-1/train: will be stopped at 2026-03-02 10:30 CET (in 1h). Keep it: gpukeeper workload hold x"
            "\n\nCommands work on node-1.\n\nhttps://g/find"
        )
        never = msgspec.structs.replace(warning, text="of 2026-99-99 25:61 UTC", link="")
        assert body_of(never) == "of 2026-99-99 25:61 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()
