"""Settings of all tests: examples, groups, a temporary directory of their own, results."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import results
from tests.real.groups import ALONE, group_of

# How long an example takes says nothing on a busy machine.
settings.register_profile("tests", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

REAL = Path(__file__).parent / "real"
# Short: engines make sockets below it, whose paths may have 107 characters.
_PREFIX = "gk-tests."


@pytest.hookimpl(tryfirst=True)  # before junitxml reads where it writes
def pytest_configure(config: pytest.Config) -> None:
    results.add_to(config)
    if config.option.basetemp is None:
        _remove_old_directories()
        config.option.basetemp = str(Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getpid()}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The directory of a run that failed stays until the next run."""
    directory = Path(session.config.option.basetemp)
    if exitstatus == 0 and directory.name == f"{_PREFIX}{os.getpid()}":
        _remove(directory)


def _remove_old_directories() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not Path("/proc", directory.suffix.removeprefix(".")).exists():
            _remove(directory)


def _remove(directory: Path) -> None:
    """Not by shutil.rmtree, which fails with RecursionError for the deepest trees that tests make."""
    subprocess.run(["rm", "-rf", str(directory)], check=False)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REAL in item.path.parents:
            file = item.path.relative_to(REAL)
            item.add_marker(pytest.mark.xdist_group(group_of(file)))
            if file.parts[0] in ALONE:
                item.add_marker(pytest.mark.alone)
