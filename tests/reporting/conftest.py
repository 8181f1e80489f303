"""A browser for the tests of the page."""

import browser as chromium
import pytest


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"no page was opened in a browser: {chromium.HINT}")
    if chromium.find() is None:
        pytest.skip(f"no page was opened in a browser, for there is none: {chromium.HINT}")
    with sync_api.sync_playwright() as playwright:
        opened = chromium.launch(playwright)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    visits = chromium.Visits(browser)
    yield visits
    visits.close()
    visits.check()
