// The table of runs: what is found, folded and grouped, which columns it has, and the curves of the runs that are chosen.
import { byId, drawCharts } from "./ui.js";
const keptAs = "runs-table";
const readKept = () => {
  try { return { hidden: [], group: "", open: [], ...JSON.parse(localStorage.getItem(keptAs) ?? "{}") }; } catch { return { hidden: [], group: "", open: [] }; }
};
const kept = readKept();
const [group, columns, choice, find, pane] = ["group", "columns", "choice", "find-runs", "pane"].map(byId);
const most = 12; // runs that can be compared

const headingOf = (title, rows, width) => {
  const row = Object.assign(document.createElement("tr"), { className: "heading" });
  const textContent = `${title || "none"} · ${rows.length} ${rows.length === 1 ? "run" : "runs"}`;
  row.append(Object.assign(document.createElement("th"), { colSpan: width, scope: "colgroup", textContent }));
  return row;
};

// Rows keep the order that they came in, within their groups. Trials are below their sweep while nothing is grouped.
const arrange = () => {
  const table = byId("run-rows");
  if (!table) return;
  for (const heading of table.querySelectorAll(".heading")) heading.remove();
  const rows = [...table.children];
  rows.forEach((row, index) => { row.dataset.index ??= index; row.text ??= row.textContent.toLowerCase(); });
  rows.sort((a, b) => a.dataset.index - b.dataset.index);
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  const isLike = (row) => words.every((word) => row.text.includes(word));
  const runs = rows.filter((row) => row.dataset.run !== undefined);
  for (const row of runs) {
    const isFolded = !kept.group && !words.length && row.dataset.sweep && !kept.open.includes(row.dataset.sweep) && !row.querySelector("input:checked");
    row.hidden = Boolean(isFolded) || !isLike(row);
  }
  for (const row of rows.filter((one) => one.dataset.run === undefined)) {
    const trials = runs.filter((run) => run.dataset.sweep === row.dataset.sweep);
    row.hidden = Boolean(kept.group) || !(isLike(row) || trials.some(isLike));
    row.querySelector("[data-fold]").setAttribute("aria-expanded", String(trials.some((run) => !run.hidden)));
  }
  const groups = new Map();
  for (const row of rows) {
    const key = kept.group && row.dataset.run !== undefined ? row.dataset[kept.group] : "";
    groups.set(key, [...(groups.get(key) ?? []), row]);
  }
  const width = table.parentElement.querySelectorAll("thead th").length;
  const ordered = [];
  for (const [key, ofGroup] of groups) {
    const seen = ofGroup.filter((row) => !row.hidden);
    if (kept.group && seen.length) ordered.push(headingOf(key, seen, width));
    ordered.push(...ofGroup);
  }
  table.append(...ordered);
  for (const cell of document.querySelectorAll(".runs-table [data-label]")) cell.hidden = kept.hidden.includes(cell.dataset.label);
  const { text, total } = byId("shown").dataset;
  byId("shown").textContent = words.length ? `${runs.filter(isLike).length} of ${total} runs` : text;
};
const keep = () => {
  localStorage.setItem(keptAs, JSON.stringify(kept));
  arrange();
};

const chosen = () => [...choice.querySelectorAll("input:checked")].map((box) => box.value);

let drawnFor = "";
const showCurves = async () => {
  const runs = chosen().slice(0, most);
  for (const mark of document.querySelectorAll(".runs-table .badge")) mark.remove();
  pane.hidden = !runs.length || !matchMedia("(min-width: 64rem)").matches;
  document.body.classList.toggle("has-pane", !pane.hidden);
  if (pane.hidden) { drawnFor = ""; return; }
  if (runs.length > 1) {
    runs.forEach((run, index) => {
      const mark = Object.assign(document.createElement("span"), { className: `badge colour-${index % 12}`, textContent: String.fromCharCode(65 + index) });
      choice.querySelector(`tr[data-run="${CSS.escape(run)}"] th .line`).prepend(mark);
    });
  }
  const query = runs.map((run) => `dir=${encodeURIComponent(run)}`).join("&");
  const answer = await fetch(`/curves?${query}`).catch(() => null);
  // Meanwhile others may have been chosen.
  if (!answer?.ok || query !== chosen().slice(0, most).map((run) => `dir=${encodeURIComponent(run)}`).join("&")) return;
  const part = new DOMParser().parseFromString(await answer.text(), "text/html");
  const numbers = part.getElementById("chart-data")?.textContent;
  if (query === drawnFor && numbers === byId("chart-data")?.textContent) return;
  drawnFor = query;
  const seen = pane.scrollTop;
  pane.replaceChildren(...part.body.childNodes);
  pane.scrollTop = seen;
  if (numbers === undefined) return;
  await drawCharts();
};

if (choice) {
  group.value = kept.group;
  group.addEventListener("change", () => { kept.group = group.value; keep(); });
  const shownColumns = () => {
    columns.replaceChildren();
    for (const head of [...document.querySelectorAll(".runs-table thead [data-label]")].filter((one) => one.hidden || one.offsetParent)) {
      const name = head.dataset.label;
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: !kept.hidden.includes(name) });
      box.addEventListener("change", () => {
        kept.hidden = kept.hidden.filter((other) => other !== name);
        if (!box.checked) kept.hidden.push(name);
        keep();
      });
      label.append(box, ` ${name}`);
      columns.append(label);
    }
  };
  arrange();
  shownColumns();
  showCurves();
  find.addEventListener("input", arrange);
  // After a run has changed.
  document.addEventListener("renewed", () => { arrange(); showCurves(); });
  choice.addEventListener("change", showCurves);
  choice.addEventListener("click", (event) => {
    const fold = event.target.closest("[data-fold]")?.dataset.fold;
    if (fold === undefined) return;
    const isOpen = kept.open.includes(fold);
    kept.open = isOpen ? kept.open.filter((other) => other !== fold) : [...kept.open, fold];
    keep();
  });
  document.addEventListener("change", (event) => { if (event.target.name === "metric") event.target.form.submit(); });
}
