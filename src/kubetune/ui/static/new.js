// The form of a new run: what is typed is planned by the server, written down, and begun.
import { byId, follow, post } from "./ui.js";
const form = byId("settings");
const fields = [...form.querySelectorAll("[name]")];
const extra = JSON.parse(form.dataset.extra || "{}");

const asked = () => ({ base: form.dataset.base,
  values: { ...extra, ...Object.fromEntries(fields.filter((f) => f.value.trim() && !f.disabled).map((f) => [f.name, f.value])) } });
const element = (name, text, kind = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
// Words between backticks are code.
const spans = (name, text) => {
  const made = element(name, "");
  made.append(...text.split("`").map((part, i) => (i % 2 ? element("code", part) : part)));
  return made;
};
// Problems are one box: the first few, a count of the others, and buttons that mend what can be mended.
const mostShown = 5;
const complain = (problems, fixes = []) => {
  const box = byId("problems");
  box.replaceChildren();
  if (!problems.length) return;
  const frame = element("div", "", "problem");
  const list = element("ul", "");
  list.append(...problems.slice(0, mostShown).map((text) => spans("li", text)));
  frame.append(list);
  if (problems.length > mostShown) frame.append(element("p", `and ${problems.length - mostShown} more of this kind.`));
  frame.append(...buttons(fixes));
  box.append(frame);
};
// Settings without a field, such as the columns of a file, are shown in a line and can be taken out.
const showExtra = () => {
  const place = byId("more-set");
  place.replaceChildren();
  for (const [key, value] of Object.entries(extra)) {
    const chip = element("button", `${key.replace("data.train.", "")} = ${value} ✕`, "chip");
    chip.type = "button";
    chip.setAttribute("aria-label", `Take out ${key} = ${value}`);
    chip.addEventListener("click", () => { delete extra[key]; changed(); });
    place.append(chip, " ");
  }
};
const mend = (values) => {
  for (const [key, value] of Object.entries(values)) {
    const field = fields.find((f) => f.name === key);
    if (field) field.value = value;
    else extra[key] = value;
  }
  changed();
};
const buttons = (fixes) => fixes.map((fix) => {
  const button = element("button", fix.label, "button fix");
  button.type = "button";
  button.addEventListener("click", () => mend(fix.values));
  return button;
});

// From the first letter on nothing that the page says holds any more, and nothing can be started.
let number = 0;
const beginChecking = () => {
  number += 1;
  byId("plan").setAttribute("aria-busy", "true");
  byId("busy").textContent = "checking …";
  byId("start").disabled = true;
  byId("submit").disabled = true;
  complain([]);
  return number;
};
const plan = async (mine) => {
  const body = asked();
  let reply;
  try { reply = await (await post("/new/plan", body)).json(); } catch (error) { reply = { problems: [error.message], needed: [], bad: [], facts: [], yaml: "", command: "" }; }
  if (mine !== number) return; // typed on meanwhile
  byId("plan").removeAttribute("aria-busy");
  byId("busy").textContent = "";
  complain([...reply.problems, ...reply.bad], [...(reply.fixes ?? []), ...lookFixes]);
  byId("needed").textContent = reply.needed.length ? `Still needed: ${reply.needed.join(", ")}.` : "";
  byId("facts").replaceChildren(...reply.facts.map(([label, text]) => {
    const row = document.createElement("tr");
    const head = element("th", label);
    head.scope = "row";
    row.append(head, element("td", text));
    return row;
  }));
  byId("yaml").textContent = reply.yaml;
  byId("run-file").hidden = !reply.yaml;
  byId("command").textContent = reply.command;
  byId("command-line").hidden = !reply.command;
  byId("start").disabled = Boolean(reply.problems.length || reply.needed.length) || !body.values.name;
  byId("submit").hidden = !reply.on_cluster;
  byId("submit").disabled = byId("start").disabled;
};

// A look at the data: their first rows, what they seem to be for, and buttons where the form says otherwise.
let lookFixes = [];
let looks = 0;
const look = async () => {
  const mine = ++looks;
  const reply = await post("/new/look", asked()).then((answer) => answer.json()).catch(() => null);
  if (mine !== looks || !reply) return;
  const place = byId("look");
  place.replaceChildren();
  lookFixes = reply.fixes ?? [];
  if (reply.about) place.append(element("p", reply.about, "hint"), ...buttons(lookFixes));
  if (!reply.rows?.length) { place.append(...reply.problems.map((text) => element("p", text, "hint"))); return; }
  const table = element("table", "", "rows");
  const heads = document.createElement("tr");
  heads.append(...reply.columns.map((name) => { const head = element("th", name); head.scope = "col"; return head; }));
  const body = document.createElement("tbody");
  body.append(...reply.rows.map((cells) => { const row = document.createElement("tr"); row.append(...cells.map((text) => element("td", text))); return row; }));
  table.createTHead().append(heads);
  table.append(body);
  const frame = element("div", "", "scroll");
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "First rows of the data");
  frame.append(table);
  place.append(frame);
};

const field = (name) => fields.find((f) => f.name === name);
const changed = async () => {
  const isFull = field("lora") && !field("lora").value;
  for (const f of fields) if (f.name.startsWith("lora.")) f.disabled = isFull && !f.value;
  showExtra();
  const mine = beginChecking();
  await look();
  if (mine === number) plan(mine);
};

// Models and files at hand come after the page, since looking for them takes a moment.
const fillLists = async () => {
  const reply = await fetch("/new/at-hand").then((answer) => answer.json()).catch(() => null);
  for (const list of document.querySelectorAll(".at-hand")) {
    const choices = reply?.[list.dataset.list] ?? [];
    list.hidden = !choices.length;
    list.replaceChildren(new Option(`${choices.length} at hand …`, ""), ...choices.map(([value, text]) => new Option(text, value)));
    list.addEventListener("change", () => {
      if (!list.value) return;
      byId(list.dataset.for).value = list.value;
      if (list.dataset.list === "data" && !field("name").value) {
        const stem = list.value.split("/").pop().split(".")[0].toLowerCase();
        field("name").value = stem.replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 40);
      }
      // What was mapped belongs to the file before.
      if (list.dataset.list === "data") for (const key of Object.keys(extra)) if (key.startsWith("data.train.")) delete extra[key];
      list.value = "";
      changed();
    });
  }
};
fillLists();

let timer = 0;
form.addEventListener("input", (event) => {
  if (event.target.id === "find" || !event.target.name) return;
  clearTimeout(timer);
  beginChecking();
  timer = setTimeout(changed, 250);
});
form.addEventListener("submit", (event) => event.preventDefault());

byId("find").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of form.querySelectorAll("details.group")) {
    let any = false;
    for (const setting of group.querySelectorAll(".setting")) {
      setting.hidden = !words.every((word) => setting.textContent.toLowerCase().includes(word));
      any ||= !setting.hidden;
    }
    group.hidden = !any;
    group.open = Boolean(words.length) && any;
  }
});

const begin = async (on) => {
  for (const id of ["start", "submit"]) byId(id).disabled = true;
  try {
    const begun = await (await post("/new/start", { ...asked(), on })).json();
    if (begun.problems.length) throw new Error(begun.problems.join("\n"));
    const seen = await follow(begun, byId("output"), (reply) => reply.run && on !== "cluster");
    if (seen.run && on !== "cluster") location.href = `/run?dir=${encodeURIComponent(seen.run)}`;
    else if (seen.code) throw new Error(`It ended with exit code ${seen.code}; its last lines say why.`);
  } catch (error) {
    complain([error.message]);
    for (const id of ["start", "submit"]) byId(id).disabled = false;
  }
};
byId("start").addEventListener("click", () => begin("here"));
byId("submit").addEventListener("click", () => begin("cluster"));
if (fields.some((f) => f.value.trim())) changed();
