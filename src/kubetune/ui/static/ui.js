// What every page does by itself: it hears of news, fetches itself anew, and puts in place what has changed.
export const byId = (id) => document.getElementById(id);

// The server's answer to a change that a page asks for. Throws its reason where it refuses, or is not there.
export const post = async (path, body, signal = null) => {
  const answer = await fetch(path, { method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(body) })
    .catch((error) => { throw signal?.aborted ? error : new Error("no answer: kubetune ui has ended, or cannot be reached"); });
  if (answer.ok) return answer;
  const text = await answer.text();
  const page = answer.headers.get("content-type")?.startsWith("text/html") && new DOMParser().parseFromString(text, "text/html");
  const reason = page ? page.querySelector("main pre, main > p")?.textContent : text;
  throw new Error(reason?.trim() || `refused: ${answer.status}`);
};

// What the server answers to it. Throws also the problems of an answer.
export const ask = async (path, body) => {
  const reply = await (await post(path, body)).json();
  if (reply.problems?.length) throw new Error(reply.problems.join("\n"));
  return reply;
};
// A button says in its own place what came of it, and why nothing did.
export const work = async (button, doing, task) => {
  button.disabled = true;
  try { await task(); button.textContent = doing; } catch (error) { button.textContent = error.message; }
};

export const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// A text in which no line ends within a word of code, and lines of a file or a log, which are indented where they wrap.
const marked = (className, ...parts) => { const made = Object.assign(document.createElement("span"), { className }); made.append(...parts); return made; };
export const wholeWords = (text) => text.split(/(\s+)/).map((word) => (/[-?!}]./.test(word) ? marked("whole", word) : word));
export const linesOf = (texts) => texts.map((text) => marked("", ...wholeWords(text), "\n"));
// What a command that was begun says, until it ends or `arrived` finds what was waited for; how it stands then.
export const follow = async (begun, output, arrived = () => false) => {
  const first = begun.command ? [`$ ${begun.command}`] : [];
  for (output.hidden = false; ; await pause(500)) {
    const seen = await (await fetch(`/new/job?name=${encodeURIComponent(begun.job)}`)).json();
    output.replaceChildren(...linesOf([...first, ...seen.lines]));
    output.scrollTop = output.scrollHeight;
    if (arrived(seen) || !seen.running) return seen;
  }
};

const swap = (old, fresh) => {
  // A button that asks back, or says what comes of it, stays while there is no other in its place.
  if (old.innerHTML === fresh.innerHTML || (fresh.dataset.kind && fresh.dataset.kind === old.dataset.kind)) return;
  if (fresh.dataset.kind !== undefined) old.dataset.kind = fresh.dataset.kind;
  const chosen = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
  const open = [...old.querySelectorAll("details")].map((part) => part.open);
  const scrolled = [...old.querySelectorAll(".scroll")].map((part) => part.scrollLeft);
  const atEnd = old.scrollTop + old.clientHeight >= old.scrollHeight - 4;
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const focusedAt = focused ? [...old.querySelectorAll("a, button, input, summary")].indexOf(focused) : -1;
  old.replaceChildren(...fresh.cloneNode(true).childNodes);
  old.querySelectorAll("input[type=checkbox]").forEach((box) => { box.checked = chosen.has(box.value); });
  old.querySelectorAll("details").forEach((part, i) => { part.open = open[i] ?? false; });
  old.querySelectorAll(".scroll").forEach((part, i) => { part.scrollLeft = scrolled[i] ?? 0; });
  if (focusedAt >= 0) old.querySelectorAll("a, button, input, summary")[focusedAt]?.focus();
  if (atEnd) old.scrollTop = old.scrollHeight;
};

// Parts of the page that show what a run says of itself; the curves are redrawn from their numbers instead.
const parts = (page) => [...page.querySelectorAll("[data-live], main > section[id], main > section[aria-label], #point > .hero > div, #point > .facts-line, header h1, header .reason, header .when")]
  .filter((part) => !["curves", "headline", "log", "point"].includes(part.id));
const nameOf = (part) => part.id || part.getAttribute("aria-label") || `${part.localName} ${part.className}`;

// What was logged last is seen first, and of a run that failed the error.
const toEnd = (part) => part.querySelectorAll(".log").forEach((log) => { log.scrollTop = [...log.querySelectorAll(".error")].at(-1)?.offsetTop - log.offsetTop || log.scrollHeight; });
toEnd(document);

// Sections with a tab are shown one tab at a time; without scripts they stand below each other, and tabs are links.
const makeTabs = (list) => {
  const sections = () => [...document.querySelectorAll("main > section[data-tab]")];
  const links = () => [...list.querySelectorAll("a")];
  const show = (name) => {
    for (const link of links()) {
      const isShown = link.textContent === name;
      if (isShown && link.ariaSelected !== "true") list.scrollLeft = link.offsetLeft - (list.clientWidth - link.offsetWidth) / 2;
      link.setAttribute("aria-selected", String(isShown));
      link.tabIndex = isShown ? 0 : -1;
    }
    for (const section of sections()) {
      const wasHidden = section.hidden;
      section.hidden = section.dataset.tab !== name;
      if (wasHidden && !section.hidden) toEnd(section);
    }
    document.dispatchEvent(new CustomEvent("shown"));
  };
  const prepare = () => {
    list.setAttribute("role", "tablist");
    for (const link of links()) {
      link.parentElement.setAttribute("role", "presentation");
      link.setAttribute("role", "tab");
      link.id = `tab-${link.textContent}`;
      const panels = sections().filter((section) => section.dataset.tab === link.textContent);
      link.setAttribute("aria-controls", panels.map((panel) => panel.id).join(" "));
      for (const panel of panels) {
        panel.setAttribute("role", "tabpanel");
        const heading = panel.querySelector("h2");
        // Each panel of a tab has a name of its own.
        panel.setAttribute("aria-label", [...new Set([link.textContent, heading?.textContent ?? panel.id])].join(": "));
        // A heading that only repeats the name of the tab is not shown.
        heading?.classList.toggle("visually-hidden", heading.textContent === link.textContent);
      }
    }
  };
  const current = () => links().find((link) => link.getAttribute("aria-selected") === "true")?.textContent ?? links()[0].textContent;
  const byHash = () => {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    const name = target && target.closest("section[data-tab]")?.dataset.tab;
    if (name) { show(name); target.scrollIntoView(); }
  };
  list.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    show(link.textContent);
    history.replaceState(null, "", link.getAttribute("href"));
  });
  list.addEventListener("keydown", (event) => {
    const all = links();
    const at = all.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    const link = all[(next + all.length) % all.length];
    link.click();
    link.focus();
  });
  prepare();
  show(current());
  byHash();
  addEventListener("hashchange", byHash);
  // A run that goes on gets new sections, such as its first evaluation.
  const renew = (page) => {
    const name = current();
    const fresh = page.querySelector("nav.tabs ul");
    if (fresh && fresh.textContent !== list.textContent) list.replaceChildren(...fresh.cloneNode(true).children);
    prepare();
    show(name);
  };
  return { renew };
};
const tabList = document.querySelector("nav.tabs ul");
const tabs = tabList && makeTabs(tabList);

// The library that draws is loaded with the first curve that is wanted.
const load = (name) => new Promise((onload, onerror) => {
  document.head.append(Object.assign(document.createElement("script"), { src: `/static/${name}`, onload, onerror }));
});
let library = null;
export const drawCharts = async () => {
  library ??= window.drawCharts ? Promise.resolve() : load("uPlot.js").then(() => load("charts.js"));
  await library;
  window.drawCharts();
};

// Numbers of the page itself: curves of chosen runs have theirs beside the table.
const ownNumbers = "body > #chart-data";
// Charts that were not there, or had other lines, take the places of the old ones.
const redraw = async (page, numbers) => {
  const axis = byId("x-axis")?.value;
  for (const id of ["point", "curves"]) if (byId(id)) swap(byId(id), page.getElementById(id));
  document.querySelector(ownNumbers)?.remove();
  if (!numbers) return;
  document.body.append(document.adoptNode(numbers));
  if (axis) byId("x-axis").value = axis;
  await drawCharts();
};

const refresh = async () => {
  const answer = await fetch(location.href, { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const here = new Map(parts(document).map((part) => [nameOf(part), part]));
  let before = null;
  for (const fresh of parts(page)) {
    const old = here.get(nameOf(fresh));
    if (old && old.localName === fresh.localName) swap(old, fresh);
    else if (old) old.replaceWith(fresh.cloneNode(true));
    else if (before && fresh.localName === "section") before.after(fresh.cloneNode(true));
    here.delete(nameOf(fresh));
    before = document.contains(old) && old?.localName === "section" ? old : before;
  }
  here.forEach((gone) => gone.remove());
  document.title = page.title;
  document.querySelector("link[rel=icon]").href = page.querySelector("link[rel=icon]").href;
  const numbers = page.querySelector(ownNumbers);
  const isAsBefore = [ownNumbers, ".hero"].every((name) => Boolean(page.querySelector(name)) === Boolean(document.querySelector(name)));
  const areSame = isAsBefore && (!numbers || document.dispatchEvent(new CustomEvent("charts", { detail: numbers.textContent, cancelable: true })));
  if (!areSame) await redraw(page, numbers);
  tabs?.renew(page);
  // Tables are sorted again, and what was chosen is chosen again.
  document.dispatchEvent(new CustomEvent("renewed"));
  filter();
  if (!page.body.dataset.news && document.body.dataset.news) return "ended";
  return "live";
};

const listen = (address) => {
  const sign = byId("live");
  const say = (kind, text) => { if (sign) { sign.className = `live ${kind}`; sign.textContent = text; } };
  const news = new EventSource(address);
  let [told, busy, again] = [null, false, false];
  const renew = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try {
      if (await refresh() === "ended") { news.close(); say("", ""); return; }
      say("on", "live");
    } catch { say("off", "no answer; trying again"); }
    busy = false;
    if (again) { again = false; renew(); }
  };
  news.addEventListener("news", (event) => {
    say("on", "live");
    // Also at first: something may have changed between the making of the page and the first look.
    if (told !== event.data) renew();
    told = event.data;
  });
  news.addEventListener("error", () => say("off", "no connection; trying again"));
  addEventListener("pagehide", () => news.close());
};
if (document.body.dataset.news) listen(document.body.dataset.news);

// A part that takes a while to be told comes by itself, again and again while the page is seen.
const keepLoading = async (place) => {
  for (;;) {
    if (!document.hidden) {
      const answer = await fetch(place.dataset.load).catch(() => null);
      if (answer?.ok) {
        const fresh = document.createElement("div");
        fresh.append(...new DOMParser().parseFromString(await answer.text(), "text/html").body.childNodes);
        swap(place, fresh);
      } else { byId("live").textContent = "no answer; trying again"; }
    }
    await pause(5000);
  }
};
document.querySelectorAll("[data-load]").forEach(keepLoading);

const filter = () => document.querySelectorAll("[data-filter]").forEach((field) => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const line of byId(field.dataset.filter)?.querySelectorAll(":scope > :not(thead)") ?? []) {
    line.hidden = !words.every((word) => line.textContent.toLowerCase().includes(word));
  }
});
document.addEventListener("input", (event) => { if (event.target.matches("[data-filter]")) filter(); });

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const text = byId(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch { // browsers have no clipboard for pages of other machines without TLS
    getSelection().selectAllChildren(text);
    button.textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// Stopping asks once more: the button itself becomes the question.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-stop]");
  if (!button) return;
  if (!button.dataset.sure) { button.dataset.sure = "1"; button.textContent = "Save a checkpoint and stop?"; return; }
  work(button, "Stopping …", () => ask("/run/stop", { dir: button.dataset.stop }));
});

// Buttons that have the server begin a command: its output is shown, and what it is about is gone to once it is there.
const toRun = (seen) => { location.href = `/run?dir=${encodeURIComponent(seen.run)}`; };
const begins = {
  continue: ["/run/continue", (seen) => seen.held || seen.code === 0, () => location.reload()],
  // What mends a failed run starts it again under another name.
  mend: ["/run/mend", (seen) => seen.run, toRun],
  demo: ["/new/demo", (seen) => seen.run, toRun],
};
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-continue], [data-mend], [data-demo]");
  if (!button) return;
  const name = Object.keys(begins).find((known) => known in button.dataset);
  const [path, arrived, go] = begins[name];
  work(button, "Starting …", async () => {
    const begun = await ask(path, { dir: button.dataset[name] });
    button.textContent = "Starting …";
    const seen = await follow(begun, byId("output"), arrived);
    if (!arrived(seen)) throw new Error(`It ended with exit code ${seen.code}; its last lines say why`);
    go(seen);
  });
});

const choice = byId("choice");
const chosen = () => [...choice.querySelectorAll("input:checked")];
const change = (path, body, place) => ask(path, body).then(() => location.reload(), (error) => { place.textContent = error.message; });

// Name, note and tags: of the run that the button names, or of the one that is chosen.
let labelled = "";
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-label]");
  if (!button) return;
  const about = button.dataset.label ? button : chosen()[0];
  labelled = button.dataset.label || about.value;
  for (const name of ["title", "tags", "note"]) byId(`label-${name}`).value = about.dataset[name];
  byId("labels-problem").textContent = "";
  byId("labels").showModal();
});
byId("labels")?.addEventListener("submit", (event) => {
  if (event.submitter.value === "cancel") return;
  event.preventDefault();
  const tags = byId("label-tags").value.split(",").map((tag) => tag.trim()).filter(Boolean);
  change("/run/label", { dirs: [labelled], title: byId("label-title").value, note: byId("label-note").value, tags }, byId("labels-problem"));
});
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-archive], [data-delete]");
  if (!button) return;
  const dirs = chosen().map((box) => box.value);
  const place = byId("chosen-problem");
  if (button.dataset.archive) { change("/run/label", { dirs, archived: button.dataset.archive === "true" }, place); return; }
  // Deleting asks once more, as stopping does.
  if (!button.dataset.sure) { button.dataset.sure = "1"; button.textContent = `Delete ${dirs.length === 1 ? dirs[0] : `${dirs.length} runs`} for good?`; return; }
  change("/run/delete", { dirs }, place);
});
const count = () => {
  const number = chosen().length;
  byId("compare").disabled = number < 2;
  byId("of-chosen").hidden = !number && !byId("pairs");
  byId("choose-none").hidden = !number;
  byId("chosen-count").textContent = ["Tick two runs", "1 chosen, tick another"][number] ?? `${number} chosen`;
  const remove = choice.querySelector("[data-delete]");
  if (!remove) return;
  delete remove.dataset.sure;
  remove.textContent = "Delete";
  choice.querySelector("button[data-label]").hidden = number !== 1;
};
if (choice && byId("compare")) {
  choice.addEventListener("change", count);
  byId("choose-none")?.addEventListener("click", () => {
    choice.querySelectorAll("input:checked").forEach((box) => { box.checked = false; });
    choice.dispatchEvent(new Event("change"));
  });
  count();
}
// A menu closes when something else is clicked, by Escape, and when one of its entries is chosen.
const closeMenus = (kept) => document.querySelectorAll("details.menu[open]").forEach((menu) => { if (menu !== kept) menu.open = false; });
document.addEventListener("click", (event) => {
  const menu = event.target.closest("details.menu");
  closeMenus(event.target.closest(".menu > div :is(a, button:not([data-stay]))") ? null : menu);
});
document.addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
});
document.querySelectorAll(".filters select[name]").forEach((field) => field.addEventListener("change", () => field.form.submit()));
