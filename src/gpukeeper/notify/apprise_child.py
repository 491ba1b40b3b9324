"""`python -m gpukeeper.notify.apprise_child`: sends messages through apprise, one for each line of standard input; see
`apprise`.

For each line it prints one: whether the service accepted the message, or why not. It loads the plugins as the user of
the daemon, and becomes an unprivileged user before it connects anywhere. What apprise and its plugins log may contain
secrets: it is used to classify a failure, and never passed on.
"""

from __future__ import annotations

import logging
import os
import pwd
import re
import signal
import sys
from pathlib import Path
from types import ModuleType

import msgspec

from gpukeeper.model import reading

UNPRIVILEGED = "nobody"
LONGEST = 60  # seconds for one message; the parent has a shorter deadline and ends this process
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NOT_INSTALLED = 3  # exit code


class Outgoing(msgspec.Struct, frozen=True):
    url: str
    title: str
    body: str
    category: str
    send: bool = True  # False: only check that the URL can be used


class Reply(msgspec.Struct, frozen=True):
    accepted: bool
    why: str = ""
    transient: bool = False
    recipient: bool = False  # only this recipient was refused


_TYPES = {"NOTICE": "info", "WARNING": "warning", "STOPPED": "warning", "ALERT": "failure"}
_HTTP = re.compile(r"error=(\d{3})\b")
# What a log line contains, what is reported, and whether another attempt may help. The first that fits.
_CAUSES = (
    (r"auth|login|535", "the service refused the credentials", False),
    (r"connection refused|errno 111", "the connection was refused", True),
    (r"timed? ?out", "the connection timed out", True),
    (
        r"name or service|name resolution|getaddrinfo|nodename|resolve",
        "the name of the server could not be resolved",
        True,
    ),
    (r"certificate|ssl|tls", "the TLS connection failed", True),
    (r"unreachable|no route", "the server is not reachable", True),
    (r"\b4\d\d\b", "the server refused the message for now", True),
)
_UNKNOWN = Reply(False, "the service did not accept the message", transient=True)


def main() -> int:
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what plugins print
    os.dup2(nowhere, 2)
    if SYSTEM_CERTIFICATES.exists():  # readable for every user, and has the site's own authorities
        os.environ["REQUESTS_CA_BUNDLE"] = str(SYSTEM_CERTIFICATES)
    try:
        import apprise
    except ImportError:
        return NOT_INSTALLED
    apprise.Apprise.instantiate("json://localhost")  # loads every plugin
    _become_unprivileged()
    log = _capture_log()
    replies.write(b"{}\n")  # ready
    replies.flush()
    for line in sys.stdin.buffer:
        signal.alarm(LONGEST)
        reply = _deliver(apprise, reading.decode(line, Outgoing), log)
        signal.alarm(0)
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
    return 0


def _become_unprivileged() -> None:
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(UNPRIVILEGED)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


class _Captured(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage()
        # Below a warning only what was raised: other lines repeat the message itself.
        if record.levelno >= logging.WARNING or "Exception" in words:
            self.lines.append(words[:2000])


def _capture_log() -> _Captured:
    captured = _Captured()
    logger = logging.getLogger("apprise")
    logger.handlers = [captured]
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    return captured


def _deliver(apprise: ModuleType, outgoing: Outgoing, log: _Captured) -> Reply:
    log.lines.clear()
    asset = apprise.AppriseAsset(
        app_id="gpukeeper", app_desc="gpukeeper", app_url="", async_mode=False, plugin_paths=[], secure_logging=True
    )
    try:
        service = apprise.Apprise.instantiate(outgoing.url, asset=asset)
        if service is None:
            return Reply(False, "the URL in the file is not one that apprise can use")
        if not outgoing.send:
            return Reply(True)
        sender = apprise.Apprise(asset=asset)
        sender.add(service)
        accepted = sender.notify(
            body=outgoing.body,
            title=outgoing.title,
            notify_type=_TYPES[outgoing.category],
            body_format=apprise.NotifyFormat.TEXT,
        )
    except Exception as error:  # of a plugin: its words may contain the URL
        return Reply(False, f"the plugin of apprise failed ({type(error).__name__})", transient=True)
    return Reply(True) if accepted else cause_of(log.lines)


def cause_of(lines: list[str]) -> Reply:
    """In fixed words: a line of the log may contain a secret."""
    text = "\n".join(lines)
    status = _HTTP.search(text)
    if status is not None:
        code = int(status[1])
        transient = code == 429 or code >= 500
        return Reply(False, f"the service refused the message (HTTP {code})", transient=transient)
    if re.search(r"\b55[0134]\b", text):
        return Reply(False, "the server refused the recipient", recipient=True)
    for pattern, words, transient in _CAUSES:
        if re.search(pattern, text, re.IGNORECASE):
            return Reply(False, words, transient=transient)
    return _UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
