"""The what-if page in a real browser: the form is filled in, sent, and answered, with scripts and without."""

from __future__ import annotations

import pytest

pytest.importorskip("selenium")

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from magicdec.explore.server import ExplorerServer
from tests.headless import DESKTOP, PHONE, accessibility_faults, opened, too_wide

pytestmark = pytest.mark.slow
PATIENCE_S = 120
QUESTION = "?model=llama-3.1-8b&hardware=h100&batch=8&context=4k"


def says(page: webdriver.Chrome, text: str) -> None:
    """Waits for the answer, during which the elements of the page change."""
    WebDriverWait(
        page, PATIENCE_S, ignored_exceptions=[StaleElementReferenceException]
    ).until(lambda p: text in p.find_element(By.TAG_NAME, "h1").text)


@pytest.mark.parametrize("scripts", [True, False])
def test_a_question_is_filled_in_and_answered(
    driver: webdriver.Chrome, server: ExplorerServer, scripts: bool
) -> None:
    page = opened(driver, server.url + QUESTION, scripts=scripts)
    says(page, " 8 users on 1 x H100")
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("2", Keys.ENTER)
    says(page, " 2 users")
    assert "batch=2" in page.current_url
    assert "engine=" not in page.current_url
    page.back()
    says(page, " 8 users")
    errors = [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []


def test_an_error_is_said_next_to_the_form(
    driver: webdriver.Chrome, server: ExplorerServer
) -> None:
    page = opened(driver, f"{server.url}?model=llama-3.1-8x&batch=8")
    assert (
        "did you mean llama-3.1-8b"
        in page.find_element(By.CSS_SELECTOR, "[role=alert]").text
    )
    assert page.find_element(By.NAME, "batch").get_attribute("value") == "8"


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_nothing_is_too_wide_and_nothing_inaccessible(
    driver: webdriver.Chrome,
    server: ExplorerServer,
    size: tuple[int, int],
    dark: bool,
) -> None:
    page = opened(driver, server.url + QUESTION, size, dark=dark)
    page.find_element(By.CSS_SELECTOR, "form summary").click()
    assert too_wide(page) == []
    assert accessibility_faults(page) == []
