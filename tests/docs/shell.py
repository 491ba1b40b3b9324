"""The commands of the guides: every line of their shell blocks, and what a page shows as the output of the last one.

A block is shell text if it is marked `sh`, `bash` or `console`, or if it is not marked and begins with a known program.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.docs.markdown import ROOT

PROGRAMS = {
    *("ansible-playbook", "cat", "cd", "createdb", "curl", "docker", "echo", "export", "gpukeeper", "helm", "install"),
    *(
        "jq",
        "kubectl",
        "make",
        "mkdir",
        "oauth2-proxy",
        "openssl",
        "pip",
        "pipx",
        "promtool",
        "python",
        "python3",
        "ray",
    ),
    *("sqlite3", "sudoedit", "systemctl", "touch", "uv", "zcat"),
}
_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"(^|\s+)#[\s!].*$")


@dataclass(frozen=True)
class Command:
    page: str
    line: str  # without comment, in one line
    shown: str = ""  # the first words of the output that the page shows

    def __str__(self) -> str:
        return f"{self.page} | {self.line}"


def pages() -> list[Path]:
    """Without pages that are generated, and those that explain."""
    found = (path for name in ("tutorial", "how-to", "runbooks") for path in (ROOT / "docs" / name).glob("*.md"))
    return [ROOT / "README.md", *sorted(found)]


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[list[Command]]:
    """By block. What the page shows as output stands in the next block, under the same heading."""
    name, text = str(page.relative_to(ROOT)), page.read_text()
    found: list[list[Command]] = []
    last = -1  # the end of the last shell block, while its output may follow
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        if _is_shell(language, content):
            found.append([Command(name, line) for line in lines(content)])
            last = block.end()
        else:
            if language in ("", "text") and last >= 0 and "\n#" not in text[last : block.start()]:
                found[-1][-1] = Command(name, found[-1][-1].line, " ".join(content.split()[:2]))
            last = -1
    return found


def lines(text: str) -> list[str]:
    """One for each command line: continued lines and quoted text of several lines are joined."""
    found, part = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        part = f"{part}\n{line}" if part else _COMMENT.sub("", line)
        if part.strip() and _is_complete(part):
            found.append(" ".join(part.split()))
            part = ""
    assert not part.strip(), f"a quote does not end: {part}"
    return found


def _is_complete(line: str) -> bool:
    try:
        shlex.split(line)
    except ValueError:
        return False
    return True


def _is_shell(language: str, text: str) -> bool:
    if language in ("sh", "bash", "console"):
        return True
    first = text.partition("\n")[0] if language == "" else ""
    words = [word for word in first.split() if word != "sudo" and not re.match(r"[A-Z_]+=", word)]
    return bool(words) and words[0].rpartition("/")[2] in PROGRAMS
