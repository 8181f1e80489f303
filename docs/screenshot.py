"""A picture of a page, as the documentation shows it.

    make demo
    .venv/bin/python docs/screenshot.py demo/index.html rates docs/images/rates.png
    .venv/bin/python docs/screenshot.py demo/index.html effective-rate docs/images/effective-rate.png
    .venv/bin/python docs/screenshot.py demo/index.html effective-rate docs/images/effective-rate-dark.png dark

Needs Playwright and a Chromium (`CHROMIUM=path`, or chromium on the path).
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright


def main(page: Path, section: str, out: Path, scheme: Literal["light", "dark"] = "light") -> None:
    """Write the picture of one section or figure of a page, by its id."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no Chromium was found: install chromium, or set CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        view = browser.new_page(viewport={"width": 1500, "height": 900}, color_scheme=scheme)
        view.goto(page.resolve().as_uri())
        view.add_style_tag(content=".bar { position: static !important; }")  # or it lies over the picture
        part = view.locator(f"#{section}")
        view.wait_for_function("window.Plotly")
        part.scroll_into_view_if_needed()
        view.wait_for_timeout(2000)
        part.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), "dark" if sys.argv[4:] == ["dark"] else "light")
