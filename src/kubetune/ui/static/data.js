// Rows with certain words are looked for a moment at a time: the page asks on until it is full.
import { ask, byId, follow } from "./ui.js";

const fill = async () => {
  const rows = byId("rows");
  for (let next = byId("next"); next?.dataset.more !== undefined; next = byId("next")) {
    if (rows.querySelectorAll(".row").length >= Number(rows.dataset.wanted)) break;
    const answer = await fetch(next.href);
    if (!answer.ok) break;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    rows.append(...page.querySelectorAll("#rows > .row"));
    byId("pages").replaceChildren(...page.getElementById("pages").childNodes);
    if (!byId("next") && !rows.querySelector(".row")) rows.append(...page.querySelectorAll("#rows > .empty"));
  }
};
if (byId("rows")) fill();

document.querySelector("[data-begin]")?.addEventListener("click", async (event) => {
  const button = event.target;
  const output = byId("output");
  button.disabled = true;
  output.hidden = false;
  const { begin, dir, file } = button.dataset;
  const begun = await ask(begin, { dir, file }).catch((error) => { output.textContent = error.message; });
  if (!begun) { button.disabled = false; return; }
  const seen = await follow(begun, output);
  if (seen.code && begin !== "/data/check") button.disabled = false;
  else location.reload();
});
