"""Every verb and every flag is documented, and the page is what the code says."""

from __future__ import annotations

import re

import pytest

from tests.docs import generate
from tests.docs.markdown import ROOT

# The design's list. Some come in later versions; those that exist must be on the page.
DESIGNED = (
    *("observe", "plan", "explain", "apply", "accept", "serve", "operator", "demo", "restore", "backtest", "deploy"),
    *("doctor", "pause", "resume", "stop-all"),
    *(f"workload {verb}" for verb in ("list", "show", "hold", "release", "stop", "remove")),
    *(f"node {verb}" for verb in ("list", "show", "quarantine", "return")),
    *(f"check {verb}" for verb in ("list", "show")),
    *(f"policy {verb}" for verb in ("check", "show", "schema", "sentence")),
    *(f"ledger {verb}" for verb in ("list", "show", "export")),
)
# There since, and not in that list.
ADDED = (
    "node may-use",
    "tidy",
    "policy try",
    "policy schedule",
    "policy import",
    "top",
    "advise",
    "report",
    "login",
    "setup host",
    "setup remove",
    "notify test",
    "workload restore",
    "node register",
    *(f"fleet {verb}" for verb in ("deploy", "status", "plan", "apply", "logs", "upgrade", "remove")),
    *(f"fleet-db {verb}" for verb in ("init", "migrate", "add-machine", "status")),
    *(f"ledger {verb}" for verb in ("totals", "rotate", "status", "verify", "backup", "restore")),
    *(
        f"accept {verb}"
        for verb in ("list", "show", "logs", "fetch", "remove", "compare", "merge", "preflight", "mark")
    ),
)
EXIT_CODES = ROOT / "docs" / "reference" / "exit-codes.md"


def test_the_page_of_the_command_line_matches_the_code() -> None:
    advice = "docs/reference/cli.md is stale. Write it anew: python -m tests.docs.generate"
    assert generate.CLI_PAGE.read_text() == generate.cli_page(), advice


@pytest.mark.slow
def test_every_verb_of_the_design_that_exists_has_a_section() -> None:
    headings = set(re.findall(r"^## gpukeeper (.+)$", generate.CLI_PAGE.read_text(), re.MULTILINE))
    existing = [name for name in DESIGNED if name in dict(generate.verbs())]
    assert existing
    assert not [name for name in existing if name not in headings]


def test_no_verb_is_there_that_nobody_designed() -> None:
    strangers = set(dict(generate.verbs())) - set(DESIGNED) - set(ADDED)
    assert not strangers, f"name them in DESIGNED or ADDED: {sorted(strangers)}"


def test_every_verb_shows_what_it_does() -> None:
    silent = [name for name, verb in generate.verbs() if not (verb.help or "").strip().endswith(".")]
    assert not silent, f"a docstring of whole sentences is missing: {silent}"


def test_every_flag_and_every_argument_has_help() -> None:
    silent = [f"{name} {one.opts[0]}" for name, verb in generate.verbs() for one in verb.params if not one.help]
    assert not silent, f"help is missing: {silent}"


def test_every_exit_code_on_the_page_is_in_the_list_of_exit_codes() -> None:
    known = set(re.findall(r"^\| (\d+) \|", EXIT_CODES.read_text(), re.MULTILINE))
    named = {str(code) for codes in generate._EXIT_CODES.values() for code in codes}
    assert named <= known


def test_exit_codes_are_told_only_of_verbs_that_exist() -> None:
    assert set(generate._EXIT_CODES) <= set(dict(generate.verbs()))
