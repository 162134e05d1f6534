"""`make docs`: the site builds strictly, every page is in the navigation, and links and anchors resolve."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from hybrid import public

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason='pip install -e ".[docs]"')


class Links(HTMLParser):
    """A page's ids, and what it links to or loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") != "canonical" and "href" in values:
            self.loaded.append(values["href"])


def build(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """The site of `ROOT` in `folder`, or what went wrong."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    return subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Links]:
    """Every page of the built site, by its file."""
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stdout
    return {path: Links(path.read_text()) for path in folder.rglob("*.html")}


def pages_of(site: dict[Path, Links]) -> Path:
    """The folder of the built site."""
    return min(site, key=lambda path: len(path.parts)).parent


@needs_mkdocs
def test_every_page_is_built_and_in_the_navigation(site):
    folder = pages_of(site)
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert len(pages) > 18
    assert pages | {"404.html"} == {str(path.relative_to(folder)) for path in site}
    linked = {urlsplit(link).path for link in site[folder / "index.html"].links}
    assert pages - linked == set()
    assert not list(folder.rglob("*.py"))


@needs_mkdocs
def test_links_and_anchors_resolve(site):
    broken, checked = [], 0
    for path, page in site.items():
        if path.name == "404.html":  # its links are absolute, for a server
            continue
        for link in page.links:
            target = urlsplit(link)
            if target.scheme:
                continue
            file = path if not target.path else (path.parent / unquote(target.path)).resolve()
            file = file / "index.html" if file.is_dir() else file
            checked += 1
            anchor_is_there = (
                not target.fragment or unquote(target.fragment) in site[file].ids if file in site else True
            )
            if not file.exists() or not anchor_is_there:
                broken.append(f"{path.name}: {link}")
    assert checked > 1000
    assert broken == []


@needs_mkdocs
def test_pages_load_nothing_from_other_hosts(site):
    loaded = {(path, source) for path, page in site.items() for source in page.loaded}
    assert len(loaded) > 40
    assert [source for _, source in loaded if urlsplit(source).netloc] == []
    missing = [
        f"{path.name}: {source}"
        for path, source in loaded
        if path.name != "404.html" and not (path.parent / urlsplit(source).path).resolve().exists()
    ]
    assert missing == []


@needs_mkdocs
def test_the_api_page_has_every_public_name_with_signature_and_tables(site):
    folder = pages_of(site)
    page = site[folder / "api.html"]
    assert {f"hybrid.{name}" for name in public.__all__} - page.ids == set()
    assert {
        "hybrid.HybridEngine.rollout",
        "hybrid.RolloutBatch.select_rows",
        "hybrid.compat.trl.rollout_func",
    } <= page.ids
    assert not [name for name in page.ids if name.startswith("hybrid.") and "._" in name]
    text = re.sub(r"<[^>]+>", "", (folder / "api.html").read_text())
    assert "score(\n" in text and "temperature: float = 1.0," in text
    assert "Parameters:" in text and "Returns:" in text
