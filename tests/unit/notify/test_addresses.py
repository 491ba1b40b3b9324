"""Addresses of owners. Names are chosen by others: none may become a second recipient, an option or a header."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gpukeeper.model.ports import NotDelivered
from gpukeeper.notify.command import AddressBook, problem_of_address, problem_of_template

HOSTILE = [
    "ann,eve@x.org",
    "ann;eve",
    "ann eve",
    "ann\r\nBcc: eve@x.org",
    "ann%0d%0aBcc:eve",
    "ann%2Ceve",
    "-ann",
    "--help",
    "ann@x.org",
    "../ann",
    "ann?to=eve",
    "ann&to=eve",
    "a" * 65,
    "",
    "ann\0",
    "\N{CYRILLIC SMALL LETTER A}nn",
]


def address(book: AddressBook, owner: str | None) -> str:
    found = asyncio.run(book.of(owner))
    return f"not delivered: {found.why}" if isinstance(found, NotDelivered) else found


def program(folder: Path, text: str) -> str:
    path = folder / "address-of"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_map_comes_first_then_the_template() -> None:
    book = AddressBook({"ann": "ann.smith@uni.example"}, "{owner}@uni.example")
    assert address(book, "ann") == "ann.smith@uni.example"
    assert address(book, "bob") == "bob@uni.example"
    assert "unknown" in address(book, None)
    assert "no address of this owner is configured" in address(AddressBook({"ann": "a@x.org"}), "bob")


@pytest.mark.parametrize("owner", HOSTILE)
def test_a_hostile_name_becomes_no_address(owner: str, tmp_path: Path) -> None:
    assert "not delivered" in address(AddressBook(template="{owner}@uni.example"), owner)
    ran = tmp_path / "ran"
    command = program(tmp_path, f"open({str(ran)!r}, 'w'); print('eve@x.org')")
    assert "not delivered" in address(AddressBook(command=[command]), owner)
    assert not ran.exists()


@pytest.mark.parametrize(
    "answer", ["eve@x.org,bob@x.org", "a b", "ann@x.org\\nBcc: eve", "", "a%2Cb", "x" * 300, "y" * 9000]
)
def test_what_a_program_prints_is_checked_and_not_repeated(answer: str, tmp_path: Path) -> None:
    found = address(AddressBook(command=[program(tmp_path, f"print('{answer}')")]), "ann")
    assert found.startswith("not delivered: ")
    assert not answer or answer not in found


def test_a_program_is_asked_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    command = program(tmp_path, f"open({str(asked)!r}, 'a').write(sys.argv[-1] + ' '); print('ann@uni.example')")
    book = AddressBook(command=[command, "--short"])

    async def twice() -> list[str | NotDelivered]:
        return [await book.of("ann"), await book.of("ann")]

    assert asyncio.run(twice()) == ["ann@uni.example"] * 2
    assert asked.read_text() == "ann "


def test_a_program_that_fails_or_is_not_trusted(tmp_path: Path) -> None:
    command = program(tmp_path, "sys.exit(3)")
    assert "ended with 3" in address(AddressBook(command=[command]), "ann")
    Path(command).chmod(0o777)
    assert "was not run" in address(AddressBook(command=[command]), "ann")
    assert "cannot be started" in address(AddressBook(command=["/nowhere/program"]), "ann")


def test_templates_and_addresses_are_checked() -> None:
    assert problem_of_template("{owner}@uni.example") is None
    for bad in ("ann@uni.example", "{owner}{owner}", "{owner},x@uni.example", "{owner}@uni example"):
        assert problem_of_template(bad) is not None
    assert problem_of_address("ann+gpu@uni.example") is None
    assert problem_of_address("ann%40uni.example") is not None
