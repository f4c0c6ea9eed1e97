"""The report in a real Chromium: nothing overflows, nothing complains, nothing is fetched, dark is dark, print prints.

Screenshots are kept in .specbench/screenshots of the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_file
import pytest
from test_reports import consistency, engines_record, failing, kernel_rows, lossiness_record

from specbench.reports import report

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install playwright (the extra `dev` has it)"
)
KEPT = Path(__file__).resolve().parents[1] / ".specbench" / "screenshots"
WIDTHS = (360, 1400)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Boxes that stick out of the window, text of figures among them, but for what scrolls inside a box of its own.
STICKING_OUT = """() => [...document.querySelectorAll('body *')]
  .filter(one => !one.closest('.scroll') || one.classList.contains('scroll'))
  .map(one => [one, one.getBoundingClientRect()])
  .filter(([one, box]) => box.width && (box.right > innerWidth + 1 || box.left < -1))
  .map(([one, box]) => one.tagName + ' ' + (one.textContent || '').trim().slice(0, 40))"""
IS_WIDER = "() => document.scrollingElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = os.environ.get("SPECBENCH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        if found is None or not Path(found).exists():
            pytest.skip("no Chromium: apt-get install chromium, or name one in SPECBENCH_CHROMIUM")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of every kind of recording, two runs of a benchmark among them."""
    folder = tmp_path_factory.mktemp("recordings")
    files = [bench_file.write(folder / "rows.jsonl"), consistency(folder / "report.json", failing("tree.mask", 2))]
    older = bench_file.records()
    older[0] |= {"started": "2025-12-02T03:04:05Z", "versions": {"torch": "0.0.0"}}
    files.append(folder / "older.jsonl")
    files[-1].write_text("".join(json.dumps(one) + "\n" for one in older), encoding="utf-8")
    for name, made in (("engines", engines_record()), ("lossiness", lossiness_record())):
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(made), encoding="utf-8")
    files.append(folder / "kernels.jsonl")
    files[-1].write_text("".join(json.dumps(one) + "\n" for one in kernel_rows()), encoding="utf-8")
    return report.write(files, folder / "out")


def opened(browser: Any, address: str, *, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    """The page, and what was said on the console, went wrong in it, or was asked of the network."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url != address else None)
    page.goto(address)
    return page, said


def problems_of(page: Any) -> list[str]:
    wider = ["the page is wider than the window"] if page.evaluate(IS_WIDER) else []
    return wider + page.evaluate(STICKING_OUT)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_page_fits_says_nothing_and_fetches_nothing(browser: Any, page_file: Path, width: int, scheme: str) -> None:
    page, said = opened(browser, page_file.as_uri(), width=width, scheme=scheme)
    found = problems_of(page)
    page.evaluate("() => document.querySelectorAll('details').forEach(one => one.open = true)")
    unfolded = problems_of(page)
    KEPT.mkdir(parents=True, exist_ok=True)
    page.reload()
    page.screenshot(path=KEPT / f"report-{scheme}-{width}.png", full_page=True)
    page.close()
    assert (said, found, unfolded) == ([], [], [])


NOT_FOUND = "Failed to load resource: net::ERR_FILE_NOT_FOUND"
BAD_PAGES = {
    "wide": ("<div style='width:700px'>wide</div>", [], ["the page is wider than the window", "DIV wide"]),
    "script": ("<script>console.log('hello')</script>", ["hello"], []),
    "image": ("<img src='file:///none.png' alt=''>", [NOT_FOUND, "file:///none.png"], []),
    "in a box of its own": ("<div class=scroll style='overflow:auto'><p style='width:700px'>wide</p></div>", [], []),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_planted_bad_page_is_caught(browser: Any, case: str, tmp_path: Path) -> None:
    body, expected_said, expected_problems = BAD_PAGES[case]
    file = tmp_path / "page.html"
    file.write_text(
        f"<!DOCTYPE html><meta charset=utf-8><title>x</title><body style='margin:0'>{body}", encoding="utf-8"
    )
    page, said = opened(browser, file.as_uri(), width=360)
    found = problems_of(page)
    page.close()
    assert (sorted(said), found) == (expected_said, expected_problems)


def light_of(page: Any, selector: str, field: str) -> float:
    """Of a computed colour: 0 is black, 1 white."""
    numbers = page.evaluate(f"() => getComputedStyle(document.querySelector({selector!r})).{field}.match(/[0-9.]+/g)")
    return sum(float(one) for one in numbers[:3]) / 3 / 255


@pytest.mark.parametrize(("scheme", "paper_is_light"), [("light", True), ("dark", False)])
def test_paper_and_figures_follow_the_readers_scheme(
    browser: Any, page_file: Path, scheme: str, paper_is_light: bool
) -> None:
    page, _ = opened(browser, page_file.as_uri(), width=1400, scheme=scheme)
    paper, letters = light_of(page, "body", "backgroundColor"), light_of(page, "figure svg text", "fill")
    page.close()
    assert (paper > 0.9, paper < 0.15, letters < 0.5) == (paper_is_light, not paper_is_light, paper_is_light)


def test_letters_of_figures_stay_legible_on_a_phone(browser: Any, page_file: Path) -> None:
    """In CSS pixels, a letter's size as it is scaled."""
    page, _ = opened(browser, page_file.as_uri(), width=360)
    sizes = page.evaluate("""() => [...document.querySelectorAll('.fluid:not(.wide) svg text')].map(
      one => parseFloat(getComputedStyle(one).fontSize) * Math.hypot(one.getScreenCTM().a, one.getScreenCTM().b))""")
    page.close()
    assert min(sizes) >= 8


def test_page_prints_light_within_the_paper_and_with_its_open_tables(browser: Any, page_file: Path) -> None:
    page, _ = opened(browser, page_file.as_uri(), width=718, scheme="dark")  # A4 less its margins
    page.emulate_media(media="print", color_scheme="dark")
    found = problems_of(page)
    paper, shown = light_of(page, "body", "backgroundColor"), page.locator("nav").is_visible()
    KEPT.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=KEPT / "report-print.png", full_page=True)
    page.pdf(path=KEPT / "report.pdf", format="A4")
    page.close()
    assert (found, paper > 0.9, shown, (KEPT / "report.pdf").read_bytes()[:5]) == ([], True, False, b"%PDF-")
