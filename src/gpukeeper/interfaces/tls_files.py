"""Certificate and key of the dashboard: read with the daemon's rights, checked, and passed to the web process."""

from __future__ import annotations

import ssl
from pathlib import Path

from gpukeeper.interfaces.link import TlsPair
from gpukeeper.ledger.secret_file import read_secret_file
from gpukeeper.ledger.trust import why_untrusted
from gpukeeper.model.errors import UsageError
from gpukeeper.model.policy import WebTls

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
