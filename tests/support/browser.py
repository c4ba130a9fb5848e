"""Headless Chromium, Debian's, through its own driver."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver

SIZE = (1280, 900)
TIMEOUT_S = 30


def start_browser(directory: str) -> WebDriver:
    """A browser with a profile of its own in a directory; `quit` ends it. Nothing outside this host is asked."""
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("the dashboard's tests in a browser need Chromium: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = chromium
    arguments = [
        "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--no-proxy-server", f"--user-data-dir={directory}", f"--window-size={SIZE[0]},{SIZE[1]}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium's sandbox does not start for root.
    for argument in arguments:
        options.add_argument(argument)
    options.accept_insecure_certs = True
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    browser.set_page_load_timeout(TIMEOUT_S)
    browser.set_script_timeout(TIMEOUT_S)
    return browser


def set_screen(browser: WebDriver, width: int, height: int, *, dark: bool = False, scale: float = 1) -> None:
    """The size of the viewport in CSS pixels, and the system's colours."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def console(browser: WebDriver) -> list[dict[str, Any]]:
    """What the console has said since the last call."""
    return list(browser.get_log("browser"))
