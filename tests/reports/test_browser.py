"""The page and MLflow's in a real browser: Debian's chromium, by playwright (`pip install playwright`)."""

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.reports.frame import AGAIN
from mdn.reports.notes import notes
from mdn.reports.render import read_grids
from mdn.tracking.mlflow import artifact_page, attach, describe, experiment_pages, sync_all

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)


@pytest.fixture
def opened(browser, rendered: Path) -> Iterator:
    """opened(width, scheme): the report in a window. A word on the console or a request fails the test."""
    said, asked = [], []

    def go(width: int = 1400, scheme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{rendered}/index.html")
        return page

    yield go
    assert said == []
    assert len(asked) == 1


def test_pointing_at_a_curve_tells_its_values(opened, rendered: Path):
    page = opened()
    figure = page.locator("#loss-smoke")
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    told = figure.locator(".tip")
    assert told.is_visible()
    words = told.inner_text().split("\n")
    at = dict(zip(words[::2], words[1::2], strict=True))
    with (rendered / "figures/loss-smoke.csv").open() as file:
        right = {
            row["series"]: float(row["y"])
            for row in csv.DictReader(file)
            if row["panel"].startswith("Loss") and f"{float(row['x']):.5g}" == at["tokens (millions)"]
        }
    assert right["MDN"] == pytest.approx(float(at["MDN"]), rel=1e-4)
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    assert not told.is_visible()


def test_a_name_in_the_legend_hides_its_curve_and_shows_it_again(opened):
    page = opened()
    figure = page.locator("#loss-smoke")
    name = figure.locator("svg [role=button]", has_text="MDN")
    hidden = figure.locator("svg .gone")
    assert hidden.count() == 0
    name.click()
    assert hidden.count() >= 4  # loss, validation, learning rate, gradient norm
    assert name.get_attribute("aria-pressed") == "false"
    name.press("Enter")
    assert hidden.count() == 0


def test_a_cell_opens_its_provenance_and_a_head_sorts(opened):
    page = opened(scheme="dark")
    page.locator("#table2-smoke tbody tr", has_text="MDN").locator("button.cell").nth(3).click()
    dialog = page.locator("#provenance")
    assert dialog.locator(".command").inner_text() == f"{AGAIN} evaluate-smoke@mdn-lm"
    dialog.locator("summary").click()
    assert "pattern: mdn" in dialog.locator("pre").inner_text()
    page.keyboard.press("Escape")
    head = page.locator("#table2-smoke thead button", has_text="PIQA")
    at = page.locator("#table2-smoke thead th").all_inner_texts()
    column = next(n for n, text in enumerate(at) if "PIQA" in text)

    def values() -> list[float]:
        cells = page.locator(f"#table2-smoke tbody tr td:nth-child({column + 1}) .value")
        return [float(text) for text in cells.all_inner_texts()]

    head.click()
    assert values() == sorted(values())
    head.click()
    assert values() == sorted(values(), reverse=True)


def test_plain_tables_sort_powers_of_ten_thousands_and_words(opened, rendered: Path):
    page = opened()
    page.evaluate(
        """() => {
          const cells = ["1,427", "710", "2e−7", "3e−8", "not finite", "", "6.7M", "12K", "−5", "95.8 %",
            "4b52"];
          const table = document.querySelector("#smoke-runs table");
          const row = table.tBodies[0].rows[0];
          table.tBodies[0].replaceChildren(...cells.map((text) => {
            const copy = row.cloneNode(true);
            copy.cells[4].textContent = text;
            return copy;
          }));
        }"""
    )
    head = page.locator("#smoke-runs thead button", has_text="Tokens/s")
    rising = ["−5", "3e−8", "2e−7", "95.8 %", "710", "1,427", "12K", "6.7M"]
    for numbers, words in ((rising, ["4b52", "not finite"]), (rising[::-1], ["not finite", "4b52"])):
        head.click()
        shown = page.locator("#smoke-runs tbody tr td:nth-child(5)").all_inner_texts()
        assert shown == [*numbers, *words, ""]


def test_a_long_name_stays_in_its_column(opened):
    page = opened(390)
    page.evaluate(
        "document.querySelector('#smoke-runs tbody th').textContent = 'transformer/w256-lr3.2e-03-s1'"
    )
    name, cell = page.locator("#smoke-runs tbody th").first, page.locator("#smoke-runs tbody td").first
    text = page.evaluate(
        """() => {
          const range = document.createRange();
          range.selectNodeContents(document.querySelector("#smoke-runs tbody th"));
          return range.getBoundingClientRect().right;
        }"""
    )
    assert text <= cell.bounding_box()["x"]
    assert name.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(opened, scheme):
    page = opened(390, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    contents = page.locator("nav")
    assert contents.bounding_box()["height"] < 100  # folded
    contents.locator("summary").click()
    assert contents.get_by_role("link", name="Table 2: main results").first.is_visible()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, params: Params, made: Path, rendered: Path) -> Iterator:
    """MLflow's own server on a store to which the made-up runs, the report and the descriptions have gone."""
    folder = tmp_path_factory.mktemp("store")
    uri = f"sqlite:///{folder}/mlflow.db"
    runs = Path(shutil.copytree(made, folder / "runs"))
    shutil.rmtree(runs / "400m")
    for path in runs.glob("*/*/mlflow.json"):
        path.unlink()
    for path in (runs / "smoke").iterdir():  # three are enough
        if path.name not in ("gdn", "mdn", "mdn-no-momentum"):
            shutil.rmtree(path)
    for path in runs.glob("*/*/metrics.json"):
        path.with_name("model.safetensors").write_bytes(b"weights")
    assert None not in sync_all(runs, uri).values()
    files = [path for path in sorted(rendered.rglob("*")) if path.is_file()]
    report = attach(rendered, uri, files)
    assert report
    chosen = replace(params, runs={"smoke": {"gdn": "gdn", "mdn": "mdn"}})
    describe(runs, uri, notes(read_grids(chosen, runs), artifact_page(uri, report, "index.html")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", uri, "--workers", "1"]
    log = (folder / "log.txt").open("w")
    process = subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                assert process.poll() is None, (folder / "log.txt").read_text()
                assert time.monotonic() < deadline, "mlflow ui does not answer"
                time.sleep(0.3)
        yield address, uri, runs, report
    finally:
        os.killpg(process.pid, 15)
        process.wait(20)
        log.close()


def test_mlflow_shows_runs_metrics_figures_and_the_report(browser, server):
    address, uri, runs, report = server
    state = json.loads((runs / "smoke/mdn/mlflow.json").read_text())
    experiment, run = state["experiment_id"], state["run_id"]
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(30_000)
    page.goto(f"{address}/{experiment_pages(uri)['mdn-smoke']}")
    for name in ("mdn", "gdn", "mdn-no-momentum"):
        page.get_by_role("link", name=name, exact=True).wait_for()
    page.goto(f"{address}/#/experiments/{experiment}/runs/{run}")
    page.get_by_text("trains it again").wait_for()
    link = page.get_by_role("link", name=re.compile("Table 2: main results")).first
    assert link.get_attribute("href").endswith(artifact_page(uri, report, "index.html"))
    page.goto(f"{address}/#/experiments/{experiment}/runs/{run}/model-metrics")
    page.get_by_placeholder("Search metric charts").fill("train/loss")
    page.locator(".js-plotly-plot .scatterlayer .trace path.js-line").first.wait_for()
    page.goto(f"{address}/#/experiments/{experiment}/runs/{run}/artifacts/figures/loss.png")
    page.wait_for_function("[...document.images].some((image) => image.naturalWidth >= 600)")
    page.goto(f"{address}/#/models/mdn-smoke-mdn/versions/1")
    page.get_by_text(str(runs / "smoke/mdn/model.safetensors")).first.wait_for()
    page.goto(f"{address}/{artifact_page(uri, report, 'figures/loss-smoke.png')}")
    page.wait_for_function("[...document.images].some((image) => image.naturalWidth >= 1000)")
