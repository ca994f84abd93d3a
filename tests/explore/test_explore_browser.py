"""The what-if page in a real browser: controls move the answer and the address, with mouse, keyboard and phone."""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

pytest.importorskip("selenium")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from magicdec.explore.explorer import FIGURES, OF_ARRIVALS
from magicdec.explore.server import ExplorerServer
from tests.headless import DESKTOP, PHONE, accessibility_faults, opened, too_wide
from tests.processes import still_alive_after

pytestmark = pytest.mark.slow
PATIENCE_S = 120
NAMED_DRAFT = "draft=streamingllm&budget=512&gamma=3&context=4096"


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
def page(driver: webdriver.Chrome, server: ExplorerServer) -> webdriver.Chrome:
    return settled(
        opened(driver, f"{server.url}?context=4096")
    )  # where the usual batch fits


def test_it_opens_with_an_answer_figures_and_no_errors(
    page: webdriver.Chrome, server: ExplorerServer
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
    driver: webdriver.Chrome, server: ExplorerServer, size: tuple[int, int]
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
    driver: webdriver.Chrome, server: ExplorerServer, size: tuple[int, int]
) -> None:
    page = settled(opened(driver, server.url, size))
    assert too_wide(page) == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_the_dark_theme_reaches_controls_and_figures(
    driver: webdriver.Chrome, server: ExplorerServer
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


def test_it_answers_with_scripts_off(
    driver: webdriver.Chrome, server: ExplorerServer
) -> None:
    page = opened(driver, server.url, scripts=False)
    try:
        field = page.find_element(By.NAME, "batch")
        field.clear()
        field.send_keys("16")
        page.find_element(By.CSS_SELECTOR, "button.without-script").click()
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
    driver: webdriver.Chrome, server: ExplorerServer, size: tuple[int, int], dark: bool
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


def test_names_are_found_as_they_are_typed(page: webdriver.Chrome) -> None:
    """By parts of a name, or of what it is called else; with the keyboard and the mouse."""
    model = page.find_element(By.NAME, "model")
    model.click()
    rows = "#list-model [role=option]"
    assert len(page.find_elements(By.CSS_SELECTOR, rows)) > 20
    model.send_keys("Qwen/Qwen2.5 72B")
    shown = [row.text for row in page.find_elements(By.CSS_SELECTOR, rows)]
    assert shown[0].startswith("qwen2.5-72b\nQwen/Qwen2.5-72B-Instruct")
    model.send_keys(Keys.ARROW_DOWN)
    chosen = model.get_attribute("aria-activedescendant")
    assert (
        page.find_element(By.ID, str(chosen)).get_attribute("aria-selected") == "true"
    )
    model.send_keys(Keys.ENTER)
    says(page, "for qwen2.5-72b")
    assert not page.find_element(By.ID, "list-model").is_displayed()
    hardware = page.find_element(By.NAME, "hardware")
    hardware.click()
    hardware.send_keys("4xh200")
    page.find_element(
        By.CSS_SELECTOR, '#list-hardware [data-value="4xh200-sxm-141gb"]'
    ).click()
    says(page, "H200 SXM")
    model.click()
    model.send_keys("meta-llama/Llama-3.1-8B-Instruct", Keys.TAB)
    says(page, "for llama-3.1-8b")
    model.click()
    model.send_keys("nothing like it")
    assert "none by this name" in page.find_element(By.ID, "list-model").text
    model.send_keys(Keys.ESCAPE)
    assert not page.find_element(By.ID, "list-model").is_displayed()


def test_the_drafts_follow_the_model(page: webdriver.Chrome) -> None:
    def drafts() -> set[str]:
        return {
            option.text
            for option in Select(page.find_element(By.NAME, "draft")).options
        }

    assert "eagle3" in drafts()
    assert "mtp" not in drafts()
    model = page.find_element(By.NAME, "model")
    model.click()
    model.send_keys("deepseek-v3", Keys.TAB)
    hardware = page.find_element(By.NAME, "hardware")
    hardware.click()
    hardware.send_keys("8xb200", Keys.TAB)
    says(page, "for deepseek-v3")
    WebDriverWait(page, PATIENCE_S).until(lambda _: "mtp" in drafts())
    assert "eagle3" not in drafts()


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_task_limits_and_rate_are_on_the_first_screen(
    driver: webdriver.Chrome, server: ExplorerServer, size: tuple[int, int]
) -> None:
    page = settled(opened(driver, f"{server.url}?context=4096", size))
    bottom = (
        "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
    )
    for name in ("task", "rate", "ttft_ms", "tpot_ms", "gen_len"):
        field = f"#control-{name}"
        assert page.find_element(By.CSS_SELECTOR, field).is_displayed()
        assert page.execute_script(bottom, field) < size[1]
    assert page.execute_script(bottom, ".is-file .pick") < size[1]
    assert not page.find_element(By.NAME, "p95_ttft_ms").is_displayed()


def test_limits_become_percentiles_at_a_rate_and_back(page: webdriver.Chrome) -> None:
    page.find_element(By.NAME, "tpot_ms").send_keys("80")
    says(page, "context 4096")
    rate = page.find_element(By.NAME, "rate")
    batch = page.find_element(By.NAME, "batch")
    rate.send_keys("1@0,2@60")
    WebDriverWait(page, PATIENCE_S).until(lambda p: "p95_tpot_ms=80" in p.current_url)
    assert "&tpot_ms" not in page.current_url
    assert page.find_element(By.NAME, "p95_tpot_ms").is_displayed()
    assert (batch.is_enabled(), batch.get_attribute("value")) == (False, "")
    rate.clear()
    WebDriverWait(page, PATIENCE_S).until(lambda p: "&tpot_ms=80" in p.current_url)
    assert batch.is_enabled()


def test_a_mixture_of_tasks_is_typed(page: webdriver.Chrome) -> None:
    task = page.find_element(By.NAME, "task")
    task.click()
    assert "sharegpt" in page.find_element(By.ID, "list-task").text
    task.send_keys("summar")
    page.find_element(
        By.CSS_SELECTOR, '#list-task [data-value="summarisation"]'
    ).click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: "task=summarisation" in p.current_url
    )
    task.click()
    task.send_keys(Keys.CONTROL, "a")
    task.send_keys("chat=70,code=30", Keys.TAB)
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: "task=chat%3D70%2Ccode%3D30" in p.current_url
    )
    assert not page.find_elements(By.CSS_SELECTOR, "#answer .error")


def test_a_pasted_command_says_what_to_change_and_fills_the_controls(
    page: webdriver.Chrome,
) -> None:
    page.find_element(By.CSS_SELECTOR, "#paste summary").click()
    page.find_element(By.ID, "command").send_keys(
        "vllm serve Qwen/Qwen3-8B --max-num-seqs 16 --frobnicate 1 "
        '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 8}\''
    )
    page.find_element(By.CSS_SELECTOR, "#paste button").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: re.search(
            r"^not understood .*: --frobnicate$",
            p.find_element(By.ID, "checked").text,
            re.MULTILINE,
        )
    )
    says(page, "for qwen3-8b")
    values = {
        name: page.find_element(By.NAME, name).get_attribute("value")
        for name in ("model", "batch", "draft", "gamma", "engine")
    }
    assert values == {
        "model": "Qwen/Qwen3-8B",
        "batch": "16",
        "draft": "ngram",
        "gamma": "8",
        "engine": "vllm",
    }
    page.find_element(By.ID, "command").send_keys(Keys.CONTROL, "a")
    page.find_element(By.ID, "command").send_keys("ls -la")
    page.find_element(By.CSS_SELECTOR, "#paste button").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: "no server is started here" in p.find_element(By.ID, "checked").text
    )


def test_a_trace_is_uploaded_planned_and_taken_away(
    page: webdriver.Chrome, tmp_path: Path
) -> None:
    trace = tmp_path / "monday.csv"
    rows = [f"{place / 2},{200 + place % 50},{40 + place % 9}" for place in range(120)]
    trace.write_text("\n".join(["arrival,prompt,output", *rows]))
    page.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(trace))
    says(page, "device")
    assert "monday.csv" in page.find_element(By.CSS_SELECTOR, ".pick").text
    assert "-monday.csv" in page.current_url
    page.find_element(By.CSS_SELECTOR, ".drop").click()
    says(page, "context 4096")
    bad = tmp_path / "bad.csv"
    bad.write_text("name,age\nx,3\n")
    page.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(bad))
    says(page, "bad.csv has the columns name, age")
    page.find_element(By.CSS_SELECTOR, ".drop").click()
    says(page, "context 4096")


def test_other_gpus_are_drawn_on_request(
    driver: webdriver.Chrome, server: ExplorerServer
) -> None:
    """With the draft named, so that each GPU is planned in a moment."""
    page = settled(opened(driver, f"{server.url}?{NAMED_DRAFT}"))
    page.find_element(By.ID, "compare").click()
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: p.find_elements(By.CSS_SELECTOR, "#each-gpu progress")
    )
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: len(p.find_elements(By.CSS_SELECTOR, "#each-gpu figure svg")) > 5
    )
    titles = [each.text for each in page.find_elements(By.CSS_SELECTOR, ".gpus h4")]
    assert len({title.partition(":")[0] for title in titles}) == len(titles)
    assert too_wide(page) == []
    field = page.find_element(By.NAME, "batch")
    field.clear()
    field.send_keys("16")
    says(page, "batch 16")
    assert page.find_elements(By.CSS_SELECTOR, "#each-gpu figure") == []


def test_what_changed_since_the_kept_answer_is_said(page: webdriver.Chrome) -> None:
    page.find_element(By.ID, "pin").click()
    field = page.find_element(By.NAME, "context")
    field.clear()
    field.send_keys("64k")
    batch = page.find_element(By.NAME, "batch")
    batch.clear()
    batch.send_keys("8")
    WebDriverWait(page, PATIENCE_S).until(
        lambda p: (
            "Batch was 64, now 8; Context was 4096, now 65,536."
            in p.find_element(By.ID, "difference").text
        )
    )
    assert "Tokens per second was" in page.find_element(By.ID, "difference").text
