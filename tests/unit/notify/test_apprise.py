"""Why apprise did not send: always in our own words, since its log may contain secrets."""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.model.message import Message, MessageKind, NotDelivered
from gpukeeper.notify.apprise import Apprise, body_of, harmless
from gpukeeper.notify.apprise_child import NOT_INSTALLED, cause_of

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
