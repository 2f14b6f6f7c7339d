// A field with a list of what is at hand: a word may be any part of a name, and the choice that one is at can be looked at.
const mostShown = 50;
const highest = 440; // pixels of an open list with a preview

const hintOf = (list, fitting, words) => {
  const hidden = fitting.length - mostShown;
  const parts = [];
  if (!fitting.length) parts.push(`No name holds ${words.join(" and ")}; what you typed is taken as it is.`);
  if (hidden > 0) parts.push(`${hidden.toLocaleString("en")} more: type any part of a name.`);
  if (list.left_out) parts.push(`${list.left_out.toLocaleString("en")} further ones are not listed.`);
  if (list.ran_out) parts.push("Not all folders were looked through; any path may be typed.");
  return parts.join(" ");
};

// `chosen` is called with what was picked, `preview` with a choice that one is at and a place to show it in.
export const makePicker = (frame, list, chosen, preview = null) => {
  const field = frame.querySelector("input");
  const open = frame.querySelector(".open");
  const popup = frame.querySelector(".popup");
  const options = popup.querySelector("ul");
  const place = popup.querySelector(".preview");
  let shown = [];
  let at = -1;
  let timer = 0;
  const close = () => {
    popup.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
    clearTimeout(timer);
  };
  const goTo = (index) => {
    options.children[at]?.setAttribute("aria-selected", "false");
    at = index;
    const option = options.children[at];
    if (!option) { field.removeAttribute("aria-activedescendant"); return; }
    option.setAttribute("aria-selected", "true");
    field.setAttribute("aria-activedescendant", option.id);
    option.scrollIntoView({ block: "nearest" });
    if (!preview) return;
    clearTimeout(timer);
    timer = setTimeout(() => preview(shown[at][0], place), 150);
  };
  // Words are looked for once something is typed; a field that is opened again shows everything.
  const show = (words) => {
    const fitting = list.choices.filter(([value, text]) => words.every((word) => `${value} ${text}`.toLowerCase().includes(word)));
    shown = fitting.slice(0, mostShown);
    at = -1;
    field.removeAttribute("aria-activedescendant");
    options.replaceChildren(...shown.map(([value, text], index) => {
      const option = document.createElement("li");
      option.id = `${options.id}-${index}`;
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", "false");
      // data/train.jsonl (240 kB): what is in brackets stands apart.
      const [name, about] = text.split(/ \(([^()]*)\)$/);
      option.append(name);
      if (about) option.append(Object.assign(document.createElement("small"), { textContent: about }));
      option.title = value;
      return option;
    }));
    options.hidden = !shown.length;
    popup.querySelector(".hint").textContent = hintOf(list, fitting, words);
    place.replaceChildren();
    popup.hidden = false;
    field.setAttribute("aria-expanded", String(shown.length > 0));
    // Where it would end below the window, the field goes to the top of it.
    if (frame.getBoundingClientRect().bottom + highest > innerHeight) frame.scrollIntoView({ block: "start" });
  };
  const choose = () => {
    const [value] = shown[at];
    field.value = value;
    close();
    chosen(value);
  };
  const count = list.choices.length + list.left_out;
  open.hidden = !count;
  open.textContent = `${count.toLocaleString("en")} at hand`;
  if (!count) return;
  open.addEventListener("click", () => { field.focus(); if (popup.hidden) show([]); else close(); });
  field.addEventListener("click", () => { if (popup.hidden) show([]); });
  field.addEventListener("input", () => show(field.value.toLowerCase().split(/\s+/).filter(Boolean)));
  field.addEventListener("blur", close);
  field.addEventListener("keydown", (event) => {
    const isOpen = !popup.hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!isOpen) show([]);
      const step = event.key === "ArrowDown" ? 1 : -1;
      if (shown.length) goTo(at < 0 && step < 0 ? shown.length - 1 : (at + step + shown.length) % shown.length);
    } else if (event.key === "Enter" && isOpen && at >= 0) {
      event.preventDefault();
      choose();
    } else if (event.key === "Escape" && isOpen) {
      event.preventDefault();
      close();
    }
  });
  // The field keeps the focus, else it would close the list before the click arrives.
  popup.addEventListener("mousedown", (event) => event.preventDefault());
  open.addEventListener("mousedown", (event) => event.preventDefault());
  const indexOf = (event) => [...options.children].indexOf(event.target.closest("[role=option]"));
  options.addEventListener("mousemove", (event) => { const index = indexOf(event); if (index >= 0 && index !== at) goTo(index); });
  options.addEventListener("click", (event) => { const index = indexOf(event); if (index >= 0) { goTo(index); choose(); } });
};
