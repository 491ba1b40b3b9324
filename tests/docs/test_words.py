"""One word per idea, in everything a user reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.tree import modules, nodes, refuse
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
    *("cli.md", "policy.md", "rules.md", "checks.md", "gpu-models.md", "metrics.md", "checklist.md"),
    "checklist-open.md",
}
RECLAIM = "say reclaim, remove or delete"


def test_the_glossary_has_one_line_for_each_word() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| .+ \|$", GLOSSARY.read_text(), re.MULTILINE)
    wrong = ((GLOSSARY, 1, f"{word} has {count} lines") for word in WORDS if (count := rows.count(word)) != 1)
    refuse(wrong, "keep one")


def test_no_page_uses_another_word_for_reclaim() -> None:
    texts = {path: markdown.prose(path) for path in markdown.files()}
    texts[GLOSSARY] = texts[GLOSSARY].partition("## Words we avoid")[0]
    refuse(_said(AVOIDED, texts), RECLAIM)


def test_pages_written_by_hand_use_conventional_phrases() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/index.md")]
    folders = ("tutorial", "how-to", "explanation", "reference")
    pages += [page for folder in folders for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    written = {page: markdown.prose(page) for page in pages if page.name not in FROM_CODE}
    refuse(_said(UNCONVENTIONAL, written), "use a conventional phrase: CONTRIBUTING.md, Language")


def test_no_sentence_of_the_command_line_uses_another_word_for_reclaim() -> None:
    found = (
        (path, node.lineno, word[0])
        for path in modules("interfaces")
        for node in nodes(path)
        # A sentence has a space; a key or an option of another program (`prune`) is not one.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        for word in AVOIDED.finditer(node.value)
    )
    refuse(found, RECLAIM)


def _said(pattern: re.Pattern[str], texts: dict[Path, str]) -> Iterator[tuple[Path, int, str]]:
    for path, text in texts.items():
        for found in pattern.finditer(text):
            yield path, markdown.line_of(text, found), found[0]
