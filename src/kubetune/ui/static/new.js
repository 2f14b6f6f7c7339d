// The form of a new run: what is typed is planned by the server, written down, and begun.
import { makePicker } from "./pick.js";
import { byId, follow, linesOf, post, wholeWords } from "./ui.js";
const form = byId("settings");
const fields = [...form.querySelectorAll("[name]")];
const extra = JSON.parse(form.dataset.extra || "{}");
const field = (name) => fields.find((f) => f.name === name);
// Settings that somebody has typed or chosen. All others are filled in to suit the data, and change with them; those of a
// run that is repeated stay as they are.
byId("run-file").open = matchMedia("(min-width: 60rem)").matches;
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
  made.append(...text.split("`").flatMap((part, i) => (i % 2 ? element("code", part) : wholeWords(part))));
  return made;
};
// A problem stands at the field that it is about, with the button that fixes it. A list above all leads to the fields.
const mostShown = 3;
const labelOf = (f) => form.querySelector(`[for="${f.id}"]`).firstChild.textContent.trim();
const linkTo = (f) => {
  const link = element("a", labelOf(f));
  link.href = `#${f.id}`;
  link.addEventListener("click", (event) => {
    event.preventDefault();
    for (let part = f.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
    f.focus();
    f.closest(".setting").scrollIntoView({ block: "center" });
  });
  return link;
};
const listOf = (kind, texts, { fields: about = {}, sentences = {}, fixes = [] }) => {
  const list = element("ul", "", kind);
  const lineOf = (text, isAtField) => {
    const line = Object.assign(spans("li", isAtField ? sentences[text] : text), { title: isAtField ? text : "" });
    line.append(...buttons(fixes.filter((fix) => fix.of === text)));
    return line;
  };
  for (const [f, ofField] of [...Map.groupBy(texts, (text) => field(about[text]))].sort(([a], [b]) => fields.indexOf(a) - fields.indexOf(b))) {
    if (!f) { list.append(...ofField.map((text) => lineOf(text))); continue; }
    const note = element("ul", "", kind);
    note.id = `${kind}-${f.name}`;
    note.append(...ofField.slice(0, mostShown).map((text) => lineOf(text, true)));
    if (ofField.length > mostShown) note.append(element("li", `and ${ofField.length - mostShown} more`));
    f.closest(".setting").append(note);
    f.setAttribute("aria-describedby", `${note.id} ${f.getAttribute("aria-describedby")}`);
    if (kind === "problem") f.setAttribute("aria-invalid", "true");
    // What is wrong is said there; here is where.
    list.append(element("li", ""));
    list.lastChild.append(linkTo(f), ofField.length > 1 ? ` (${ofField.length})` : "");
  }
  return list.children.length ? [list] : [];
};
const complain = (reply) => {
  form.querySelectorAll(".setting > :is(.problem, .warning)").forEach((note) => note.remove());
  for (const f of fields) { f.removeAttribute("aria-invalid"); f.setAttribute("aria-describedby", `a-${f.name}`); }
  const fixes = reply.problems.map((text) => reply.fixes?.find((fix) => fix.of === text)).filter(Boolean);
  const label = fixes.length === reply.problems.length ? `Fix all ${fixes.length}` : `Fix ${fixes.length} of ${reply.problems.length}`;
  const all = fixes.length > 1 ? buttons([{ label, values: Object.assign({}, ...fixes.map((fix) => fix.values)) }]) : [];
  byId("problems").replaceChildren(...all, ...listOf("problem", reply.problems, reply));
  byId("warnings").replaceChildren(...listOf("warning", reply.warnings ?? [], reply));
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
  button.addEventListener("click", () => { field(Object.keys(fix.values)[0])?.focus({ preventScroll: true }); fillIn(fix.values); });
  return button;
});

// From the first letter on nothing that the page says holds any more, and nothing can be started.
let number = 0;
const sayShortly = (kind, ...parts) => {
  byId("summary").className = kind;
  byId("summary").replaceChildren(...parts);
};
const beginChecking = () => {
  number += 1;
  byId("plan").setAttribute("aria-busy", "true");
  sayShortly("busy", "checking …");
  byId("start").disabled = byId("submit").disabled = true;
  return number;
};
const summaryOf = (reply) => {
  const count = reply.problems.length;
  if (count) return ["bad", count === 1 ? "1 problem" : `${count} problems`];
  const needed = reply.needed.map((label) => linkTo(fields.find((f) => labelOf(f) === label)));
  if (needed.length) return ["needed", "Still needed: ", ...needed.flatMap((link, i) => (i ? [", ", link] : [link]))];
  // The card says it too, where it is beside the form.
  return ["good", element("span", "Ready to start", "state done"), element("span", reply.summary, "numbers")];
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
  const nothing = { problems: [], warnings: [], needed: [], bad: [], facts: [], yaml: "", summary: "", command: "", card: null };
  const reply = { ...nothing, ...await post("/new/plan", body).then((answer) => answer.json()).catch((error) => ({ problems: [error.message] })) };
  if (mine !== number) return; // typed on meanwhile
  // A name is asked for at the start alone, so that the server plans without one.
  if (!body.values.name && !reply.needed.length && !reply.problems.length) reply.needed = ["Name of the run"];
  byId("plan").removeAttribute("aria-busy");
  sayShortly(...summaryOf(reply));
  complain({ ...reply, problems: [...reply.problems, ...reply.bad] });
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
  byId("yaml").replaceChildren(...linesOf(reply.yaml.trimEnd().split("\n")));
  byId("save-yaml").href = `data:text/yaml;charset=utf-8,${encodeURIComponent(reply.yaml)}`;
  byId("run-file").hidden = !reply.yaml;
  byId("command").replaceChildren(...wholeWords(reply.command));
  byId("command-line").hidden = !reply.command;
  byId("start").disabled = byId("submit").disabled = false;
  byId("submit").hidden = !reply.on_cluster;
};

// A look at the data: their first rows, what they seem to be for, and buttons where the form says otherwise.
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
  if (reply.filled.length) place.append(element("span", "Filled in for these rows, until you change it:", "hint"), ...reply.filled.flatMap((text) => [" ", element("span", text, "chip")]));
  if (reply.rows?.length) place.append(tableOf(reply));
  else place.append(...reply.problems.map((text) => element("p", text, "hint")));
};
const look = async () => {
  const reply = await lookAt({ ...asked(), touched: isRepeated ? null : [...touched] }, ofForm);
  if (!reply) return;
  if (reply.suits) suit(reply.suits);
  byId("held-out").textContent = reply.held_out;
  showRows(reply, byId("look"), buttons(reply.fixes ?? []));
};
// While one chooses among files, the rows of each come into the list.
const preview = (path, place) => lookAt({ values: { "data.train": path } }, ofList).then((reply) => reply && showRows(reply, place));

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
  byId("others").open = words.length > 0;
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
  // Until nothing is wrong or needed, it leads there.
  if (byId("summary").className !== "good") { (document.querySelector("#problems .problem a") ?? document.querySelector("#summary a"))?.click(); return; }
  for (const id of ["start", "submit"]) byId(id).disabled = true;
  try {
    const begun = await (await post("/new/start", { ...asked(), on })).json();
    if (begun.problems.length) { complain(begun); return; }
    const seen = await follow(begun, byId("output"), (reply) => reply.run && on !== "cluster");
    if (seen.run && on !== "cluster") location.href = `/run?dir=${encodeURIComponent(seen.run)}`;
    else if (seen.code) throw new Error(`It ended with exit code ${seen.code}; its last lines say why.`);
  } catch (error) {
    complain({ problems: [error.message] });
  } finally {
    for (const id of ["start", "submit"]) byId(id).disabled = false;
  }
};
byId("start").addEventListener("click", () => begin("here"));
byId("submit").addEventListener("click", () => begin("cluster"));
changed();
