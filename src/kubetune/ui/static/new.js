// The form of a new run: what is typed is planned by the server, written down, and begun.
import { makePicker } from "./pick.js";
import { byId, follow, post } from "./ui.js";
const form = byId("settings");
const fields = [...form.querySelectorAll("[name]")];
const extra = JSON.parse(form.dataset.extra || "{}");
const field = (name) => fields.find((f) => f.name === name);
// Settings that somebody has typed or chosen. All others are filled in to suit the data, and change with them; those of a
// run that is repeated stay as they are.
const isRepeated = Boolean(form.dataset.base);
const touched = new Set();
let filled = isRepeated ? [] : fields.filter((f) => f.value).map((f) => f.name);
// A browser that comes back to the page fills in what was typed before.
const firstValue = (f) => (f.options ? ([...f.options].find((option) => option.defaultSelected) ?? f.options[0]).value : f.defaultValue);
for (const f of fields) if (f.value !== firstValue(f)) touched.add(f.name);

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
// One box for problems and another for warnings: each line has the buttons that fix it. Of many lines, the first few are
// open.
const mostShown = 5;
const lineOf = (text, fixes) => {
  const [key, ...others] = text.split(":");
  const field = fields.find((f) => f.name === key);
  // A setting is called as on the form.
  const line = spans("li", field ? `${form.querySelector(`[for="${field.id}"]`).firstChild.textContent.trim()}:${others.join(":")}` : text);
  const made = element("span", "", "fixes");
  made.append(...buttons(fixes.filter((fix) => fix.of === text)));
  if (field) {
    const show = element("button", "Show the field", "button");
    show.type = "button";
    show.addEventListener("click", () => { const group = field.closest("details"); if (group) group.open = true; field.focus(); });
    made.append(show);
  }
  if (made.children.length) line.append(made);
  return line;
};
const listOf = (lines) => {
  const list = element("ul", "");
  list.append(...lines);
  return list;
};
const boxOf = (kind, texts, fixes) => {
  const frame = element("div", "", kind);
  const lines = texts.map((text) => lineOf(text, fixes));
  frame.append(listOf(lines.slice(0, mostShown)));
  if (lines.length > mostShown) {
    const more = element("details", "");
    more.append(element("summary", `${lines.length - mostShown} more`), listOf(lines.slice(mostShown)));
    frame.append(more);
  }
  return frame;
};
const complain = (problems, fixes = [], warnings = []) => {
  const boxes = [];
  if (problems.length) boxes.push(boxOf("problem", problems, fixes));
  if (warnings.length) boxes.push(boxOf("warning", warnings, fixes));
  // What the data seem to need fixes problems of many lines at once.
  const ofData = fixes.filter((fix) => !fix.of);
  if (boxes.length) boxes[0].append(...buttons(ofData));
  byId("problems").replaceChildren(...boxes);
};
// Settings without a field, such as the columns of a file, are shown in a line and can be taken out.
const showExtra = () => {
  const place = byId("more-set");
  place.replaceChildren();
  for (const [key, value] of Object.entries(extra)) {
    const chip = element("button", `${key.replace("data.train.", "")} = ${value} ✕`, "chip");
    chip.type = "button";
    chip.setAttribute("aria-label", `Take out ${key} = ${value}`);
    chip.addEventListener("click", () => { delete extra[key]; touched.add(key); changed(); });
    place.append(chip, " ");
  }
};
const set = (key, value) => {
  if (field(key)) field(key).value = value;
  else if (value) extra[key] = value;
  else delete extra[key];
};
const fillIn = (values) => {
  for (const [key, value] of Object.entries(values)) {
    touched.add(key);
    set(key, value);
  }
  changed();
};
// What suited the data before, and suits these no more, is emptied.
const suit = (values) => {
  for (const key of new Set([...filled, ...Object.keys(values)])) if (!touched.has(key)) set(key, values[key] ?? "");
  filled = Object.keys(values);
};
const buttons = (fixes) => fixes.map((fix) => {
  const button = element("button", fix.label, "button fix");
  button.type = "button";
  button.addEventListener("click", () => fillIn(fix.values));
  return button;
});

// From the first letter on nothing that the page says holds any more, and nothing can be started.
let number = 0;
const sayShortly = (kind, text) => {
  byId("summary").className = kind;
  byId("summary").textContent = text;
};
const beginChecking = () => {
  number += 1;
  byId("plan").setAttribute("aria-busy", "true");
  sayShortly("busy", "checking …");
  byId("start").disabled = true;
  byId("submit").disabled = true;
  complain([]);
  return number;
};
const summaryOf = (reply) => {
  const count = reply.problems.length;
  if (count) return ["bad", count === 1 ? "1 problem" : `${count} problems`];
  if (reply.needed.length) return ["", `Still needed: ${reply.needed.join(", ")}`];
  return ["good", reply.summary];
};
// Steps, time, memory against what is there, and price.
const showCard = (card) => {
  byId("card").hidden = !card;
  byId("card").replaceChildren(...(card ?? []).map(({ label, value, about, percent }) => {
    const cell = element("div", "");
    cell.append(element("dt", label), element("dd", value));
    if (percent !== null) {
      const track = element("dd", "", `track${percent > 100 ? " over" : ""}`);
      track.append(element("span", "", `part-${Math.min(100, percent)}`));
      cell.append(track);
    }
    if (about) cell.append(element("dd", about, "about"));
    return cell;
  }));
};
const plan = async (mine) => {
  const body = asked();
  const nothing = { problems: [], warnings: [], fixes: [], needed: [], bad: [], facts: [], yaml: "", summary: "", command: "", card: null };
  let reply;
  try { reply = { ...nothing, ...await (await post("/new/plan", body)).json() }; } catch (error) { reply = { ...nothing, problems: [error.message] }; }
  if (mine !== number) return; // typed on meanwhile
  // A name is asked for at the start alone, so that the server plans without one.
  if (!body.values.name && !reply.needed.length && !reply.problems.length) reply.needed = ["Name of the run"];
  byId("plan").removeAttribute("aria-busy");
  sayShortly(...summaryOf(reply));
  complain([...reply.problems, ...reply.bad], [...reply.fixes, ...lookFixes], reply.warnings);
  byId("no-facts").hidden = reply.facts.length > 0;
  byId("facts").replaceChildren(...reply.facts.map(([label, text]) => {
    const row = document.createElement("tr");
    // Without a label, a line belongs to the one above it.
    const head = element(label ? "th" : "td", label);
    if (label) head.scope = "row";
    row.append(head, spans("td", text));
    return row;
  }));
  byId("all-facts").hidden = !reply.facts.length;
  showCard(reply.card);
  byId("yaml").textContent = reply.yaml;
  byId("run-file").hidden = !reply.yaml;
  byId("command").textContent = reply.command;
  byId("command-line").hidden = !reply.command;
  byId("start").disabled = Boolean(reply.problems.length || reply.needed.length);
  byId("submit").hidden = !reply.on_cluster;
  byId("submit").disabled = byId("start").disabled;
};

// A look at the data: their first rows, what they seem to be for, and buttons where the form says otherwise.
let lookFixes = [];
const ofForm = { count: 0 };
const ofList = { count: 0 };
const tableOf = (reply) => {
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
  return frame;
};
// An answer is for the latest question of its kind alone.
const lookAt = async (body, questions) => {
  const mine = ++questions.count;
  const reply = await post("/new/look", body).then((answer) => answer.json()).catch(() => null);
  return mine === questions.count ? reply : null;
};
const showRows = (reply, place, buttonsOfData = []) => {
  place.replaceChildren();
  if (reply.about) place.append(element("p", reply.about, "hint"), ...buttonsOfData);
  if (reply.filled) place.append(element("p", reply.filled, "hint"));
  if (reply.rows?.length) place.append(tableOf(reply));
  else place.append(...reply.problems.map((text) => element("p", text, "hint")));
};
const look = async () => {
  const reply = await lookAt({ ...asked(), touched: isRepeated ? null : [...touched] }, ofForm);
  if (!reply) return;
  if (reply.suits) suit(reply.suits);
  lookFixes = reply.fixes ?? [];
  showRows(reply, byId("look"), buttons(lookFixes));
};
// While one chooses among files, the rows of each come into the list.
const preview = async (path, place) => {
  const reply = await lookAt({ values: { "data.train": path } }, ofList);
  if (reply) showRows(reply, place);
};

const showSettings = () => {
  const isFull = field("lora") && !field("lora").value;
  for (const f of fields) if (f.name.startsWith("lora.")) f.disabled = isFull && !f.value;
  showExtra();
};
const changed = async () => {
  showSettings();
  const mine = beginChecking();
  await look();
  if (mine !== number) return;
  showSettings();
  plan(mine);
};

const choseData = () => {
  // What was mapped belongs to the file before.
  for (const key of [...touched, ...Object.keys(extra)]) {
    if (!key.startsWith("data.train.")) continue;
    touched.delete(key);
    delete extra[key];
  }
  changed();
};
// Models and files at hand come after the page, since looking for them takes a moment.
const fillLists = async () => {
  const reply = await fetch("/new/at-hand").then((answer) => answer.json()).catch(() => null);
  if (!reply) return;
  makePicker(document.querySelector("[data-list=models]"), reply.models, changed);
  makePicker(document.querySelector("[data-list=data]"), reply.data, choseData, preview);
};
fillLists();

let timer = 0;
form.addEventListener("input", (event) => {
  if (event.target.id === "find" || !event.target.name) return;
  touched.add(event.target.name);
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
changed();
