"""The offline bundle for the Debian machine, and one such machine for all tests here."""

from __future__ import annotations

import ensurepip
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines import require
from tests.package.test_build import ROOT
from tests.real.ansible import installation as ansible
from tests.real.systemd.machine import PYTHON, Machine, is_bootable, machine


@pytest.fixture(scope="session")
def bundle(bundle_for: Callable[[str], Path]) -> Path:
    require("systemd-nspawn", is_bootable())
    return bundle_for(PYTHON)


@pytest.fixture(scope="session")
def booted(bundle: Path) -> Iterator[Machine]:
    files = {bundle: "/bundle.pyz", ROOT / "deploy/ansible": "/playbook", ROOT / "examples/policies": "/policies"}
    if ansible.is_installed():
        files[ansible.core()] = "/ansible"
        # For `python3 -m venv`: Debian has it in a package of its own, python3-venv.
        files[Path(ensurepip.__file__).parent] = f"/usr/lib/python{PYTHON}/ensurepip"
    with machine(files) as made:
        yield made
