"""Settings of all tests: examples, groups, a temporary directory of their own, results."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.remote import Producer

from tests import results, small_reserve
from tests.real.groups import MARKED, ByEngine

# HYPOTHESIS_PROFILE chooses one. How long an example takes says nothing on a busy machine.
_all = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in every run: what fails was broken by the change, and fails again.
settings.register_profile("tests", _all, derandomize=True, database=None)
# The same, fewer of them.
settings.register_profile("quick", _all, derandomize=True, database=None, max_examples=25)
# A search for new ones, at night.
settings.register_profile("search", _all, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))

if settings().derandomize:
    # Hypothesis also tries constants that it reads from the source of all modules imported so far, so that examples
    # would depend on which tests run in this process, and in which order. It takes seconds, too.
    assert callable(providers._get_local_constants), "Hypothesis does this in another way now"
    providers._get_local_constants = lambda: providers._local_constants

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


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if REAL in item.path.parents and (marker := MARKED.get(item.path.relative_to(REAL).parts[0])):
            item.add_marker(marker)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByEngine | None:
    return ByEngine(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture(autouse=True, scope="session")
def small_reserves() -> None:
    small_reserve.install()
