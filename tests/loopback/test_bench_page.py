"""The page of `commkit bench plot` in a real browser: it draws, without errors or requests."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from commkit import records
from commkit.cli.bench import command
from tests.loopback.browser import Browser, find
from tests.unit.bench_results import pairs, sweep

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not find(), reason="needs Chromium (Debian: chromium-headless-shell)"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(autouse=True)
def _fresh(request):
    if "browser" in request.fixturenames:
        found = request.getfixturevalue("browser")
        found.problems.clear()
        found.requests.clear()


@pytest.fixture
def page(tmp_path):
    def make(found, *more):
        path = tmp_path / "results.jsonl"
        path.write_text("".join(records.to_line(record) + "\n" for record in found))
        output = tmp_path / "page.html"
        done = CliRunner().invoke(
            command, ["plot", str(path), "-o", str(output), *more], standalone_mode=False
        )
        assert done.exception is None, done.exception
        return output

    return make


def count(browser, selector):
    return browser.evaluate(f"document.querySelectorAll({selector!r}).length")


def visible(browser, selector):
    """Whether every element has an area on the screen."""
    return browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].every(e => {{ const b = "
        "e.getBoundingClientRect(); return b.width > 0 && b.height > 0; })"
    )


def test_every_chart_is_drawn_without_an_error_or_a_request(browser, page, pytestconfig):
    found = [*sweep(), *sweep(collective="all_gather", scale=0.8), *pairs()]
    path = page(found, "--link-speed", "100", "--title", "Two hosts of eight ranks (invented)")
    browser.open(path)
    # Bandwidth, time; for four lines a roofline, percentiles and ranks each; two matrices.
    assert browser.evaluate("document.documentElement.dataset.plots") == "16"
    assert visible(browser, "svg.plot") and visible(browser, "svg.plot .cell")
    # Ten sizes in four lines; a matrix of 16 ranks has 256 cells.
    assert count(browser, "#bandwidth circle") == count(browser, "#time circle") == 40
    assert count(browser, "svg[id^=pairs-bandwidth] .cell") == 256
    assert visible(browser, "#bandwidth path.line")
    assert browser.problems == []
    assert browser.requests == [path.as_uri()]
    if pytestconfig.getoption("--screenshots"):
        docs = pytestconfig.rootpath / "docs"
        browser.screenshot(docs / "bench-plot.png", 980)
        browser.evaluate("document.querySelector('svg[id^=ranks]').parentElement.scrollIntoView()")
        browser.screenshot(docs / "bench-plot-ranks.png", 520)
        browser.evaluate("document.querySelector('svg[id^=pairs]').parentElement.scrollIntoView()")
        browser.screenshot(docs / "bench-plot-pairs.png", 520)


def test_a_line_is_hidden_and_shown_by_its_entry_in_the_legend(browser, page):
    browser.open(page(sweep()))
    button = 'document.querySelector(".legend button[data-plot=bandwidth][data-series=\\"1\\"]")'
    shown = (
        'getComputedStyle(document.querySelector("#bandwidth [data-series=\\"1\\"]")).display'
        ' !== "none"'
    )
    assert browser.evaluate(shown)
    browser.evaluate(f"{button}.click()")
    assert not browser.evaluate(shown)
    assert browser.evaluate(f'{button}.getAttribute("aria-pressed")') == "false"
    browser.evaluate(f"{button}.click()")
    assert browser.evaluate(shown) and browser.problems == []


def test_what_a_file_says_is_text_and_never_a_program(browser, page):
    planted = '<script>document.title = "run"; console.error("run")</script><img src=x>'
    found = sweep(collective=planted, environment={"NCCL_ALGO": planted}, group=planted)
    browser.open(page(found, "--title", planted))
    assert browser.evaluate("document.title") == planted
    assert count(browser, "img") == 0 and count(browser, "body script") == 1
    assert browser.problems == [] and len(browser.requests) == 1
    assert browser.evaluate("document.documentElement.dataset.plots") != "0"


def test_the_page_fits_a_narrow_screen(browser, page):
    browser.open(page([*sweep(), *pairs()]))
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", size)
    wide = browser.evaluate("document.documentElement.scrollWidth")
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert wide <= 400


def test_these_tests_notice_errors_and_requests(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<script>console.error('planted'); fetch('http://example.invalid/x')</script>")
    browser.open(path)
    assert any("planted" in problem for problem in browser.problems)
    assert "http://example.invalid/x" in browser.requests
    path.write_text("<script>throw new Error('planted')</script>")
    browser.problems.clear()
    browser.open(path)
    assert len(browser.problems) >= 1
