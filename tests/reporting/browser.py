"""A real Chromium through Playwright, or the reason why there is none."""

import os
import shutil

ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
HINT = "install Chromium (apt-get install chromium) and the Python package playwright, or set CHROMIUM to a browser"


def find():
    """The browser's path, or None."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def launch(playwright):
    return playwright.chromium.launch(executable_path=find(), args=ARGUMENTS)
