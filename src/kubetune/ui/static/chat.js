// Talking to one or two models: each side keeps turns of its own, made of its own answers.
import { byId, post, wholeWords } from "./ui.js";
const talk = byId("talk");

const start = () => {
  const dir = talk.dataset.dir;
  const beside = talk.dataset.beside;
  const sides = [...talk.querySelectorAll(".side")].map((section) => {
    const turns = section.querySelector(".turns");
    const which = turns.dataset.side;
    return { turns, state: section.querySelector("[data-state]"), messages: [], base: which === "base",
      dir: which === "other" ? beside : dir };
  });
  const dirs = [...new Set(sides.map((side) => side.dir))];
  // The models are held as long as this stream is open: from the start for a run that was asked for, else from the first question.
  let here = null;
  const open = () => {
    if (here) return;
    here = new EventSource(`/chat/stay?${dirs.map((name) => `dir=${encodeURIComponent(name)}`).join("&")}`);
    for (const side of sides) side.state.textContent = "loading the model; what you send waits for it";
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
  const forget = () => sides.forEach((side) => { side.messages = []; side.turns.replaceChildren(); });

  const bubble = (side, kind, text) => {
    const made = document.createElement("div");
    made.className = `bubble ${kind}`;
    made.textContent = text;
    (side.card ?? side.turns).append(made);
    side.turns.scrollTop = side.turns.scrollHeight;
    return made;
  };

  const ask = async (side, text, signal, label) => {
    const system = byId("system").value.trim();
    // A verdict stands below its text, and that of the newest first.
    if (judges) side.turns.prepend(side.card = document.createElement("article"));
    bubble(side, "user", text);
    if (judges && label) bubble(side, "note", label);
    const shown = bubble(side, "assistant", "");
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
          const part = JSON.parse(line);
          if (part.piece) shown.textContent += part.piece;
          if (part.html) shown.innerHTML = part.html;
          if (part.error) problem = part.error;
          for (const what of part.left_out ?? []) bubble(side, "note", `${what}, which the model does not see`);
        }
        side.turns.scrollTop = side.turns.scrollHeight;
      }
    } catch (error) { problem = signal.aborted ? "stopped; that turn is forgotten" : error.message; }
    shown.removeAttribute("aria-busy");
    if (!shown.firstElementChild) shown.replaceChildren(...wholeWords(shown.textContent));
    if (problem) bubble(side, "note problem", problem);
    else side.messages.push(question, { role: "assistant", content: shown.textContent });
  };

  const send = async (label) => {
    const text = byId("text").value.trim();
    if (!text || asking || byId("text").disabled) return;
    byId("text").value = "";
    open();
    // What the evaluation asked stays in sight, and is no part of the talk.
    for (const side of sides) if (!judges && side.turns.firstChild && !side.messages.length) bubble(side, "note", "asked by you, without what is above");
    asking = new AbortController();
    allow(false);
    await Promise.all(sides.map((side) => ask(side, text, asking.signal, label)));
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
