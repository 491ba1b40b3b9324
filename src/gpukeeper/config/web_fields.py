"""Kinds of value in the section `web` of a policy file: users, headers, networks."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from gpukeeper.config import units
from gpukeeper.config.fields import kind


def _read_account(value: object) -> str:
    if not isinstance(value, str) or not _ACCOUNT.fullmatch(value):
        raise ValueError(f"{units.shown(value)} is not the name of a user. Write it like nobody or www-data.")
    return value


_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_ACCOUNT_SCHEMA = {"type": "string", "pattern": f"^{_ACCOUNT.pattern}$", "x-kind": "user"}
Account = Annotated[str, *kind(_read_account, str, _ACCOUNT_SCHEMA)]
AccountOrNone = Annotated[
    str | None,
    *kind(
        lambda value: None if value == "none" else _read_account(value),
        lambda name: name or "none",
        {**_ACCOUNT_SCHEMA, "x-kind": "user or none"},
    ),
]


def _read_header(value: object) -> str | None:
    if value == "none":
        return None
    if not isinstance(value, str) or not _HEADER.fullmatch(value):
        raise ValueError(f"{units.shown(value)} is not the name of a header. Write it like X-Forwarded-User.")
    if value.lower() in _OTHER_HEADERS:
        raise ValueError(f"{value} has another meaning. Use a header that only the proxy sets, like X-Forwarded-User.")
    return value


_HEADER = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,63}")  # proxies drop those with an underscore, or confuse them
_OTHER_HEADERS = frozenset(
    (
        *("accept", "authorization", "connection", "content-length", "content-type", "cookie", "forwarded", "host"),
        *("if-none-match", "origin", "referer", "transfer-encoding", "upgrade", "user-agent", "via", "x-csrf-token"),
        *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"),
    )
)
_HEADER_SCHEMA = {"type": "string", "pattern": f"^{_HEADER.pattern}$", "x-kind": "header or none"}
HeaderName = Annotated[str | None, *kind(_read_header, lambda name: name or "none", _HEADER_SCHEMA)]


def _read_network(value: object) -> str:
    example = "Write it like 10.0.0.2, 10.1.0.0/24 or fd00::2."
    try:
        network = ipaddress.ip_network(value if isinstance(value, str) else "")
    except ValueError as error:
        why = f" ({error})" if "host bits" in str(error) else ""
        raise ValueError(f"{units.shown(value)} is not an address or a network{why}. {example}") from None
    if network.prefixlen == 0:
        raise ValueError(
            f"{units.shown(value)} includes every address, so any client could act as any person. {example}"
        )
    return str(value)


Network = Annotated[str, *kind(_read_network, str, {"type": "string", "x-kind": "address or network"})]
