// Talking to one or two models: a question stands once, and each side keeps turns of its own, made of its own answers.
import { byId, post, wholeWords } from "./ui.js";
const talk = byId("talk");

const start = () => {
  const dir = talk.dataset.dir;
  const beside = talk.dataset.beside;
  const sides = [...talk.querySelectorAll(".side")].map((section) => {
    const which = section.dataset.side;
    return { name: section.ariaLabel, state: section.querySelector("[data-state]"), messages: [], base: which === "base",
      dir: which === "other" ? beside : dir };
  });
  const turns = talk.querySelector(".turns");
  const dirs = [...new Set(sides.map((side) => side.dir))];
  // The models are held as long as this stream is open: from the start for a run that was asked for, else from the first question.
  let here = null;
  const open = () => {
    if (here) return;
    here = new EventSource(`/chat/stay?${dirs.map((name) => `dir=${encodeURIComponent(name)}`).join("&")}`);
    for (const side of sides) side.state.textContent = "loading; what you send waits for it";
    here.addEventListener("model", (event) => {
      const model = JSON.parse(event.data);
      for (const side of sides.filter((other) => other.dir === dirs[model.side])) {
        side.state.textContent = model.error ?? `${side.base ? "the base model" : model.checkpoint}${model.chats ? "" : "; it was taught plain text: each line stands alone"}`;
        side.state.classList.toggle("problem", Boolean(model.error));
      }
    });
    here.addEventListener("error", () => { if (here.readyState === EventSource.CLOSED) sides.forEach((side) => { side.state.textContent = "no connection"; }); });
    addEventListener("pagehide", () => here.close());
  };
  if (talk.dataset.atOnce !== undefined) open();
  let asking = null;
  const allow = (may) => { byId("text").disabled = byId("send").hidden = !may; byId("stop-answer").hidden = may; if (may) byId("text").focus(); };
  const judges = talk.closest(".judge");
  const forget = () => { sides.forEach((side) => { side.messages = []; }); turns.replaceChildren(); };
  // How many pixels of the turns, which scroll in their box or with the page, are below what is seen.
  const below = () => {
    const edge = Math.min(...["#ask", ".say"].map((name) => document.querySelector(name).getBoundingClientRect().top));
    return Math.max(turns.scrollHeight - turns.clientHeight - turns.scrollTop, turns.getBoundingClientRect().bottom - edge);
  };
  const toEnd = () => { turns.scrollTop = turns.scrollHeight; scrollBy({ top: below(), behavior: "instant" }); };
  // The page follows what is written, unless somebody has scrolled up.
  const write = (change) => { const follows = !judges && below() < 40; change(); if (follows) toEnd(); };

  const part = (place, className, text = "") => {
    const made = Object.assign(document.createElement("div"), { className, textContent: text });
    place.append(made);
    return made;
  };

  const ask = async (side, turn, text, signal) => {
    const system = byId("system").value.trim();
    const place = part(turn, "answer");
    place.setAttribute("role", "group");
    place.ariaLabel = side.name;
    const shown = part(place, "bubble assistant");
    shown.setAttribute("aria-busy", "true");
    const question = { role: "user", content: text };
    const numbers = Object.fromEntries(["max_new_tokens", "temperature", "top_p"].map((id) => [id, Number(byId(id).value)]));
    const body = { dir: side.dir, base: side.base, ...numbers,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...side.messages, question] };
    let problem = "";
    try {
      const answer = await post("/chat/say", body, signal);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const said = JSON.parse(line);
          if (said.piece) write(() => { shown.textContent += said.piece; });
          if (said.html) shown.innerHTML = said.html;
          if (said.error) problem = said.error;
          for (const what of said.left_out ?? []) part(place, "bubble note", `${what}, which the model does not see`);
        }
      }
    } catch (error) { problem = signal.aborted ? "stopped; that turn is forgotten" : error.message; }
    shown.removeAttribute("aria-busy");
    if (!shown.firstElementChild) write(() => shown.replaceChildren(...wholeWords(shown.textContent)));
    if (problem) write(() => part(place, "bubble note problem", problem));
    else side.messages.push(question, { role: "assistant", content: shown.textContent });
  };

  const send = async (label) => {
    const text = byId("text").value.trim();
    if (!text || asking || byId("text").disabled) return;
    byId("text").value = "";
    open();
    // What the evaluation asked stays in sight, and is no part of the talk.
    if (turns.querySelector(".note:first-child:last-of-type")) part(turns, "bubble note", "asked by you, without what is above");
    // A judge's newest verdict is the first.
    const turn = document.createElement("article");
    turns[judges ? "prepend" : "append"](turn);
    part(turn, "bubble user", text);
    if (judges && label) part(turn, "bubble note", label);
    asking = new AbortController();
    allow(false);
    const answers = Promise.all(sides.map((side) => ask(side, turn, text, asking.signal)));
    if (!judges) toEnd();
    await answers;
    asking = null;
    allow(true);
  };
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("prompts")?.addEventListener("click", (event) => {
    const prompt = event.target.closest("[data-prompt]");
    if (!prompt) return;
    byId("text").value = prompt.dataset.prompt;
    send(prompt.querySelector("small")?.textContent);
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("stop-answer").addEventListener("click", () => asking?.abort());
  byId("forget").addEventListener("click", forget);
};
if (talk) start();
