"""A real headless browser for the tests, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

# The conftests of two folders import this file, most of whose tests need no browser: selenium is imported when used.
if TYPE_CHECKING:
    from selenium import webdriver
    from selenium.webdriver.remote.webelement import WebElement

BROWSER = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver") or shutil.which("chromium-driver")
REASON = "no chromium with its chromedriver on PATH (install the packages chromium and chromium-driver)"
PHONE, DESKTOP = (390, 844), (1280, 900)


def opened(
    driver: webdriver.Chrome,
    url: str,
    size: tuple[int, int] = DESKTOP,
    *,
    scripts: bool = True,
    dark: bool = False,
) -> webdriver.Chrome:
    driver.execute_cdp_cmd(
        "Emulation.setScriptExecutionDisabled", {"value": not scripts}
    )
    metrics = {
        "width": size[0],
        "height": size[1],
        "deviceScaleFactor": 1,
        "mobile": size[0] < 500,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})
    driver.get_log("browser")
    driver.get(url)
    return driver


def scroll_to(page: webdriver.Chrome, element: WebElement) -> None:
    """Scrolls and waits until the page has dealt with it (a scroll takes the tooltip away)."""
    page.execute_async_script(
        "arguments[0].scrollIntoView({block: 'center'});"
        "const done = arguments[1]; requestAnimationFrame(() => requestAnimationFrame(done))",
        element,
    )


def point_at(page: webdriver.Chrome, element: WebElement) -> None:
    """Moves the mouse to the middle of an element in view, without scrolling on the way."""
    from selenium.webdriver.common.actions.action_builder import ActionBuilder

    box = page.execute_script(
        "return arguments[0].getBoundingClientRect().toJSON()", element
    )
    mouse = ActionBuilder(page)
    mouse.pointer_action.move_to_location(
        int(box["x"] + box["width"] / 2), int(box["y"] + box["height"] / 2)
    )
    mouse.perform()


def too_wide(page: webdriver.Chrome) -> list[str]:
    """Elements that reach beyond the right edge, but for those that scroll by themselves."""
    found: list[str] = page.execute_script(
        """
        const width = document.documentElement.clientWidth;
        const scrolls = (e) => e.closest(".scroll, pre, .visually-hidden, .skip, svg");
        return [...document.body.querySelectorAll("*")]
          .filter((e) => !scrolls(e.parentElement) && e.getBoundingClientRect().right > width + 1 && !scrolls(e))
          .map((e) => e.tagName + "." + e.className);
        """
    )
    return found


@cache
def axe() -> str:
    """axe-core's source, from the package that carries it; its own driver (playwright) is not used."""
    return (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def accessibility_faults(page: webdriver.Chrome) -> list[str]:
    """What axe-core finds on the page that is open and calls serious or critical: rule, place, and why."""
    page.execute_script(axe())
    found: list[str] = page.execute_async_script(
        """
        const done = arguments[0];
        axe.run(document, {resultTypes: ["violations"]}).then(({violations}) => done(violations
          .filter((v) => ["serious", "critical"].includes(v.impact))
          .flatMap((v) => v.nodes.map((n) => `${v.id}: ${n.target.join(" ")}: ${n.failureSummary}`))));
        """
    )
    return found


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    """A headless browser; without selenium the test is skipped. Without a browser too, but with CI=true it fails."""
    pytest.importorskip("selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    if BROWSER is None or DRIVER is None:
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(REASON)
        pytest.skip(REASON)
    options = Options()
    options.binary_location = BROWSER
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ):
        options.add_argument(argument)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()
