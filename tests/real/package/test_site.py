"""The documentation as pages (`make docs`): complete, without broken links, and without anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import sync_playwright

from tests.engines import chromium, has_chromium, require
from tests.package.test_build import ROOT


class Parsed(HTMLParser):
    """What a page loads, what it links to, the places in it, and the text of its paragraphs."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.paragraphs = [""]
        self._inside = 0
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.places.add(str(found["id"]))
        if tag in ("script", "img", "iframe") and found.get("src"):
            self.loads.add(str(found["src"]))
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.add(str(found["href"]))
        if tag == "a" and found.get("href"):
            self.links.add(str(found["href"]))
        if tag == "p":
            self.paragraphs.append("")
            self._inside += 1

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "p"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv/bin/pip", "install", "--quiet", "--require-hashes", "-r", ROOT / "requirements-docs.txt"]
    require("pypi", subprocess.run(pip, check=False).returncode == 0)
    build = [
        folder / "venv/bin/mkdocs",
        "build",
        "--strict",
        "-f",
        ROOT / "deploy/site/mkdocs.yml",
        "-d",
        folder / "out",
    ]
    done = subprocess.run(build, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # strict: a link of a page that leads nowhere is an error
    return folder / "out"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {page: Parsed(page) for page in sorted(site.rglob("*.html")) if page.name != "404.html"}


def test_every_page_of_the_documentation_is_there(site: Path, pages: dict[Path, Parsed]) -> None:
    expected = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    found = {page.relative_to(site) for page in pages}
    missing = {one for one in expected - found if one.name != "README.html"}
    assert missing == set()
    assert Path("repository/ARCHITECTURE.html") in found


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Parsed]) -> None:
    assert {one for page in pages.values() for one in page.loads if re.match(r"[a-z]+:|//", one)} == set()


def test_every_link_and_place_exists(pages: dict[Path, Parsed]) -> None:
    broken = []
    for page, parsed in pages.items():
        for link in parsed.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, place = link.partition("#")
            target = Path(os.path.normpath(page.parent / unquote(path))) if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (place and target in pages and unquote(place) not in pages[target].places):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_lists_and_tables_are_lists_and_tables(pages: dict[Path, Parsed]) -> None:
    """The Markdown of GitHub and that of mkdocs differ there; the hook adapts it."""
    wrong = [
        f"{page.name}: {text[:80]}"
        for page, parsed in pages.items()
        for text in parsed.paragraphs
        if re.search(r"\n(- |\d+\. |\|?-{3,}\|)|```", text)
    ]
    assert wrong == []


@pytest.fixture
def server(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as made:
        threading.Thread(target=made.serve_forever).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_the_search_finds_a_page(server: str) -> None:
    require("chromium", has_chromium())
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{server}/index.html")
        page.keyboard.press("s")
        page.keyboard.type("quarantine", delay=30)
        page.wait_for_selector(".md-search-result__link")
        browser.close()
    assert [one for one in asked if not one.startswith((server, "data:", "blob:"))] == []
