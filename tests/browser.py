"""A real browser, where the machine has one."""

import shutil
from contextlib import contextmanager

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")


@contextmanager
def page(**options):
    """An empty page; options are Playwright's, such as viewport."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_page(**options)
        browser.close()
