"""Without any extra: what needs none works, and what needs one prints which."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.fleet import Fleet
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

EXTRAS = ("prometheus_client", "starlette", "uvicorn", "jinja2", "psycopg", "apprise", "httpx2", "lightkube", "pynvml")
HIDDEN = f"""
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {EXTRAS} else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(one) for one in sys.meta_path]
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDDEN)
    return {"PYTHONPATH": str(tmp_path / "site")}


def test_the_daemon_needs_no_extra(fleet: Fleet, environ: dict[str, str]) -> None:
    fleet.ended("old", days=9)
    daemon = fleet.start("serve", **environ)
    assert daemon.stdout is not None
    reclaimed = daemon.stdout.readline()
    daemon.send_signal(signal.SIGTERM)
    _, error = daemon.communicate(timeout=PATIENCE)
    assert "reclaimed  docker/node-1/old" in reclaimed, error
    assert (daemon.returncode, "Traceback" in error) == (0, False)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("serve", "--metrics", "0"), "metrics"),
        (("serve", "--web", "0"), "web"),
        (("demo", "--web", "0"), "web"),
        (("plan", "--textfile", "gpukeeper.prom"), "metrics"),
        (("fleet-db", "status", "postgresql://h/d"), "postgres"),
    ],
)
def test_what_needs_an_extra_names_it(
    fleet: Fleet, environ: dict[str, str], words: tuple[str, ...], extra: str
) -> None:
    ran = fleet.start(*words, **environ)
    out, error = ran.communicate(timeout=PATIENCE)
    assert (ran.returncode, out) == (2, ""), error
    assert "Traceback" not in error
    assert f"[{extra}" in error
