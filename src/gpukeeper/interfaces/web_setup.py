"""How the dashboard is served on this machine: the section `web` of the policy, with what it names checked and read."""

from __future__ import annotations

import os
import pwd
from urllib.parse import urlsplit

import msgspec

from gpukeeper.interfaces.link import LOOPBACK_HOSTS, Account, SiteSettings, TlsPair, TrustedProxy
from gpukeeper.interfaces.tls_files import read_tls
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Web

DEFAULT_USER, NO_USER = Web().user, 65534
CLEAR = "cookies and tokens can be read on the network"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """For one web process. `warnings`: what an admin should know, as sentences."""

    web: Web
    site: SiteSettings
    account: Account | None = None
    tls: TlsPair | None = None
    warnings: tuple[str, ...] = ()


def read_setup(web: Web, address: str) -> Setup:
    """Blocking: reads files and names of users. Raises UsageError."""
    tls, proxy = read_tls(web.tls), _proxy(web)
    remote = not is_loopback(address)
    if remote and tls is None and proxy is None and not web.plain_http:
        raise UsageError(
            f"--web: on {address} cookies and tokens would be sent without encryption. The dashboard was not started. "
            "Set web.tls (certificate and key) or web.proxy in the policy, serve it on 127.0.0.1, or accept the risk "
            "with web.plain_http: true."
        )
    warnings: tuple[str, ...] = ()
    if remote and tls is None and web.plain_http:
        warnings = (f"the dashboard is served on {address} without TLS (web.plain_http): {CLEAR}",)
    site = SiteSettings(
        url=web.url or "",
        hosts=() if remote else accepted_hosts(web.url, address),
        proxy=proxy,
        only_proxy=remote and tls is None and not web.plain_http,
        tls=tls is not None,
    )
    return Setup(web=web, site=site, account=_account(web.user), tls=tls, warnings=warnings)


def accepted_hosts(url: str | None, address: str) -> tuple[str, ...]:
    """On loopback, where reading needs no login: a page of another site must not read it under its own name."""
    named = urlsplit(url).hostname if url is not None else None
    return tuple(dict.fromkeys((*LOOPBACK_HOSTS, address, *((named,) if named else ()))))


def is_loopback(address: str) -> bool:
    return address in {"::1", "localhost"} or address.startswith("127.")


def _proxy(web: Web) -> TrustedProxy | None:
    found = web.proxy
    if found.header is None:
        return None
    uid = None if found.user is None else _entry(found.user, "web.proxy.user").pw_uid
    return TrustedProxy(found.header.lower(), found.from_, uid)


def _account(name: str) -> Account | None:
    if os.geteuid() != 0:
        return None
    if name == DEFAULT_USER:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            return Account(NO_USER, NO_USER)
    else:
        found = _entry(name, "web.user")
    if found.pw_uid == 0:
        raise UsageError(f'web.user: "{name}" is root (uid 0). The dashboard was not started. Use another user.')
    return Account(found.pw_uid, found.pw_gid)


def _entry(name: str, setting: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise UsageError(
            f'{setting}: this machine has no user "{name}". The dashboard was not started. '
            f"Create it, for example: useradd --system --shell /usr/sbin/nologin {name}"
        ) from None
