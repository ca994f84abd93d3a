"""The what-if page in a real browser: controls move the answer and the address, with mouse, keyboard and phone."""

from __future__ import annotations

import multiprocessing
import re

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from magicdec.explore.explorer import FIGURES, OF_ARRIVALS
from magicdec.explore.server import Server
from tests.headless import DESKTOP, PHONE, accessibility_faults, opened, too_wide
from tests.processes import still_alive_after

pytestmark = pytest.mark.slow
PATIENCE_S = 120


def settled(page: webdriver.Chrome) -> webdriver.Chrome:
    """Waits until every figure is drawn for the state that is shown."""
    script = "return document.querySelector('#figures[aria-busy=false]') !== null"
    WebDriverWait(page, PATIENCE_S).until(lambda p: p.execute_script(script))
    return page


def verdict(page: webdriver.Chrome) -> str:
    text: str = page.execute_script(
        "return document.querySelector('#answer .verdict, #answer .error')?.innerText ?? ''"
    )
    return text


def says(page: webdriver.Chrome, text: str) -> None:
    WebDriverWait(page, PATIENCE_S).until(lambda p: text in verdict(p))


@pytest.fixture
def page(driver: webdriver.Chrome, server: Server) -> webdriver.Chrome:
    return settled(
        opened(driver, f"{server.url}?context=4096")
    )  # where the usual batch fits


def test_it_opens_with_an_answer_figures_and_no_errors(
    page: webdriver.Chrome, server: Server
) -> None:
    assert re.search(r"\d\.\d\dx", verdict(page))
    shown = [
        figure.get_attribute("id")
        for figure in page.find_elements(By.CSS_SELECTOR, "#figures figure")
    ]
    assert shown == [f"figure-{name}" for name in FIGURES if name not in OF_ARRIVALS]
    assert page.get_log("browser") == []
    requests = page.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert all(url.startswith((server.url, "data:")) for url in requests)


def test_a_control_moves_the_answer_and_the_address(page: webdriver.Chrome) -> None:
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("1")
    says(page, "batch 1 and")
    Select(page.find_element(By.NAME, "draft")).select_by_visible_text("eagle3")
    WebDriverWait(page, PATIENCE_S).until(lambda p: "draft=eagle3" in p.current_url)
    assert "batch=1" in page.current_url
    link, shown = page.current_url, None
    settled(page)
    shown = verdict(page)
    again = settled(opened(page, link))
    assert verdict(again) == shown
    assert again.find_element(By.NAME, "batch").get_attribute("value") == "1"


def test_back_undoes_a_control_and_forward_does_it_again(
    page: webdriver.Chrome,
) -> None:
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("16")
    says(page, "batch 16")
    page.back()
    says(page, "batch 64")
    assert field.get_attribute("value") == "64"
    page.forward()
    says(page, "batch 16")
    assert field.get_attribute("value") == "16"


def test_two_settings_stand_side_by_side_and_the_link_holds_both(
    page: webdriver.Chrome,
) -> None:
    page.find_element(By.ID, "pin").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: "batch 64" in p.find_element(By.ID, "beside").text
    )
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("16")
    says(page, "batch 16")
    assert "batch 64" in page.find_element(By.ID, "beside").text
    assert "Batch was 64, now 16" in page.find_element(By.ID, "difference").text
    page.get(page.current_url)
    page.refresh()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: "batch 64" in p.find_element(By.ID, "beside").text
    )
    says(page, "batch 16")
    page.find_element(By.ID, "unpin").click()
    assert not page.find_element(By.ID, "beside").is_displayed()


def test_buttons_double_and_halve_from_the_keyboard(page: webdriver.Chrome) -> None:
    more = page.find_element(By.CSS_SELECTOR, '[data-for="batch"][data-step="1"]')
    more.send_keys(Keys.ENTER)
    assert page.find_element(By.NAME, "batch").get_attribute("value") == "128"
    says(page, "batch 128")
    page.find_element(By.CSS_SELECTOR, '[data-for="batch"][data-step="-1"]').send_keys(
        Keys.SPACE
    )
    says(page, "batch 64")
    page.find_element(
        By.CSS_SELECTOR, '[data-for="acceptance"][data-step="1"]'
    ).send_keys(Keys.ENTER)
    assert page.find_element(By.NAME, "acceptance").get_attribute("value") == "0.8"
    WebDriverWait(page, PATIENCE_S).until(lambda p: "acceptance=0.8" in p.current_url)


def test_bad_input_is_the_one_line_and_good_input_brings_the_answer_back(
    page: webdriver.Chrome,
) -> None:
    field = page.find_element(By.NAME, "context")
    field.clear()
    field.send_keys("9000000")
    says(page, "llama-3.1-8b reads at most 131072 tokens")
    assert (
        page.find_element(By.CSS_SELECTOR, "#answer .facts").text != ""
    )  # the last answer stays, and its figures
    assert page.find_elements(By.CSS_SELECTOR, "#figures svg") != []
    field.clear()
    field.send_keys("8192")
    says(page, "context 8192")
    settled(page)


def test_a_rate_shows_progress_then_its_pictures_and_a_newer_question_ends_it(
    page: webdriver.Chrome,
) -> None:
    page.find_element(By.CSS_SELECTOR, ".more summary").click()
    page.find_element(By.CSS_SELECTOR, ".example a").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: p.find_elements(By.CSS_SELECTOR, ".progress progress")
    )
    says(page, "device")
    shown = [
        figure.get_attribute("id")
        for figure in settled(page).find_elements(By.CSS_SELECTOR, "#figures figure")
    ]
    assert shown[:3] == [f"figure-{name}" for name in OF_ARRIVALS]
    field = page.find_element(By.NAME, "rate")
    field.clear()
    field.send_keys("5")
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: p.find_elements(By.CSS_SELECTOR, ".progress progress")
    )
    assert page.find_element(
        By.CSS_SELECTOR, "#answer .facts"
    ).is_displayed()  # the last answer stays meanwhile
    running = multiprocessing.active_children()
    field.clear()
    says(page, "at batch 64 and context 1024")
    pids = [process.pid for process in running if process.pid is not None]
    assert not still_alive_after(PATIENCE_S, pids)


def test_the_answer_is_said_to_those_who_cannot_see_it(page: webdriver.Chrome) -> None:
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("2")
    says(page, "batch 2 and")
    status = page.find_element(By.ID, "status")
    assert status.get_attribute("role") == "status"
    assert status.get_attribute("textContent") == page.find_element(
        By.CSS_SELECTOR, ".verdict"
    ).get_attribute("textContent")
    for control in page.find_elements(
        By.CSS_SELECTOR, "#controls input, #controls select, #controls button"
    ):
        if control.is_displayed():
            assert control.accessible_name, control.get_attribute("outerHTML")


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_answer_and_the_first_figure_are_on_the_first_screen(
    driver: webdriver.Chrome, server: Server, size: tuple[int, int]
) -> None:
    page = settled(opened(driver, server.url, size))
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert page.execute_script(top, ".facts") < page.execute_script(
        "return window.innerHeight"
    )
    height = page.execute_script("return window.innerHeight")
    assert page.execute_script(top, "#figures svg") < height - 100


@pytest.mark.parametrize("size", [PHONE, (320, 640), DESKTOP])
def test_nothing_overflows(
    driver: webdriver.Chrome, server: Server, size: tuple[int, int]
) -> None:
    page = settled(opened(driver, server.url, size))
    assert too_wide(page) == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_the_dark_theme_reaches_controls_and_figures(
    driver: webdriver.Chrome, server: Server
) -> None:
    script = """
        return ['body', '#controls select', '#figures svg text'].map((s) => {
          const style = getComputedStyle(document.querySelector(s));
          return s.includes('svg') ? style.fill : style.backgroundColor;
        });
    """
    light = settled(opened(driver, server.url)).execute_script(script)
    dark = settled(opened(driver, server.url, dark=True)).execute_script(script)
    assert light == ["rgb(254, 254, 254)", "rgb(254, 254, 254)", "rgb(28, 33, 38)"]
    assert dark == ["rgb(20, 24, 28)", "rgb(20, 24, 28)", "rgb(233, 236, 239)"]


def test_it_answers_with_scripts_off(driver: webdriver.Chrome, server: Server) -> None:
    page = opened(driver, server.url, scripts=False)
    try:
        field = page.find_element(By.NAME, "batch")
        field.clear()
        field.send_keys("16")
        page.find_element(By.CSS_SELECTOR, "button[type=submit]").click()
        says(page, "batch 16")
        pictures = page.find_elements(By.CSS_SELECTOR, "#figures img")
        assert len(pictures) == len(FIGURES) - len(OF_ARRIVALS)
        WebDriverWait(page, PATIENCE_S).until(
            lambda _: all(int(p.get_property("naturalWidth")) > 0 for p in pictures)
        )
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_fault(
    driver: webdriver.Chrome, server: Server, size: tuple[int, int], dark: bool
) -> None:
    page = settled(opened(driver, server.url, size, dark=dark))
    page.find_element(By.ID, "pin").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: (
            "batch 64"
            in str(p.find_element(By.ID, "beside").get_attribute("textContent"))
        )
    )
    page.execute_script(
        "document.querySelectorAll('details').forEach((each) => { each.open = true })"
    )
    assert accessibility_faults(settled(page)) == []
    field = page.find_element(By.NAME, "context")
    field.clear()
    field.send_keys("9000000")
    says(page, "llama-3.1-8b reads at most 131072 tokens")
    assert accessibility_faults(page) == []
