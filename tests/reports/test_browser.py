"""The HTML report in a real browser: no errors, sorting, filtering, hovering, the slider, and nothing too wide."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.headless import (
    DESKTOP,
    PHONE,
    accessibility_faults,
    opened,
    point_at,
    scroll_to,
    too_wide,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def page(driver: webdriver.Chrome, html_file: Path) -> webdriver.Chrome:
    """The report, freshly opened on a desktop, with scripts."""
    return opened(driver, html_file.as_uri())


def column(table: WebElement, index: int) -> list[str]:
    return [
        row.find_elements(By.TAG_NAME, "td")[index].text
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
    ]


def results(page: webdriver.Chrome) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, '[data-table="results"]')


def test_it_opens_without_console_errors_or_requests(
    page: webdriver.Chrome, html_file: Path
) -> None:
    assert page.get_log("browser") == []
    assert page.title == "Speculative decoding report"
    requests = page.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    assert [url for url in requests if not url.startswith("data:")] == []


def test_a_table_sorts_by_its_values_up_and_down(page: webdriver.Chrome) -> None:
    table = results(page)
    head = table.find_elements(By.TAG_NAME, "th")[5]
    for direction in ("ascending", "descending"):
        head.find_element(By.TAG_NAME, "button").click()
        assert head.get_attribute("aria-sort") == direction
        cells = table.find_elements(By.CSS_SELECTOR, "tbody tr td:nth-child(6)")
        values = [float(cell.get_attribute("data-sort") or "nan") for cell in cells]
        assert values == sorted(values, reverse=direction == "descending")
        assert len(values) == 30


def test_unknown_values_sort_to_the_end(page: webdriver.Chrome) -> None:
    table = results(page)
    button = table.find_elements(By.TAG_NAME, "th")[8 - 1].find_element(
        By.TAG_NAME, "button"
    )
    for _ in range(2):
        button.click()
        values = column(table, 7)
        known = [value for value in values if value != "–"]
        assert values == known + ["–"] * (len(values) - len(known))


def test_sorting_works_from_the_keyboard(page: webdriver.Chrome) -> None:
    button = results(page).find_element(By.CSS_SELECTOR, "th button")
    button.send_keys(Keys.ENTER)
    assert (
        results(page).find_element(By.TAG_NAME, "th").get_attribute("aria-sort")
        == "ascending"
    )


def test_filtering_hides_the_other_rows(page: webdriver.Chrome) -> None:
    table = results(page)
    table.find_element(By.CSS_SELECTOR, "[data-filter]").send_keys("snapkv 512")
    shown = [
        row
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
        if row.is_displayed()
    ]
    assert len(shown) == 1
    assert "SnapKV" in shown[0].text


def test_pointing_at_a_mark_shows_its_value(page: webdriver.Chrome) -> None:
    for figure in ("heatmap", "scatter", "gamma"):
        mark = page.find_elements(By.CSS_SELECTOR, f"#figure-{figure} .tip")[-1]
        scroll_to(page, mark)
        point_at(page, mark)
        tooltip = page.find_element(By.ID, "tooltip")
        assert tooltip.is_displayed()
        assert tooltip.text == mark.get_attribute("data-tip")


def test_arrow_keys_walk_through_the_marks(page: webdriver.Chrome) -> None:
    figure = page.find_element(By.CSS_SELECTOR, "#figure-gamma svg")
    page.execute_script("arguments[0].focus()", figure)
    tips = [
        mark.get_attribute("data-tip")
        for mark in figure.find_elements(By.CSS_SELECTOR, ".tip")
    ]
    for tip in tips[:2]:
        ActionChains(page).send_keys(Keys.ARROW_RIGHT).perform()
        said = page.find_element(By.CSS_SELECTOR, "#figure-gamma [aria-live]")
        assert said.get_attribute("textContent") == tip
        assert page.find_element(By.ID, "tooltip").text == tip


def test_the_slider_shows_each_gamma_s_precomputed_values(
    page: webdriver.Chrome,
) -> None:
    slider = page.find_element(By.CSS_SELECTOR, ".slider input")
    output = page.find_element(By.CSS_SELECTOR, ".slider output")
    assert output.text.startswith("γ = 3: ")
    slider.send_keys(Keys.END)
    assert output.text.startswith("γ = 6: tokens per step")
    assert slider.get_attribute("aria-valuetext") == "γ = 6"
    slider.send_keys(Keys.HOME)
    assert output.text.startswith("γ = 1: ")


@pytest.mark.parametrize("size", [(320, 640), (768, 1024), DESKTOP])
def test_nothing_overflows(
    driver: webdriver.Chrome, html_file: Path, size: tuple[int, int]
) -> None:
    page = opened(driver, html_file.as_uri(), size)
    for details in page.find_elements(By.TAG_NAME, "summary"):
        page.execute_script("arguments[0].parentElement.open = true", details)
    assert too_wide(page) == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_figures_stay_inside_their_frame_on_a_phone(
    driver: webdriver.Chrome, html_file: Path
) -> None:
    page = opened(driver, html_file.as_uri(), PHONE)
    outside = page.execute_script(
        """
        return [...document.querySelectorAll("svg.chart")].flatMap((svg) => {
          const frame = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter((text) => {
            const box = text.getBoundingClientRect();
            return box.left < frame.left - 4 || box.right > frame.right + 4;
          }).map((text) => text.textContent);
        });
        """
    )
    assert outside == []


def test_the_dark_theme_reaches_the_figures(
    driver: webdriver.Chrome, html_file: Path
) -> None:
    script = """
        const text = document.querySelector("#figure-gamma svg text");
        return [getComputedStyle(document.body).backgroundColor, getComputedStyle(text).fill];
    """
    light = opened(driver, html_file.as_uri()).execute_script(script)
    dark = opened(driver, html_file.as_uri(), dark=True).execute_script(script)
    assert light == ["rgb(254, 254, 254)", "rgb(28, 33, 38)"]
    assert dark == ["rgb(20, 24, 28)", "rgb(233, 236, 239)"]


def test_it_reads_with_scripts_off(driver: webdriver.Chrome, html_file: Path) -> None:
    page = opened(driver, html_file.as_uri(), scripts=False)
    try:
        assert page.find_element(By.TAG_NAME, "h1").text.startswith("Yes: StreamingLLM")
        assert not any(
            e.is_displayed()
            for e in page.find_elements(By.CSS_SELECTOR, ".needs-script")
        )
        assert len(page.find_elements(By.CSS_SELECTOR, "svg .tip title")) > 100
        assert len(results(page).find_elements(By.CSS_SELECTOR, "tbody tr")) == 30
    finally:
        page.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_series_can_be_hidden_and_shown(page: webdriver.Chrome) -> None:
    figure = page.find_element(By.ID, "figure-gamma")
    boxes = figure.find_elements(By.CSS_SELECTOR, ".series input")
    assert [box.find_element(By.XPATH, "..").text for box in boxes] == [
        "predicted",
        "measured",
    ]
    marks = figure.find_elements(By.CSS_SELECTOR, '[data-series="measured"]')
    others = figure.find_elements(By.CSS_SELECTOR, '[data-series="predicted"]')
    assert len(marks) > 6
    boxes[1].send_keys(Keys.SPACE)
    assert not any(mark.is_displayed() for mark in marks)
    assert all(mark.is_displayed() for mark in others)
    boxes[1].click()
    assert all(mark.is_displayed() for mark in marks)


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_axe_finds_no_serious_fault(
    driver: webdriver.Chrome, html_file: Path, size: tuple[int, int], dark: bool
) -> None:
    page = opened(driver, html_file.as_uri(), size, dark=dark)
    page.execute_script(
        "document.querySelectorAll('details').forEach((each) => { each.open = true })"
    )
    assert accessibility_faults(page) == []


def test_axe_would_find_a_fault(page: webdriver.Chrome) -> None:
    page.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<p style=\"color: #ccc\">pale</p><img src=x>')"
    )
    assert {fault.split(":")[0] for fault in accessibility_faults(page)} == {
        "color-contrast",
        "image-alt",
    }
