"""A real Chromium through Playwright, or the reason why there is none; pages opened in it."""

import os
import shutil

from steradian.reporting.sections import SECTIONS

ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
HINT = "install Chromium (apt-get install chromium) and the Python package playwright, or set CHROMIUM to a browser"


def find():
    """The browser's path, or None."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def launch(playwright):
    return playwright.chromium.launch(executable_path=find(), args=ARGUMENTS)


class Visits:
    """Opened pages, and what went wrong in them."""

    def __init__(self, browser):
        self.browser, self.contexts, self.complaints, self.asked = browser, [], [], []

    def __call__(self, file, **options):
        self.contexts.append(self.browser.new_context(**options))
        self.contexts[-1].set_offline(True)
        tab = self.contexts[-1].new_page()
        tab.on("console", lambda message: self.complaints.append(message.text) if message.type != "log" else None)
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.goto(file.as_uri())
        return tab

    def check(self):
        assert self.complaints == []
        assert all(url.startswith(("file:", "data:")) for url in self.asked)

    def close(self):
        for context in self.contexts:
            context.close()


def see(tab, figure):
    """Unfold a figure and scroll to it, wait until it is drawn."""
    tab.eval_on_selector(f"#{figure}", "(e) => { const fold = e.closest('details'); if (fold) fold.open = true; }")
    tab.locator(f"#{figure}").scroll_into_view_if_needed()
    tab.wait_for_selector(f"#{figure}[data-drawn]")


def see_all(tab):
    """Scroll to every figure that the page has."""
    for figure in (figure.id for section in SECTIONS for figure in section.figures):
        if tab.locator(f"figure#{figure}").count():
            see(tab, figure)
