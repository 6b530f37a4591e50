import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mdn.config import Params
from mdn.reports.frame import AGAIN
from mdn.reports.render import render

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADS = {"src", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers ids, links, loads and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.cells: list[dict] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.loads += [value for name, value in attributes if name in LOADS]
        if tag in ("link", "use", "image", "script"):
            self.loads += [found[name] for name in ("href", "xlink:href") if name in found]
        if tag == "a":
            self.links.append(found["href"])
        if "data-cell" in found:
            self.cells.append(json.loads(found["data-cell"]))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def source(rendered: Path) -> str:
    return (rendered / "index.html").read_text()


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_a_published_value_keeps_its_last_digit(page: Page):
    told = {cell["Paper"] for cell in page.cells if "Paper" in cell}
    assert {"38.60", "32.80", "NaN at step 70"} <= told


def test_page_nests_and_its_ids_are_unique(page: Page):
    assert len(page.ids) == len(set(page.ids))


def test_page_loads_nothing(page: Page, source: str):
    assert all(load.startswith("#") for load in page.loads)
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|import\(|WebSocket", source)
    assert "default-src 'none'" in source
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", source)
    assert len(source.encode()) < 5_000_000


def test_every_link_leads_somewhere(page: Page, rendered: Path):
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (rendered / link).is_file()


def test_cells_tell_their_provenance(page: Page, source: str):
    cell = next(c for c in page.cells if c["Cell"] == "MDN, HellaSwag acc_n" and c["Scale"] == "smoke")
    assert cell["Value"] == "32.5 ± 4.0"
    assert cell["Items"] == "40 (limit 40)"
    assert cell["Kernel"] == "momentum_delta_rule: v2_segsum"
    assert cell["Command"] == f"{AGAIN} evaluate-smoke@mdn-commonsense"
    assert {"Fingerprint", "Commit", "Training data", "MLflow run"} <= set(cell)
    records = json.loads(re.search(r'id="records">(.*?)</script>', source, re.S)[1])
    record = records[cell["record"]]
    assert "pattern: mdn" in record["config"]
    assert record["MLflow shows it"] == "mlflow ui --backend-store-uri sqlite:///mlflow.db"


def test_scales_that_are_not_the_papers_carry_the_banner(source: str):
    assert source.count("numbers are not comparable with the paper.") == 1
    assert "Smoke numbers are not comparable with the paper." in source
    assert "texts (smoke: wiki, c4, speeches, summaries, code)" in source


def test_departures_name_tokens_text_limit_and_kernel(page: Page):
    text = " ".join(" ".join(page.text).split())
    for said in (
        "Training tokens 15B · 100B",
        "SlimPajama, subset of 100B tokens smoke (wiki, c4, speeches, summaries, code)",
        "Items a task all the first 40",
        "kernel version v2_segsum",
        "Temperature τ of η sqrt(d/h) sqrt(d/h)",
        "Lower bound of log μ −2 −2",
        "AdamW, β 0.9 and 0.95, decay 0.1, clip 1 AdamW, β 0.9 and 0.95, decay 0.1, clip 1",
    ):
        assert said in text


def test_text_of_a_failure_is_escaped(source: str):
    assert "loss is &lt;nan&gt; &amp; not finite" in source
    assert "<nan>" not in source


def test_the_values_of_a_figure_point_at_groups_of_its_drawing(page: Page, source: str):
    found = re.findall(
        r'<figure id="([\w-]+)">.*?<script type="application/json">(.*?)</script>', source, re.S
    )
    assert {name for name, _ in found} >= {"loss-smoke", "loss-smoke-variants"}
    for name, text in found:
        told = json.loads(text)
        groups = [i for panel in told["panels"] for series in panel["series"] for i in series["ids"]]
        groups += [i for ids in told["legend"].values() for i in ids]
        assert groups
        assert {f"{name}-{group}" for group in groups} <= set(page.ids)


def test_the_kernel_report_has_a_section_where_there_is_one(
    params: Params, made: Path, tmp_path: Path, source: str
):
    assert 'id="kernels"' not in source
    (tmp_path / "kernels").mkdir()
    row = {"gates": "no mu bound", "ranges": "log μ ∈ (−8, 0)", "version": "v1_logspace"}
    accuracy = {"device": "cpu", "torch": "2", "dtype": "float32", "shape": {"T": 1, "K": 1, "V": 1}}
    accuracy |= {
        "versions": [{"name": "v1_logspace", "note": "a <note>", "devices": ["cpu"], "automatic": False}]
    }
    accuracy |= {"rows": [row | {"outputs": None, "gradients": None}]}
    (tmp_path / "kernels/record.json").write_text(json.dumps({"accuracy": accuracy, "timings": []}))
    text = render(params, made, tmp_path).read_text()
    page = Page(text)
    assert "kernels" in page.ids
    assert '<td class="wrong">not finite</td>' in text
    assert "a &lt;note&gt;" in text
    assert "#kernels" in page.links
