// The page of a run's result: what is chosen becomes a command line, which runs as a job of the server.
import { ask, byId, follow, pause, post, work } from "./ui.js";

const dir = byId("content").dataset.dir;

// Fields that are filled in; those of a choice that is not taken are switched off.
const optionsOf = (form) => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
const chosenIn = (form) => ({ dir, verb: form.dataset.verb, options: optionsOf(form) });
const say = (form, text) => {
  const place = form.querySelector(".problem");
  place.hidden = !text;
  place.textContent = text;
};

const switchFields = (form) => {
  const taken = [...form.querySelectorAll("input[type=radio]:checked")].map((radio) => radio.value);
  for (const field of form.querySelectorAll("[data-with]")) {
    field.disabled = !field.dataset.with.split(" ").some((value) => taken.includes(value));
  }
};

for (const form of document.querySelectorAll("form[data-verb]")) {
  let [timer, asked] = [0, 0];
  const show = async () => {
    const number = ++asked;
    const reply = await post("/run/result/command", chosenIn(form)).then((answer) => answer.json()).catch((error) => ({ problems: [error.message] }));
    // An earlier question may be answered after a later one.
    if (number !== asked) return;
    say(form, reply.problems.join("\n"));
    if (reply.command) byId(`command-${form.dataset.verb}`).textContent = reply.command;
  };
  switchFields(form);
  form.addEventListener("input", () => {
    switchFields(form);
    clearTimeout(timer);
    timer = setTimeout(show, 300);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    asked += 1;
    const button = form.querySelector("button:not([type])");
    button.disabled = true;
    try {
      await ask("/run/result/start", chosenIn(form));
      location.hash = "";
      location.reload();
      return;
    } catch (error) { say(form, error.message); }
    button.disabled = false;
  });
}

byId("cancel")?.addEventListener("click", (event) => work(event.target, "Cancelling …", () => ask("/run/result/cancel", { dir })));

// What goes on is followed to its end, and then the page is made anew with what came of it.
const job = byId("job")?.dataset.job;
if (job) {
  for (;;) {
    try { await follow({ job }, byId("output")); break; } catch { byId("end").textContent = "no answer; trying again"; }
    await pause(2000);
  }
  location.reload();
}
