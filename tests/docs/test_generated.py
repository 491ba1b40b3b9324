"""What the reference says is what the code says."""

from __future__ import annotations

import re

import typer

from gpukeeper.__main__ import app
from gpukeeper.acceptance.suite import CHECKS
from gpukeeper.lifecycle.decide import RULES
from gpukeeper.model import errors
from tests.docs import generate, manual
from tests.docs.markdown import ROOT
from tests.simulation import planted_acceptance  # noqa: F401 - registers its bugs
from tests.simulation.planted import PLANTED

EXIT_CODES = ROOT / "docs" / "reference" / "exit-codes.md"
# Every code there is; that of each error class comes from the class itself.
DOCUMENTED = {0, 1, 2, 3, 4, 5, 10, 11, 12, 130}


def test_the_page_of_rules_matches_the_code() -> None:
    advice = "docs/reference/rules.md is stale. Write it anew: python -m tests.docs.generate"
    assert generate.RULES_PAGE.read_text() == generate.rules_page(), advice


def test_the_page_of_checks_matches_the_code() -> None:
    advice = "docs/reference/checks.md is stale. Write it anew: python -m tests.docs.generate"
    assert generate.CHECKS_PAGE.read_text() == generate.checks_page(), advice


def test_the_page_of_gpu_models_matches_the_code() -> None:
    advice = "docs/reference/gpu-models.md is stale. Write it anew: python -m tests.docs.generate"
    assert generate.MODELS_PAGE.read_text() == generate.models_page(), advice


def test_the_man_page_and_completion_scripts_match_the_code() -> None:
    for path, content in manual.files(typer.main.get_command(app), dict(generate.verbs())).items():
        assert path.read_text() == content, f"{path} is stale. Write it anew: python -m tests.docs.generate"


def test_every_check_shows_what_it_proves_and_what_it_cannot() -> None:
    assert CHECKS
    for check in CHECKS:
        for words in (check.proves, check.cannot):
            assert words.endswith("."), f"{check.name}: not a sentence: {words!r}"
        depths = [one.depth for one in check.servings]
        assert depths == sorted(set(depths)), f"{check.name}: its servings are not by depth"


def test_every_rule_shows_what_it_is() -> None:
    for rule in RULES:
        assert rule.evaluate.__module__.rsplit(".", 1)[-1] == rule.name
        assert generate.docstring(rule), f"the module of {rule.name} has no docstring"
        assert rule.summary.endswith("."), f"the summary of {rule.name} is not a sentence"


def test_every_exit_code_is_documented_once() -> None:
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", EXIT_CODES.read_text(), re.MULTILINE)]
    assert codes == sorted(DOCUMENTED)


def test_the_exit_code_of_every_error_is_documented_with_its_name() -> None:
    rows = dict(re.findall(r"^\| (\d+) \|(.+)\|$", EXIT_CODES.read_text(), re.MULTILINE))
    for error in _error_classes():
        row = rows.get(str(error.exit_code), "")
        assert f"`{error.__name__}`" in row, f"{error.__name__} ({error.exit_code}) is not in {EXIT_CODES.name}"


def test_the_error_tree_in_the_docstring_shows_the_real_codes() -> None:
    drawn = dict(re.findall(r"(\w+)\s{2,}(\d+)(?:\s|$)", errors.__doc__ or ""))
    assert drawn == {error.__name__: str(error.exit_code) for error in _error_classes()}


def test_every_checker_and_every_planted_bug_is_named_by_a_promise() -> None:
    page = (ROOT / "docs" / "explanation" / "promises.md").read_text()
    checkers = [path.stem for path in (ROOT / "tests" / "simulation" / "checkers").glob("[a-z]*.py")]
    assert checkers
    assert not [name for name in [*checkers, *PLANTED] if f"`{name}`" not in page]


def test_no_promise_names_a_planted_bug_that_is_not_there() -> None:
    page = (ROOT / "docs" / "explanation" / "promises.md").read_text()
    named = [bug for line in re.findall(r"^Planted: (.+)$", page, re.MULTILINE) for bug in re.findall(r"`(\w+)`", line)]
    assert named
    assert not set(named) - set(PLANTED)


def _error_classes() -> list[type[errors.KeeperError]]:
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.KeeperError)]
    assert errors.KeeperError in found
    return found
