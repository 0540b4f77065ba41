"""The site of the pages (`make docs`): it builds, nothing on it leads nowhere or comes from elsewhere, search finds."""

from __future__ import annotations

import contextlib
import functools
import html.parser
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import WHY_NOT, browser

ROOT = Path(__file__).resolve().parents[2]
ASSETS = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
NARROW = 500  # pixels: half a laptop's window

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed (the extra docs)"
)


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs, into another folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=280)


class Page(html.parser.HTMLParser):
    """What a built page names: its anchors, where it links to, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if ASSETS.get(tag, "") in given:
            self.assets.append(given[ASSETS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name != "404.html"}


def test_every_page_is_on_it(site: Path, pages: dict[Path, Page]) -> None:
    built = {file.parent.relative_to(site).as_posix() for file in pages}
    written = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    meant = {(path.parent if path.stem == "README" else path.with_suffix("")).as_posix() for path in written}
    assert meant | {".", "changelog", "contributing"} <= built
    assert "coremill train" in (site / "index.html").read_text(), "the README is the home page"


def test_no_link_and_no_anchor_leads_nowhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme:
                continue
            path = (file.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else file
            target = path / "index.html" if path.is_dir() else path
            fragment = urllib.parse.unquote(parts.fragment)
            lost = target in pages and fragment and fragment not in pages[target].anchors | {"__skip"}
            if not target.is_file() or lost:
                broken.append(f"{file.relative_to(site)}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    outside = [one for page in pages.values() for one in page.assets if re.match(r"(?:\w+:)?//", one)]
    sheets = "".join(sheet.read_text(encoding="utf-8") for sheet in site.rglob("*.css"))
    assert outside + re.findall(r"(?:url\(|@import\s)\s*[\"']?((?:https?:)?//[^)\"']+)", sheets) == []


def test_the_search_index_holds_the_guide(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    guide = " ".join(entry["text"] for entry in entries if entry["location"].startswith("guide"))
    assert "coremill plan" in guide


def test_a_link_that_leads_nowhere_and_a_page_without_a_group_end_the_build(tmp_path: Path) -> None:
    for name in ("mkdocs.yml", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "examples", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    lost = ("nowhere.md", "config.md#nowhere", "../src/nowhere.py")
    page = tmp_path / "docs" / "plan.md"
    page.write_text("\n\n".join([page.read_text(), *(f"[word]({link})" for link in lost)]))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [link for link in lost if link not in done.stderr] == []
    (tmp_path / "docs" / "new-page.md").write_text("# New\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "no group" in done.stderr and "new-page.md" in done.stderr


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.skipif(WHY_NOT is not None, reason=f"no browser: {WHY_NOT}")
def test_in_a_browser(site: Path, pages: dict[Path, Page]) -> None:
    """No page is wider than a narrow window, both palettes are there, and search answers."""
    shades = []
    with served(site) as address, browser() as tab:
        for dark in (False, True):
            tab.look(NARROW, dark=dark)
            tab.open(address)
            shades.append(tab.ask("getComputedStyle(document.body).backgroundColor"))
        wide = []
        for file in pages:
            if "decisions" in file.parts and file.parent.name != "decisions":
                continue  # text alone
            tab.open(address + file.parent.relative_to(site).as_posix())
            if tab.ask("document.documentElement.scrollWidth") > NARROW:
                wide.append(file.parent.name)
        tab.look(1300)
        tab.open(address)
        tab.ask("document.querySelector('.md-search__input').focus()")
        tab.call("Input.insertText", text="calibration")
        tab.until("document.querySelectorAll('.md-search-result__item').length > 0", "an answer of the search")
        assert wide == [] and tab.problems == []
    assert len(set(shades)) == 2, shades
