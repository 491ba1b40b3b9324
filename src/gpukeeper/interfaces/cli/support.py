"""A file for a support request: what doctor found, the effective policy, the newest lines of the ledger. No secrets.

The policy shows channels without their words, as `policy show` does. On top of that, everything that has the form of a
password, token or key is replaced in every file.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from gpukeeper import __version__
from gpukeeper.config.load import load_policy
from gpukeeper.config.show import rows
from gpukeeper.ledger.files import ledger_path
from gpukeeper.ledger.journal import open_ledger
from gpukeeper.ledger.lines import json_lines
from gpukeeper.ledger.tables import LineFilter
from gpukeeper.model.errors import KeeperError, UsageError

LINES = 500
GONE = "REMOVED"
_NAMES = "(?:password|passwd|token|secret|api[_-]?key|credential)"
# Bounded: a label of 64 KB that is made of these words must not take minutes.
_SECRETS = (
    (re.compile(r"(?i)(://)[^/@\s\"']+@"), rf"\1{GONE}@"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {GONE}"),
    (re.compile(rf"(?i)({_NAMES}[\w.-]{{0,40}}[\"']?\s{{0,5}}[:=]\s{{0,5}}[\"']?)[^\s\"',}}&]+"), rf"\1{GONE}"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), GONE),
    # JSON Web Tokens, and the tokens of GitHub, Slack and others that begin like this.
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"), GONE),
    (re.compile(r"\b(?:gh[pousr]_\w{20,}|glpat-[\w-]{10,}|xox[a-z]-[\w-]{10,}|sk-[\w-]{20,})"), GONE),
)


def without_secrets(text: str) -> str:
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def write(target: Path, findings: list[dict[str, str]], policy: Path | None) -> tuple[str, ...]:
    """The names of the files in it. A part that cannot be read is replaced by the reason."""
    parts: Mapping[str, Callable[[], str]] = {
        "about.json": _about,
        "doctor.json": lambda: json.dumps(findings, indent=1),
        "policy.txt": lambda: _policy(policy),
        "ledger.jsonl": _ledger,
    }
    texts = {name: without_secrets(_or_why(part)) for name, part in parts.items()}
    try:
        number = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as tar:
            for name, text in texts.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"gpukeeper-support/{name}")
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))
    except FileExistsError:
        raise UsageError(f"{target} exists. Nothing was written. Name a file that does not exist.") from None
    except OSError as error:
        raise KeeperError(f"{target} could not be written: {error.strerror or error}.") from error
    return tuple(texts)


def _or_why(part: Callable[[], str]) -> str:
    try:
        return part()
    except (KeeperError, OSError) as problem:
        return f"could not be read: {problem}\n"


def _about() -> str:
    names = sorted({one.metadata["Name"] for one in metadata.distributions() if one.metadata["Name"]}, key=str.lower)
    return json.dumps(
        {
            "gpukeeper": __version__,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "system": _system(),
            "kernel": platform.release(),
            "root": os.geteuid() == 0,
            "variables": sorted(name for name in os.environ if name.startswith("GPUKEEPER_")),  # names only
            "packages": {name: metadata.version(name) for name in names},
        },
        indent=1,
    )


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _policy(policy: Path | None) -> str:
    return "\n".join(f"{one.setting} = {one.text}  # {one.origin}" for one in rows(load_policy(policy)))


def _ledger() -> str:
    ledger = open_ledger(ledger_path(), write=False)
    try:
        return "\n".join(json_lines(asyncio.run(ledger.lines(LineFilter(last=LINES)))))
    finally:
        ledger.close()
