"use strict";
// Where the contents are above the page and not beside it, they start folded.
document.querySelector("nav details").open = !matchMedia("(max-width: 62rem)").matches;

// Sorting: numbers first and by size, then words, cells without a value last, in either direction. A number may
// have a power of ten, commas, a unit or an error behind it; digests and dates are words.
const NUMBER = /^([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)([KMB]?)(?:$|[ %])/;
const THOUSANDS = { "": 1, K: 1e3, M: 1e6, B: 1e9 };
for (const table of document.querySelectorAll("table.sortable")) {
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head) return;
    const column = head.cellIndex, body = table.tBodies[0];
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => {
      const cell = row.cells[column];
      if (cell.dataset.value !== undefined) return { value: Number(cell.dataset.value), text: "" };
      const text = cell.querySelector(".cell") ? "" : cell.textContent.trim();
      const found = NUMBER.exec(text.replaceAll("−", "-").replace(/,(?=\d{3})/g, ""));
      return { value: found && Number(found[1]) * THOUSANDS[found[2]], text };
    };
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      if ((x.value === null) !== (y.value === null)) return (x.value === null) - (y.value === null);
      if ((x.value === null) && (!x.text !== !y.text)) return !x.text - !y.text;
      const order = x.value - y.value || x.text.localeCompare(y.text, "en", { numeric: true });
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort(compare));
  });
}

// Provenance of a cell.
const records = JSON.parse(document.getElementById("records").textContent);
const dialog = document.getElementById("provenance");
document.querySelector("main").addEventListener("click", (event) => {
  const button = event.target.closest("button.cell");
  if (!button) return;
  const { Cell: title, record, Command: command, ...told } = JSON.parse(button.dataset.cell);
  const { config, ...run } = records[record] || {};
  document.getElementById("provenance-title").textContent = title;
  const list = dialog.querySelector("dl");
  list.replaceChildren();
  for (const [name, value] of Object.entries({ ...told, ...run, Command: command })) {
    if (value === undefined || value === null || value === "") continue;
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name;
    if (name === "MLflow page") {
      const link = text.appendChild(document.createElement("a"));
      link.href = link.textContent = value;
    } else text.textContent = value;
    if (name === "Command") text.className = "command";
    list.append(term, text);
  }
  const details = dialog.querySelector("details");
  details.hidden = !config;
  details.open = false;
  details.querySelector("pre").textContent = config || "";
  dialog.showModal();
});
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

// Light and dark: the system's choice until the button is used.
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// Figures: the values under the pointer, and series that a click in the legend hides. A point is
// [x, y, text…] in the SVG's unit, or a box [left, top, right, bottom, text…].
const REACH = 40; // how far from a point the pointer may be
for (const figure of document.querySelectorAll("figure:has(> script)")) {
  const plot = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), hidden = new Set();
  const part = (id) => svg.querySelector(`[id="${figure.id}-${id}"]`);
  const of = (name) => (series) => series.label === name || series.label.startsWith(`${name}, `) || series.label.endsWith(`, ${name}`);
  const marks = svg.appendChild(document.createElementNS(svg.namespaceURI, "g"));
  marks.setAttribute("class", "marks");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);

  for (const [name, ids] of Object.entries(plot.legend)) {
    const own = plot.panels.flatMap((panel) => panel.series).filter(of(name));
    if (!own.length) continue;
    const entry = part(ids[1]);
    entry.setAttribute("role", "button");
    entry.setAttribute("tabindex", "0");
    entry.setAttribute("aria-pressed", "true");
    const toggle = () => {
      if (!hidden.delete(name)) hidden.add(name);
      entry.setAttribute("aria-pressed", String(!hidden.has(name)));
      for (const id of ids) part(id)?.classList.toggle("off", hidden.has(name));
      for (const series of plot.panels.flatMap((panel) => panel.series)) {
        series.hidden = [...hidden].some((other) => of(other)(series));
        for (const id of series.ids) part(id)?.classList.toggle("gone", series.hidden);
      }
      hide();
    };
    for (const id of ids) part(id)?.addEventListener("click", toggle);
    entry.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      toggle();
    });
  }

  const middle = (p) => typeof p[2] === "string" ? [p[0], p[1]] : [(p[0] + p[2]) / 2, (p[1] + p[3]) / 2];
  const distance = (p, x, y) => {
    if (typeof p[2] === "string") return Math.hypot(p[0] - x, p[1] - y);
    return Math.hypot(Math.max(p[0] - x, 0, x - p[2]), Math.max(p[1] - y, 0, y - p[3]));
  };
  const hide = () => { tip.hidden = true; marks.replaceChildren(); };
  const show = (event) => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const panel = plot.panels.find(({ box }) => x >= box[0] - 5 && x <= box[2] + 5 && y >= box[1] - 5 && y <= box[3] + 5);
    const points = panel?.series.filter((series) => !series.hidden).flatMap((series) => series.points.map((p) => ({ series, p, away: distance(p, x, y) })));
    const nearest = points?.reduce((a, b) => b.away < a.away ? b : a, { away: REACH });
    if (!nearest?.p) return hide();
    const at = middle(nearest.p)[0];
    const rows = points.filter(({ p }) => Math.abs(middle(p)[0] - at) < 0.3).filter(({ p }) => typeof p[2] === "string" || p === nearest.p);
    const told = nearest.p.slice(typeof nearest.p[2] === "string" ? 2 : 4);
    tip.replaceChildren();
    const line = (text, value, colour, strong) => {
      const row = tip.appendChild(document.createElement("div"));
      row.classList.toggle("near", strong);
      const name = row.appendChild(document.createElement("span"));
      name.textContent = text;
      if (colour) name.style.setProperty("--swatch", colour);
      row.appendChild(document.createElement("b")).textContent = value;
    };
    line(panel.x || "x", told[0], null, false);
    if (told.length > 2) {
      line(panel.y, told[1], null, false);
      line("value", told[2], null, true);
    } else {
      rows.sort((a, b) => middle(a.p)[1] - middle(b.p)[1]);
      for (const { series, p } of rows) line(series.label || panel.y, p.at(-1), series.colour, p === nearest.p);
    }
    marks.replaceChildren(...rows.map(({ series, p }) => {
      const boxed = typeof p[2] !== "string";
      const mark = document.createElementNS(svg.namespaceURI, boxed ? "rect" : "circle");
      const place = boxed ? { x: p[0], y: p[1], width: p[2] - p[0], height: p[3] - p[1] } : { cx: p[0], cy: p[1], r: p === nearest.p ? 4 : 2.5 };
      for (const [key, value] of Object.entries(place)) mark.setAttribute(key, value);
      if (!boxed) mark.setAttribute("fill", series.colour);
      return mark;
    }));
    tip.hidden = false;
    const frame = figure.getBoundingClientRect();
    const left = event.clientX - frame.left, top = event.clientY - frame.top;
    const beside = left + tip.offsetWidth + 24 <= frame.width ? left + 14 : left - tip.offsetWidth - 14;
    tip.style.left = `${Math.max(0, Math.min(beside, frame.width - tip.offsetWidth))}px`;
    tip.style.top = `${beside < 0 ? top + 24 : Math.max(0, top - tip.offsetHeight / 2)}px`; // no room at its sides: below
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
}
