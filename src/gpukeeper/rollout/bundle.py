"""Reads the file of `make bundle`: its version, for which Python and machine, its hash, and its installer."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec

from gpukeeper.model import reading
from gpukeeper.model.errors import UsageError
from gpukeeper.rollout.wanted import Bundle

ABOUT, INSTALLER = "about.json", "__main__.py"


class _About(msgspec.Struct, frozen=True):
    version: str
    pythons: tuple[str, ...]
    machine: str


def read_bundle(path: Path) -> Bundle:
    try:
        with zipfile.ZipFile(path) as archive:
            about = reading.decode(archive.read(ABOUT), type=_About)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"the bundle {path} cannot be read: {error.strerror}. Build one: make bundle") from error
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UsageError(f"{path} is no bundle of gpukeeper ({error}). Build one: make bundle") from error
    return Bundle(
        path=str(path),
        version=about.version,
        sha256=digest,
        size=size,
        pythons=about.pythons,
        machine=about.machine,
    )


def installer(bundle: Bundle) -> str:
    with zipfile.ZipFile(bundle.path) as archive:
        return archive.read(INSTALLER).decode()
