"use strict";
// Sorting: numbers first and by size, rows without one last, in either direction.
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
      if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
      return cell.querySelector(".cell") ? "" : cell.textContent.trim();
    };
    const compare = (a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = typeof x === "number" && typeof y === "number" ? x - y
        : String(x).localeCompare(String(y), "en", { numeric: true });
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
    text.textContent = value;
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
