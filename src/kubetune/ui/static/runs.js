// How the table of runs looks: which columns it has, and what its rows are grouped by. The browser keeps that.
import { byId } from "./ui.js";
const keptAs = "runs-table";
const readKept = () => {
  try { return { hidden: [], group: "", ...JSON.parse(localStorage.getItem(keptAs) ?? "{}") }; } catch { return { hidden: [], group: "" }; }
};
const kept = readKept();
const group = byId("group");
const columns = byId("columns");

const headingOf = (title, rows, width) => {
  const row = document.createElement("tr");
  row.className = "heading";
  const cell = document.createElement("th");
  cell.colSpan = width;
  cell.scope = "colgroup";
  cell.textContent = `${title || "none"} · ${rows.length} ${rows.length === 1 ? "run" : "runs"}`;
  row.append(cell);
  return row;
};

// Rows keep the order that they came in, within their groups.
const arrange = () => {
  const table = byId("run-rows");
  if (!table) return;
  for (const heading of table.querySelectorAll(".heading")) heading.remove();
  const rows = [...table.children];
  rows.forEach((row, index) => { row.dataset.index ??= index; });
  rows.sort((a, b) => a.dataset.index - b.dataset.index);
  const groups = new Map();
  for (const row of rows) {
    const key = kept.group ? row.dataset[kept.group] : "";
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const width = table.parentElement.querySelectorAll("thead th").length;
  for (const [key, ofGroup] of groups) {
    if (kept.group) table.append(headingOf(key, ofGroup.filter((row) => !row.hidden), width));
    table.append(...ofGroup);
  }
  for (const heading of table.querySelectorAll(".heading")) heading.hidden = heading.textContent.endsWith("· 0 runs");
  for (const cell of document.querySelectorAll(".runs-table [data-label]")) cell.hidden = kept.hidden.includes(cell.dataset.label);
};
const keep = () => {
  localStorage.setItem(keptAs, JSON.stringify(kept));
  arrange();
};

if (group) {
  group.value = kept.group;
  group.addEventListener("change", () => { kept.group = group.value; keep(); });
  for (const head of document.querySelectorAll(".runs-table thead [data-label]")) {
    const name = head.dataset.label;
    const label = document.createElement("label");
    const box = document.createElement("input");
    box.type = "checkbox";
    box.checked = !kept.hidden.includes(name);
    box.addEventListener("change", () => {
      kept.hidden = kept.hidden.filter((other) => other !== name);
      if (!box.checked) kept.hidden.push(name);
      keep();
    });
    label.append(box, ` ${name}`);
    columns.append(label);
  }
  arrange();
  // After filtering, and after a run has changed.
  document.addEventListener("input", arrange);
  document.addEventListener("renewed", arrange);
}
