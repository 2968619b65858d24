"""The pages of scripts/browse.py in headless Chromium, as wide as a laptop and a phone: keyboard, live parts, only our own script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_browser import write_runs, write_set

from scripts import browse
from scripts.screenshots import CHROMIUM, DRIVER, LAPTOP, PHONE, open_chromium, resize

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_runs(folder / "runs", write_set(folder / "set"))
    return folder


@pytest.fixture(scope="module")
def address(base: Path) -> Iterator[str]:
    server = browse.start(
        patterns=[str(base / "set")], runs=base / "runs", port=0, task="image-classification", label="cls", img_size=24, seed=0,
        decode=False, workers=1,
    )  # fmt: skip
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    for path in (CHROMIUM, DRIVER):
        if not Path(path).exists():
            pytest.fail(f"{path} is missing: install the packages of scripts/ci_packages.txt")
    made = open_chromium()
    yield made
    made.quit()


def until(what: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return value


PAGES = ["/", "/samples", "/samples?page=4", "/sample/5", "/sample/7", "/sample/200", "/sample/201", "/sample/202", "/runs", "/run/first"]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_every_page_fits_and_is_named(driver: Any, address: str, size: tuple[int, int]) -> None:
    resize(driver, size)
    for url in PAGES:
        driver.get(address + url)
        width = driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= size[0], f"{url} is {width} pixels wide"
        unnamed = """return [...document.querySelectorAll(
            "img, svg:not([aria-hidden]), video, audio, input:not([type=hidden]), select, a, button")]
            .filter(e => !(e.alt || e.ariaLabel || e.textContent.trim() || (e.labels && e.labels.length)))
            .filter(e => !e.querySelector("img[alt]")).map(e => e.outerHTML)"""
        assert driver.execute_script(unnamed) == [], url
        headings = driver.execute_script("return [...document.querySelectorAll('h1, h2')].length")
        assert headings, url
    resize(driver, LAPTOP)


def test_nothing_of_a_tar_runs(driver: Any, address: str) -> None:
    driver.get_log("browser")
    for url in PAGES:
        driver.get(address + url)
        assert driver.execute_script("return document.querySelectorAll('script').length") == 1
        assert driver.execute_script("return document.querySelectorAll('main b[onload], main script, [onerror]').length") == 0
    said = [entry["message"] for entry in driver.get_log("browser")]
    assert [text for text in said if "Content Security" in text or "Uncaught" in text] == []
    fetched = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert fetched and all(url.startswith(address) for url in fetched)
    blocked = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); return window.ran"
    assert driver.execute_script(blocked) is None  # inline scripts don't run, whoever puts them there


def test_thumbnails_are_drawn_and_broken_ones_say_why(driver: Any, address: str) -> None:
    driver.get(address + "/samples?size=24")
    until(lambda: driver.execute_script("return [...document.images].every(i => i.complete)"))
    sizes = driver.execute_script("return [...document.images].map(i => i.naturalWidth)")
    assert sizes == [192] * 23
    assert driver.execute_script("return document.querySelector('.broken').textContent").startswith("png: PNG is cut")


def test_the_keyboard_turns_pages(driver: Any, address: str) -> None:
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> None:
        driver.switch_to.active_element.send_keys(key)

    driver.get(address + "/sample/5")
    press(Keys.ARROW_RIGHT)
    until(lambda: driver.current_url.endswith("/sample/6"))
    press(Keys.ARROW_LEFT)
    until(lambda: driver.current_url.endswith("/sample/5"))
    press("/")
    until(lambda: driver.execute_script("return document.activeElement.name") == "q")
    driver.switch_to.active_element.send_keys("k0150", Keys.ENTER)
    until(lambda: "q=k0150" in driver.current_url)
    assert driver.execute_script("return document.querySelectorAll('.grid li').length") == 1
    driver.get(address + "/samples?size=24")
    press(Keys.TAB)
    assert driver.execute_script("return document.activeElement.className") == "skip"
    press(Keys.ENTER)
    assert driver.current_url.endswith("#main")


def test_training_views_are_drawn(driver: Any, address: str) -> None:
    driver.get(address + "/sample/5")
    until(lambda: driver.execute_script("return document.querySelectorAll('.draws img').length") == 8)
    driver.execute_script("document.querySelector('.draws').scrollIntoView()")
    until(lambda: driver.execute_script("return [...document.querySelectorAll('.draws img')].every(i => i.complete && i.naturalWidth)"), 60)


def test_a_run_is_live(driver: Any, address: str, base: Path) -> None:
    name = next(path.name for path in (base / "runs").iterdir() if path.name.startswith("evil"))
    driver.get(address + "/runs")
    driver.execute_script("[...document.querySelectorAll('tbody a')].find(a => a.textContent.startsWith('evil')).click()")
    until(lambda: driver.execute_script("return document.querySelectorAll('.charts svg').length") == 5)
    assert "step 30" in driver.execute_script("return document.querySelector('.facts').textContent")
    path = base / "runs" / name / "metrics.jsonl"
    text = path.read_text()
    line = {"event": "train", "step": 37, "loss": 0.1, "lr": 0.1, "samples_per_second": 9.0, "data_time": 0.1, "step_time": 0.2}
    path.write_text(text[: text.rindex("\n") + 1] + json.dumps(line) + "\n")
    until(lambda: "step 37" in driver.execute_script("return document.querySelector('.facts').textContent"))
    driver.find_element("link text", "1.tar 7 (k0007x)").click()
    until(lambda: "/sample/107" in driver.current_url)
    assert "k0007x" in driver.find_element("tag name", "h1").text
