"""A bundle that installs in a second: the real installer, and in place of pip and the wheels a program that lets the
environment run the gpukeeper of this checkout. What pip does with real wheels: tests/real/package/test_bundle.py."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_PIP = """
import sys, sysconfig
from pathlib import Path
if sys.argv[-1].endswith(".whl"):
    program = Path(sys.prefix, "bin/gpukeeper")
    program.write_text(f"#!{{sys.prefix}}/bin/python\\n" + {script!r})
    program.chmod(0o755)
    Path(sysconfig.get_path("purelib"), "checkout.pth").write_text({paths!r})
"""
_SCRIPT = """
import runpy, sys
{begin}
runpy.run_module("gpukeeper", run_name="__main__")
"""


def tiny_bundle(folder: Path, version: str, *, begin: str = "", installer_begin: str = "") -> Path:
    """`begin`: what the installed program does first; `installer_begin`: what the installer does first."""
    paths = f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n"
    script = _SCRIPT.format(begin=begin)
    wheel = f"gpukeeper-{version}-py3-none-any.whl"
    about = {
        "version": version,
        "wheel": wheel,
        "sha256": hashlib.sha256(b"").hexdigest(),
        "pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"],
        "machine": os.uname().machine,
    }
    installer = (ROOT / "deploy/bundle/installer.py").read_text()
    path = folder / f"gpukeeper-{version}.pyz"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("about.json", json.dumps(about))
        bundle.writestr("__main__.py", installer.replace("def main()", f"{installer_begin}\n\ndef main()", 1))
        bundle.writestr("requirements.txt", "")
        bundle.writestr(f"wheels/{wheel}", b"")
        bundle.writestr(
            "wheels/pip-0-py3-none-any.whl", _zip("pip/__main__.py", _PIP.format(script=script, paths=paths))
        )
    return path


def _zip(name: str, text: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, text)
    return made.getvalue()
