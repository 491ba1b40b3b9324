"""Keys of one control plane: an authority, one certificate for all listeners on loopback, and the key that signs the
tokens of service accounts."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_EXTENSIONS = """
basicConstraints = critical, CA:FALSE
keyUsage = digitalSignature, keyEncipherment
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = IP:127.0.0.1, DNS:localhost, DNS:kubernetes, DNS:kubernetes.default.svc
"""


@dataclass(frozen=True)
class Certificates:
    """Files. `folder` has tls.crt and tls.key, the names that controllers look for."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def tokens_key(self) -> Path:
        return self.folder / "tokens.key"


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir()
    (folder / "extensions").write_text(_EXTENSIONS)
    is_authority = ("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    own = (
        "req",
        "-x509",
        *_NEW_KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-subj",
        "/CN=engine",
        *_LASTS,
        *is_authority,
    )
    _openssl(folder, own)
    _make_pair(folder, "tls", "/CN=127.0.0.1")
    _openssl(folder, ("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", "tokens.key"))
    return Certificates(folder)


def make_client_certificate(keys: Certificates, user: str) -> tuple[Path, Path]:
    """Certificate and key; to the API server its bearer is this user."""
    _make_pair(keys.folder, user, f"/CN={user}")
    return keys.folder / f"{user}.crt", keys.folder / f"{user}.key"


def _make_pair(folder: Path, name: str, subject: str) -> None:
    _openssl(folder, ("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject))
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", *_LASTS, "-extfile", "extensions")
    _openssl(folder, ("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signed))


def _openssl(folder: Path, arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"openssl {arguments}: {done.stderr}"


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_LASTS = ("-days", "30")
