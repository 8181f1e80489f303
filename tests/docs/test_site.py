"""The site is built without a warning, whole, and needs nothing from elsewhere."""

import os
import re
import subprocess
import sys
from html import unescape
from urllib.parse import unquote

import pytest

from reporting import browser

from pages import PAGES, ROOT

pytest.importorskip("sphinx")

ELSEWHERE = re.compile(r"""(?:src|href)=["'](?:https?:)?//|@import|url\((?!["']?(?:data:|#))""")
LINK = re.compile(r'<a\b[^>]*\bhref="([^"]*)"')
LINKS = [
    ("theory/image.html", "../api/image.html#steradian.image.image_step"),
    ("theory/image.html", "../api/image.html#steradian.image.ImageStep.h1"),
    ("theory/equivalence.html", "../api/optim.html#steradian.optim.AdaGradG.from_sgd"),
    ("discovery.html", "api/discovery.html#steradian.discovery.find_groups"),
    ("watching.html", "api/watching.html#steradian.watching.watch.watch"),
    ("api/image.html", "scheme.html#steradian.scheme.read_step"),
]


def test_the_site(tmp_path):
    """One test, so that the site is built once, whichever process takes it."""
    site = build(tmp_path)
    every_page_is_there(site)
    nothing_is_loaded_from_elsewhere(site)
    formulas_are_mathml_and_their_font_comes_along(site)
    code_that_names_something_public_is_a_link_to_it(site)
    every_link_leads_somewhere(site)
    nothing_is_cut_off_on_a_phone(site)


def build(folder):
    """References, formulas and docstrings of every page must be in order."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    site = folder / "html"
    done = subprocess.run([*command, str(ROOT / "docs"), str(site)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return site


def every_page_is_there(site):
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file(), page


def nothing_is_loaded_from_elsewhere(site):
    for file in [*site.rglob("*.html"), *(site / "_static").rglob("*.css")]:
        text = re.sub(r"<a\b[^>]*>", "", file.read_text(encoding="utf-8"))
        found = ELSEWHERE.search(text)
        assert found is None, f"{file.name}: {text[found.start() - 40 : found.end() + 60]}"


def formulas_are_mathml_and_their_font_comes_along(site):
    page = (site / "theory" / "image.html").read_text(encoding="utf-8")
    assert page.count("<math") > 50
    assert "$$" not in page
    style = (site / "_static" / "mathematics.css").read_text(encoding="utf-8")
    assert 'url("data:font/woff;base64,' in style


def code_that_names_something_public_is_a_link_to_it(site):
    for page, target in LINKS:
        assert f'href="{target}"' in (site / page).read_text(encoding="utf-8"), (page, target)


def every_link_leads_somewhere(site):
    pages = {file: file.read_text(encoding="utf-8") for file in site.rglob("*.html")}
    places = {file: {unescape(place) for place in re.findall(r'\bid="([^"]*)"', text)} for file, text in pages.items()}
    for file, text in pages.items():
        if "_modules" in file.parts:
            continue  # viewcode knows one name for a source file, and ways back from the source may miss the other
        for link in set(LINK.findall(text)):
            path, _, place = unquote(unescape(link)).partition("#")
            if ":" in path:
                continue
            target = (file.parent / path).resolve() if path else file
            assert target.exists(), f"{file.name}: {link}"
            assert not place or target not in places or place in places[target], f"{file.name}: {link}"


OUTSIDE = """() => {
  const width = document.documentElement.clientWidth;
  const inside = (box) => box.getBoundingClientRect().right <= width + 1;
  const scrolled = (box) => {
    while (box && !["auto", "scroll"].includes(getComputedStyle(box).overflowX)) box = box.parentElement;
    return box && inside(box);
  };
  const found = [...document.querySelectorAll("article *")].filter((box) => !inside(box) && !scrolled(box));
  return found.slice(0, 3).map((box) => box.tagName + ": " + box.textContent.slice(0, 60));
}"""


def nothing_is_cut_off_on_a_phone(site):
    """On a screen of 390 pixels everything is inside, or in a box inside that can be scrolled; code is wrapped."""
    if browser.find() is None:
        return  # the tests of the page say so
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = browser.launch(playwright)
        tab = opened.new_page(viewport={"width": 390, "height": 844})
        for page in sorted(file for file in site.rglob("*.html") if "_modules" not in file.parts):
            tab.goto(page.as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, page.name
            assert tab.evaluate(OUTSIDE) == [], page.name
            hidden = "pre => pre.scrollWidth > pre.clientWidth + 1"
            code = f"[...document.querySelectorAll('.highlight-python pre, .doctest pre')].filter({hidden}).length"
            assert tab.evaluate(code) == 0, page.name
        opened.close()
