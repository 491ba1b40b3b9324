"""Images without a registry, made of this machine's own programs: `box:1` is busybox, `py:1` is Python with it."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

APPLETS = (
    *(
        "sh",
        "sleep",
        "cat",
        "touch",
        "echo",
        "ls",
        "ps",
        "kill",
        "id",
        "mkdir",
        "rm",
        "ln",
        "mv",
        "cp",
        "chmod",
        "chown",
    ),
    *(
        "date",
        "dd",
        "head",
        "tail",
        "grep",
        "wc",
        "env",
        "true",
        "false",
        "stty",
        "tty",
        "test",
        "seq",
        "sync",
        "nc",
        "timeout",
    ),
)
PATH = "PATH=/usr/local/bin:/bin"
# What no test program needs; together more than half of the library.
LEFT_OUT = frozenset(("site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo"))
CHANGES = {
    "box:1": [f"ENV {PATH}", 'CMD ["/bin/sh"]'],
    "py:1": [f"ENV {PATH}", "ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1", 'CMD ["python3"]'],
}


def busybox() -> str | None:
    return shutil.which("busybox")


@contextmanager
def tar_of(image: str) -> Iterator[IO[bytes]]:
    """The root filesystem as an open tar file."""
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", dereference=False) as tar:
            _skeleton(tar)
            if image == "py:1":
                _python(tar)
        file.seek(0)
        yield file


def _skeleton(tar: tarfile.TarFile) -> None:
    for name, mode in (
        ("bin", 0o755),
        ("etc", 0o755),
        ("proc", 0o555),
        ("sys", 0o555),
        ("dev", 0o755),
        ("work", 0o777),
    ):
        _folder(tar, name, mode)
    _folder(tar, "tmp", 0o1777)
    _text(tar, "etc/passwd", "root:x:0:0:root:/:/bin/sh\nann:x:1000:1000:ann:/work:/bin/sh\n")
    _text(tar, "etc/group", "root:x:0:\nann:x:1000:\n")
    program = busybox()
    assert program is not None, "busybox-static is not installed"
    tar.add(os.path.realpath(program), "bin/busybox")
    for applet in APPLETS:
        _link(tar, f"bin/{applet}", "busybox")


def _python(tar: tarfile.TarFile) -> None:
    """The interpreter below /usr/local, its library, and every shared library that they load, where each was found;
    the interpreter's own goes to /usr/lib, since it was found in a folder of this machine only."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    program = os.path.realpath(sys.executable)
    library = Path(os.__file__).parent
    tar.add(program, f"usr/local/bin/{version}")
    _link(tar, "usr/local/bin/python3", version)
    tar.add(library, f"usr/local/lib/{version}", filter=_needed)
    extensions = [str(path) for path in (library / "lib-dynload").glob("*.so")]
    for found in sorted(_loaded_by([program, *extensions])):
        name = Path(found).name
        standard = found.startswith(("/lib", "/usr/lib"))
        tar.add(os.path.realpath(found), found.lstrip("/") if standard else f"usr/lib/{name}")


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = Path(member.name).parts[4:]
    unneeded = LEFT_OUT.intersection(parts) or (parts and parts[0].startswith("config-"))
    # Compiled files spare each start half a second; those of the -O levels are never loaded.
    return None if unneeded or ".opt-" in member.name else member


def _loaded_by(files: list[str]) -> set[str]:
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed, re.MULTILINE))


def _folder(tar: tarfile.TarFile, name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    tar.addfile(entry)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    tar.addfile(entry, io.BytesIO(text.encode()))
