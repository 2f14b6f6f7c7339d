// The form of a new run: what is typed is planned by the server, written down, and begun.
import { byId, follow, post } from "./ui.js";
const form = byId("settings");
const fields = [...form.querySelectorAll("[name]")];
const extra = JSON.parse(form.dataset.extra || "{}");

const asked = () => ({ base: form.dataset.base,
  values: { ...extra, ...Object.fromEntries(fields.filter((f) => f.value.trim()).map((f) => [f.name, f.value])) } });
const element = (name, text, kind = "") => {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
const complain = (problems) => byId("problems").replaceChildren(...problems.map((text) => element("p", text, "problem")));

let number = 0;
const plan = async () => {
  const mine = ++number;
  const body = asked();
  if (!Object.keys(body.values).length) return;
  byId("facts").classList.add("waiting");
  let reply;
  try { reply = await (await post("/new/plan", body)).json(); } catch (error) { reply = { problems: [error.message], needed: [], bad: [], facts: [], yaml: "", command: "" }; }
  if (mine !== number) return; // typed on meanwhile
  byId("facts").classList.remove("waiting");
  complain([...reply.problems, ...reply.bad]);
  byId("needed").textContent = reply.needed.length ? `Still needed: ${reply.needed.join(", ")}.` : "";
  byId("facts").replaceChildren(...reply.facts.map(([label, text]) => {
    const row = document.createElement("tr");
    const head = element("th", label);
    head.scope = "row";
    row.append(head, element("td", text));
    return row;
  }));
  byId("yaml").textContent = reply.yaml;
  byId("command").textContent = reply.command;
  byId("command-line").hidden = !reply.command;
  byId("start").disabled = Boolean(reply.problems.length || reply.needed.length) || !body.values.name;
  byId("submit").hidden = !reply.on_cluster;
  byId("submit").disabled = byId("start").disabled;
};
let timer = 0;
form.addEventListener("input", (event) => {
  if (event.target.id === "find") return;
  clearTimeout(timer);
  timer = setTimeout(plan, 250);
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
if (fields.some((field) => field.value.trim())) plan();
