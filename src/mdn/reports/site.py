"""reports/index.html: one file with everything in it, readable from disk and without a network."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mdn.config import Params
from mdn.reports import rules
from mdn.reports.departures import Departure, departures, quantity
from mdn.reports.figures.style import INK, Drawing, line_style
from mdn.reports.kernels import Report
from mdn.reports.runs import Run, active
from mdn.reports.sheets import Chapter
from mdn.reports.tables import Grid, number

HERE = Path(__file__).parent
MLFLOW_UI = "http://127.0.0.1:5000"  # of `mdn ui`


@dataclass(frozen=True)
class Training:
    """A line of the list of runs."""

    name: str
    title: str
    state: str
    steps: str
    loss: str
    speed: str
    parameters: str
    kernel: str
    hardware: str
    commit: str
    fingerprint: str


@dataclass(frozen=True)
class Section:
    """All about one scale."""

    scale: str
    title: str
    comparable: bool
    limit: int | None
    grids: list[Grid]
    drawings: list[tuple[Drawing, Markup]]
    trainings: list[Training]
    departures: list[Departure]

    @property
    def summary(self) -> str:
        """How far this scale is, in a line."""
        states = [run.state.split(":")[0] for run in self.trainings]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
        cells = {
            (cell.row["row"], cell.row["column"]): cell.ok
            for grid in self.grids
            for _, row in grid.rows
            for cell in row
        }
        if not self.trainings:
            return "Nothing has been run; the paper's values are shown."
        return f"Trainings: {', '.join(counts)}. Cells with a value: {sum(cells.values())} of {len(cells)}."


def render(
    params: Params,
    runs: dict[tuple[str, str], Run],
    grids: list[Grid],
    drawings: list[Drawing],
    chapters: list[Chapter],
    scales: Grid | None = None,
    kernels: Report | None = None,
) -> str:
    """The page. scales: the table across scales; kernels: what stage `bench@kernels` found, if it has run."""
    sections = []
    for scale, at in params.scales.items():
        own = [grid for grid in grids if grid.scale == scale]
        if not own:
            continue
        names = active(params, runs, scale)
        sections.append(
            Section(
                scale,
                at.title,
                at.paper,
                at.evaluation.limit,
                own,
                [(drawing, inline(drawing)) for drawing in drawings if drawing.scale == scale],
                [training(params, runs[scale, name]) for name in names],
                departures(params, runs, scale),
            )
        )
    shown = {section.scale for section in sections} | {chapter.name for chapter in chapters}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    records = {f"{scale}/{name}": record(run) for (scale, name), run in runs.items() if run.state != "absent"}
    return environment.get_template("site.html").render(
        params=params,
        rules=rules,
        sections=sections,
        chapters=[
            (chapter, [(drawing, inline(drawing)) for drawing in drawings if drawing.scale == chapter.name])
            for chapter in chapters
            if chapter.sheets
        ],
        scales=scales,
        others=[(drawing, inline(drawing)) for drawing in drawings if drawing.scale not in shown],
        style=Markup((HERE / "site.css").read_text()),
        script=Markup((HERE / "site.js").read_text()),
        records=records,
        embedded=embedded,
        details=details,
        kernels=kernels,
        inline=inline,
        coded=coded,
        without_scale=without_scale,
        swatch=lambda name: Markup('<span class="swatch" style="--swatch:{}"></span>').format(
            line_style(params, name)[0]
        ),
    )


def coded(text: str) -> Markup:
    """A paragraph in which `backticks` mark code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def without_scale(title: str) -> str:
    """A figure's title, shorter by the scale under which the list of contents has it."""
    return re.sub(r",? at \w+ scale| \(\w+ scale\)", "", title)


def embedded(value: Any) -> Markup:
    """JSON for a script element."""
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def training(params: Params, run: Run) -> Training:
    """One run for the list: what it is, how far it came, what it ran on."""
    losses = run.series("validation/loss")[1]
    speed = run.manifest.get("tokens_per_second")
    state = run.state
    if state == "failed":
        state = f"failed: {run.failure.get('error', 'no reason recorded')}"
    return Training(
        run.name,
        params.models[run.name].title or run.name,
        "not trained yet" if state == "absent" else state,
        f"{run.last_step} / {run.steps}" if run.steps else "",
        number(losses[-1]) if losses else "",
        quantity(round(speed)) if isinstance(speed, int | float) else "",
        quantity(run.manifest["parameters"]) if "parameters" in run.manifest else "",
        run.kernel or "",
        run.hardware,
        run.commit or "",
        run.manifest.get("fingerprint", ""),
    )


def record(run: Run) -> dict[str, Any]:
    """What a click on a cell tells of its training, beyond what the cell itself knows."""
    versions = run.manifest.get("versions") or {}
    uri, experiment = run.mlflow.get("uri"), run.mlflow.get("experiment_id")
    server = uri.rstrip("/") if uri and uri.startswith("http") else MLFLOW_UI
    inside = f"#/experiments/{experiment}/runs/{run.mlflow.get('run_id')}?workflowType=machine_learning"
    return {
        "Imported from": f"results/{run.campaign}" if run.campaign else None,
        "Started": run.manifest.get("started"),
        "Code digest": run.manifest.get("code"),
        "Resumed": "; ".join(
            f"after step {part['until']}, before with code {part['code']} of commit {part['commit']}"
            for part in run.manifest.get("earlier", ())
        )
        or None,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) or None,
        "MLflow page": f"{server}/{inside}" if experiment else None,
        "MLflow shows it": f"mlflow ui --backend-store-uri {uri}" if uri else None,
        "config": run.config_text,
    }


def details(row: dict[str, Any], column: str) -> str:
    """The provenance of a cell as JSON for its button."""
    told = {
        "Cell": f"{row['title']}, {column}",
        "Scale": row["scale"],
        "Status": row["status"],
        "Note": row["note"],
        "Value": _exactly(row["value"], row["stderr"]),
        "Items": None
        if row["n"] is None
        else f"{row['n']}" + (f" (limit {row['limit']})" if row["limit"] else ""),
        "Prompts cut": row["truncated"],
        "Paper": row["published_text"]
        or (number(row["published"]) if row["published"] is not None else None),
        "Paper's source": row["published_source"],
        "Fingerprint": row["fingerprint"],
        "MLflow run": row["run_id"],
        "Kernel": row["kernel"],
        "Commit": row["commit"],
        "Training data": row["data"],
        "Evaluated at commit": row["evaluation_commit"],
        "Evaluation items": row["evaluation_data"],
        "Task hash": row["task_hash"],
        "Harness": row["harness"],
        "Window": row["window"],
        "Command": row["command"],
        "record": f"{row['scale']}/{row['row']}",
    }
    return json.dumps({key: value for key, value in told.items() if value is not None}, allow_nan=False)


def _exactly(value: float | None, stderr: float | None) -> str | None:
    if value is None:
        return None
    return f"{value!r}" + (f" ± {stderr!r}" if stderr is not None else "")


def inline(drawing: Drawing) -> Markup:
    """The figure for the page: without the file's head, ids made its own, ink in the page's text colour."""
    svg = drawing.svg[drawing.svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{drawing.name}-", svg)
    svg = svg.replace("*{stroke-linejoin: round; stroke-linecap: butt}", "")
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    return Markup(svg)
