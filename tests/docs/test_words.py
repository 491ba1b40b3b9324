"""One word per idea, in everything a user reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs import markdown
from tests.docs.markdown import ROOT

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
WORDS = (
    *("workload", "platform", "owner", "hold", "snapshot", "decision", "reason", "plan", "step", "budget", "outcome"),
    *("pass", "ledger", "node", "check", "measurement", "baseline", "verdict", "quarantine", "reclaim"),
)
AVOIDED = re.compile(r"\b(clean-?ups?|prun(?:e|es|ed|ing)|reap(?:s|ed|ing|er)?|cull(?:s|ed|ing|er)?)\b", re.IGNORECASE)
# Phrases that a reader of technical English does not expect. CONTRIBUTING.md, Language.
UNCONVENTIONAL = re.compile(
    r"\b(nobody|anybody|everybody|whoever|mend(?:s|ed|ing)?|anew|in vain|unknown keeps|without further words"
    r"|looks? at|looked at|looking at|is told|are told|was told)\b",
    re.IGNORECASE,
)
FROM_CODE = {
    "cli.md",
    "policy.md",
    "rules.md",
    "checks.md",
    "gpu-models.md",
    "metrics.md",
    "checklist.md",
    "checklist-open.md",
}
COMMAND_LINE = ROOT / "src" / "gpukeeper" / "interfaces"


@pytest.mark.parametrize("word", WORDS)
def test_the_glossary_has_one_line_for(word: str) -> None:
    rows = re.findall(rf"^\| \*\*{word}\*\* \| .+ \|$", GLOSSARY.read_text(), re.MULTILINE)
    assert len(rows) == 1, f"{word}: {len(rows)} lines in the glossary"


@pytest.mark.parametrize("path", markdown.files(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_uses_another_word_for_reclaim(path: Path) -> None:
    text = markdown.prose(path)
    if path == GLOSSARY:
        text = text.partition("## Words we avoid")[0]
    assert not (found := AVOIDED.findall(text)), f"say reclaim, remove or delete instead of {sorted(set(found))}"


def _written_by_hand() -> list[Path]:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/index.md")]
    folders = ("tutorial", "how-to", "explanation", "reference")
    pages += [page for folder in folders for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [page for page in pages if page.name not in FROM_CODE]


@pytest.mark.parametrize("path", _written_by_hand(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_written_by_hand_use_conventional_phrases(path: Path) -> None:
    assert not (found := UNCONVENTIONAL.findall(markdown.prose(path))), sorted(set(found))


def test_no_sentence_of_the_command_line_uses_another_word_for_reclaim() -> None:
    strangers = {
        f"{path.name}:{node.lineno}": node.value
        for path in sorted(COMMAND_LINE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        # A sentence has a space; a key or an option of another program (`prune`) is not one.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        if AVOIDED.search(node.value)
    }
    assert not strangers, f"say reclaim, remove or delete: {strangers}"
