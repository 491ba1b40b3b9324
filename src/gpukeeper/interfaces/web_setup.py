"""How the dashboard is served on this machine: the section `web` of the policy with what it names checked and read,
and the certificate and key, which are read with the daemon's rights and passed to the web process.
"""

from __future__ import annotations

import os
import pwd
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from gpukeeper.interfaces.link import LOOPBACK_HOSTS, Account, SiteSettings, TlsPair, TrustedProxy
from gpukeeper.ledger.files import read_secret_file, why_untrusted
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import Web, WebTls

LARGEST = 1024 * 1024  # bytes of a file
Stamp = tuple[tuple[int, int, int], ...]


def read_tls(settings: WebTls) -> TlsPair | None:
    """None: not configured. Raises UsageError with the reason if the files cannot be used."""
    if settings.certificate is None or settings.key is None:
        return None
    certificate, key = Path(settings.certificate), Path(settings.key)
    found = TlsPair(_read_certificate(certificate), read_secret_file(key, LARGEST))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, _no_passphrase)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UsageError(
            f"The certificate {certificate} and the key {key} cannot be used: {_why(error)}. "
            "Both must be PEM files, the key without a passphrase, and belong to each other."
        ) from error
    return found


def tls_stamp(settings: WebTls) -> Stamp:
    """Changes when the files do; also if they are links that were changed."""
    found = []
    for path in (settings.certificate, settings.key):
        try:
            one = Path(path).stat() if path is not None else None
        except OSError:
            one = None
        found.append((0, 0, 0) if one is None else (one.st_ino, one.st_size, one.st_mtime_ns))
    return tuple(found)


def _read_certificate(path: Path) -> bytes:
    why = why_untrusted(path)
    if why is not None:
        raise UsageError(f"The certificate {path} is not used: {why}.")
    try:
        with path.open("rb") as file:
            return file.read(LARGEST)
    except OSError as error:
        raise UsageError(f"The certificate {path} could not be read: {error.strerror}.") from error


def _no_passphrase() -> str:
    """Without this, OpenSSL asks on the terminal."""
    raise ValueError("the key has a passphrase")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key belongs to another certificate"
    if isinstance(error, ssl.SSLError) and reason is None:
        return "one of them is not a PEM file"
    return str(reason or error).lower().replace("_", " ")


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
