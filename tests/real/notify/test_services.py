"""Messages over real services on this machine: a mail server, a webhook, servers that hang or refuse."""

from __future__ import annotations

import asyncio
import email
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.policy import default
from pathlib import Path

import pytest

from gpukeeper.model.ports import Delivered, Message, MessageKind, NotDelivered
from gpukeeper.notify import apprise as channel
from gpukeeper.notify.apprise import Apprise
from gpukeeper.notify.command import AddressBook
from tests.real.notify.receiver import Receiver

SECRET = "hush-hush"
BOOK = AddressBook({"ann": "ann+gpu@uni.example"}, "{owner}@uni.example")
WARNING = Message(
    kind=MessageKind.WARNING,
    about="docker/node-1/train",
    text="docker/node-1/train: idle for 4h; will be stopped in 10m. "
    "Keep it: gpukeeper workload hold docker/node-1/train",
    at=datetime(2026, 5, 1, tzinfo=UTC),
    owner="ann",
    link="https://gpu.example/find?uid=c0ffee",
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowded machine needs long to load the plugins."""
    monkeypatch.setattr(channel, "DEADLINE", timedelta(minutes=2))


def file(folder: Path, url: str) -> str:
    path = folder / "service.url"
    path.write_text(url + "\n")
    path.chmod(0o600)
    return str(path)


def mail(port: int, more: str = "") -> str:
    return f"mailto://127.0.0.1:{port}?from=gpukeeper@uni.example&to={{address}}{more}"


def sent(made: Apprise, *messages: Message) -> list[Delivered | NotDelivered]:
    async def send() -> list[Delivered | NotDelivered]:
        try:
            return [await made.send(message) for message in messages]
        finally:
            await made.close()

    return asyncio.run(send())


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def why(answer: Delivered | NotDelivered) -> str:
    assert isinstance(answer, NotDelivered)
    return answer.why


@pytest.mark.smoke
def test_a_mail_arrives_with_what_when_why_how_to_hold_and_a_link(
    tmp_path: Path, start: Callable[[str], Receiver]
) -> None:
    server = start("smtp")
    assert sent(Apprise(file(tmp_path, mail(server.port)), BOOK), WARNING) == [Delivered()]
    got = server.next()
    assert got["to"] == ["ann+gpu@uni.example"]
    read = email.message_from_string(got["text"], policy=default)
    assert read["Subject"] == "[gpukeeper] WARNING: docker/node-1/train"
    body = read.get_body()
    assert body is not None
    text = body.get_content().replace("=\n", "")
    for words in ("idle for 4h", "in 10m", "gpukeeper workload hold docker/node-1/train", WARNING.link):
        assert words in text


@pytest.mark.smoke
def test_a_webhook_gets_the_message_and_one_process_serves_several(
    tmp_path: Path, start: Callable[[str], Receiver]
) -> None:
    hook = start("web")
    made = Apprise(file(tmp_path, f"json://127.0.0.1:{hook.port}/{SECRET}"))
    assert sent(made, WARNING, WARNING) == [Delivered(), Delivered()]
    got = hook.next()
    assert got["path"] == f"/{SECRET}"
    assert got["body"]["title"] == "[gpukeeper] WARNING: docker/node-1/train"
    assert got["body"]["message"].endswith(WARNING.link)


def test_names_cannot_add_headers_recipients_links_or_mentions(
    tmp_path: Path, start: Callable[[str], Receiver]
) -> None:
    server = start("smtp")
    hostile = "train\r\nBcc: eve@x.org\r\n\r\n<!channel> <https://evil.example|click> @everyone"
    made = Apprise(file(tmp_path, mail(server.port)), BOOK)
    named = [
        Message(kind=MessageKind.STOPPED, about=hostile, text=hostile, at=WARNING.at, owner="ann"),
        Message(kind=MessageKind.STOPPED, about="x", text="x", at=WARNING.at, owner="ann,eve@x.org"),
        Message(kind=MessageKind.STOPPED, about="x", text="x", at=WARNING.at, owner="ann\r\nBcc: eve@x.org"),
    ]
    answers = sent(made, *named)
    assert answers[0] == Delivered()
    assert all("the owner's name contains characters" in why(answer) for answer in answers[1:])
    got = server.next()
    assert got["to"] == ["ann+gpu@uni.example"]
    read = email.message_from_string(got["text"], policy=default)
    assert read["Bcc"] is None
    assert read["To"] == "ann+gpu@uni.example"
    body = read.get_body()
    assert body is not None
    text = body.get_content()
    assert not set("<>") & set(text)
    assert "@everyone" not in text
    assert server.close() == ""  # no other message


HOSTILE = (
    *("\r\nBcc: eve@x.org", "\nBcc: eve@x.org", "\rBcc: eve@x.org", "\r\n\r\nbody", "\0Bcc: eve@x.org"),
    *("\x0bBcc: eve@x.org", "\x0cBcc: eve@x.org", "\x1cBcc: eve@x.org", "\x85Bcc: eve@x.org"),
    *("\u2028Bcc: eve@x.org", "\u2029Bcc: eve@x.org", "\u202egro.x@eve", "\u2066x\u2069", "\u200bx", "\ufeffx"),
    *("=?utf-8?q?=0d=0aBcc:_eve@x.org?=", "=?utf-8?b?DQpCY2M6IGV2ZUB4Lm9yZw==?=", "\r\n.\r\nRCPT TO:<eve@x.org>\r\n"),
    *(
        "x" * 100_000,
        " " * 2_000 + "Bcc: eve@x.org",
        "\ud800",
        "ä" * 5_000,
        "%0d%0aBcc: eve@x.org",
        "\x1b]8;;http://x\a",
    ),
)


def test_no_name_changes_the_headers_or_recipients_of_a_mail(tmp_path: Path, start: Callable[[str], Receiver]) -> None:
    """In what a message is about and in its text, at the beginning and within: as names and labels of containers."""
    server = start("smtp")
    made = Apprise(file(tmp_path, mail(server.port)), BOOK)
    named = [
        Message(kind=MessageKind.STOPPED, about=about, text=text, at=WARNING.at, owner="ann", link=WARNING.link)
        for words in HOSTILE
        for about, text in (
            *((words, "x"), (f"docker/node-1/{words}", "x")),
            *(("docker/node-1/train", words), ("docker/node-1/train", f"train {words} is idle")),
        )
    ]
    assert sent(made, *named) == [Delivered()] * len(named)
    expected = None
    for _ in named:
        got = server.next()
        assert got["to"] == ["ann+gpu@uni.example"]
        read = email.message_from_string(got["text"], policy=default)
        expected = expected or sorted(read.keys())
        assert sorted(read.keys()) == expected
        assert "Bcc" not in expected
        assert read["To"] == "ann+gpu@uni.example"
        subject = str(read["Subject"])
        assert subject.startswith("[gpukeeper] STOPPED:")
        assert len(subject) <= 220
        assert subject.isprintable()
    assert server.close() == ""  # no other message


def test_a_server_that_hangs_is_given_up_and_left_alone(
    tmp_path: Path, start: Callable[[str], Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = start("hang")
    made = Apprise(file(tmp_path, mail(start("smtp").port)), BOOK)

    async def send() -> list[Delivered | NotDelivered]:
        answers = [await made.send(WARNING)]  # the process is started and has loaded what sends mail
        file(tmp_path, mail(hanging.port))
        monkeypatch.setattr(channel, "DEADLINE", timedelta(seconds=5))
        running = made._service._running
        assert running is not None
        answers += [await made.send(WARNING)]
        await running.wait()
        answers += [await made.send(WARNING)]
        await made.close()
        return answers

    first, second, third = asyncio.run(send())
    assert first == Delivered()
    assert second == NotDelivered("it timed out after 5s", transient=True)
    assert isinstance(third, NotDelivered)
    assert third.transient
    assert third.why.startswith("it timed out recently and is tried again in ")
    assert hanging.next() == {"connected": True}
    assert hanging.close() == ""  # the third message was not tried


def test_a_server_that_refuses_and_one_that_is_busy(tmp_path: Path, start: Callable[[str], Receiver]) -> None:
    refused = sent(Apprise(file(tmp_path, mail(start("refuse").port)), BOOK), WARNING)
    assert refused == [NotDelivered("the server refused the recipient", recipient=True)]
    busy = start("busy")
    answers = sent(Apprise(file(tmp_path, mail(busy.port)), BOOK), WARNING, WARNING, WARNING)
    assert [isinstance(one, NotDelivered) and one.transient for one in answers] == [True, True, False]
    assert answers[2] == Delivered()
    assert busy.next()["to"] == ["ann+gpu@uni.example"]


def test_a_closed_port_is_reported_without_the_secret(tmp_path: Path, start: Callable[[str], Receiver]) -> None:
    server = start("web")
    server.close()
    made = Apprise(file(tmp_path, f"json://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}"))
    (answer,) = sent(made, WARNING)
    assert isinstance(answer, NotDelivered)
    assert answer.transient
    assert SECRET not in answer.why + made.name


@pytest.mark.parametrize("url", [f"nosuchservice://{SECRET}", f"{SECRET}", f"mailto://{SECRET}"])
def test_a_url_that_cannot_be_used_is_not_repeated(url: str, tmp_path: Path) -> None:
    made = Apprise(file(tmp_path, url))
    (answer,) = sent(made, WARNING)
    assert SECRET not in why(answer)

    async def check() -> str | None:
        try:
            return await made.problem()
        finally:
            await made.close()

    assert asyncio.run(check()) in {None, "the URL in the file is not one that apprise can use"}


def test_a_file_that_others_can_read_or_change_is_not_used(tmp_path: Path) -> None:
    path = file(tmp_path, f"json://127.0.0.1/{SECRET}")
    for mode, said in ((0o644, "can be read by others"), (0o666, "may be written to by others")):
        Path(path).chmod(mode)
        (answer,) = sent(Apprise(path), WARNING)
        assert said in why(answer)
        assert SECRET not in why(answer)
    (answer,) = sent(Apprise(str(tmp_path / "missing")), WARNING)
    assert "could not be read" in why(answer)


def test_the_field_for_the_address_is_for_owners_only(tmp_path: Path) -> None:
    (answer,) = sent(Apprise(file(tmp_path, "json://127.0.0.1/{address}")), WARNING)
    assert "only for owners" in why(answer)
    (answer,) = sent(Apprise(file(tmp_path, "json://127.0.0.1/x"), BOOK), WARNING)
    assert "does not contain {address}" in why(answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_it_talks_to_the_network_as_an_unprivileged_user(tmp_path: Path, start: Callable[[str], Receiver]) -> None:
    made = Apprise(file(tmp_path, f"json://127.0.0.1:{start('web').port}/x"))

    async def status() -> dict[str, str]:
        await made.send(WARNING)
        running = made._service._running
        assert running is not None
        found = status_of(running.pid)
        await made.close()
        return found

    found = asyncio.run(status())
    assert "0" not in found["Uid"].split() + found["Gid"].split()
    assert found["Groups"].strip() == ""


def test_a_process_that_dies_is_reported_and_started_again(tmp_path: Path, start: Callable[[str], Receiver]) -> None:
    made = Apprise(file(tmp_path, f"json://127.0.0.1:{start('web').port}/x"))

    async def crash() -> list[Delivered | NotDelivered]:
        answers = [await made.send(WARNING)]
        running = made._service._running
        assert running is not None
        running.kill()
        await running.wait()
        answers += [await made.send(WARNING)]
        await made.close()
        return answers

    assert asyncio.run(crash()) == [Delivered(), Delivered()]
