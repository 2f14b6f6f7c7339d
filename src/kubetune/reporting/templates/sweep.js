"use strict";
// Parallel axes: the trial that is pointed at, or chosen with the slider, is drawn over all others and named.
(() => {
  const reach = 14; // pixels of the figure between the pointer and a line
  const rows = () => [...document.querySelectorAll(".trials tbody tr")];
  const slider = () => document.querySelector("[data-trials]");
  let chosen = null; // number of a trial
  const order = () => slider().dataset.trials.split(","); // the best first, however the table is sorted
  const hint = document.querySelector("[data-readout-trial]")?.textContent;

  // "trial 7: state done, step 90/90, eval_loss 1.23, lora.r 16", from its row in the table.
  const words = (row) => {
    const heads = [...row.closest("table").tHead.rows[0].cells];
    const parts = [...row.cells].slice(1).map((cell, i) => `${heads[i + 1].textContent} ${cell.textContent.trim()}`);
    return `trial ${row.id.slice(6)}: ${parts.filter((part, i) => row.cells[i + 1].textContent.trim()).join(", ")}`;
  };

  const choose = (number) => {
    chosen = number;
    if (!slider()) return;
    const line = number === null ? null : document.querySelector(`.parallel [data-trial="${number}"]`);
    document.querySelectorAll(".parallel, .scatter").forEach((other) => other.classList.toggle("choosing", Boolean(line)));
    document.querySelectorAll("[data-trial]").forEach((other) => other.classList.toggle("chosen", Boolean(line) && other.dataset.trial === number));
    rows().forEach((row) => row.classList.toggle("chosen", row.id === `trial-${number}`));
    if (!line) { document.querySelector("[data-readout-trial]").textContent = hint; return; }
    const text = words(document.getElementById(`trial-${number}`));
    document.querySelector("[data-readout-trial]").textContent = text;
    slider().value = order().indexOf(number);
    slider().setAttribute("aria-valuetext", text);
  };

  // Of all lines, the one that passes nearest to the pointer.
  const nearest = (event) => {
    const svg = event.target.closest(".parallel");
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let [best, least] = [null, reach];
    for (const line of svg.querySelectorAll("[data-trial]")) {
      for (const part of line.getAttribute("d").slice(1).split("M")) {
        const points = part.split("L").map((point) => point.split(",").map(Number));
        points.slice(1).forEach(([x1, y1], i) => {
          const [x0, y0] = points[i];
          const [dx, dy] = [x1 - x0, y1 - y0];
          const along = Math.min(1, Math.max(0, ((at.x - x0) * dx + (at.y - y0) * dy) / (dx * dx + dy * dy)));
          const distance = Math.hypot(x0 + along * dx - at.x, y0 + along * dy - at.y);
          if (distance < least) [best, least] = [line.dataset.trial, distance];
        });
      }
    }
    return best;
  };

  document.addEventListener("pointermove", (event) => {
    if (!event.target.closest(".parallel")) return;
    const number = nearest(event);
    if (number !== null && number !== chosen) choose(number);
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".parallel, .scatter")) return;
    const number = event.target.closest("circle[data-trial]")?.dataset.trial ?? (event.target.closest(".parallel") && nearest(event));
    if (number) document.getElementById(`trial-${number}`).scrollIntoView({ block: "center" });
  });
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-trials]")) choose(order()[Number(event.target.value)]);
  });
  document.addEventListener("pointerover", (event) => {
    const row = event.target.closest(".trials tbody tr");
    const number = row?.id.slice(6) ?? event.target.closest(".scatter [data-trial]")?.dataset.trial;
    if (number) choose(number);
  });
  document.addEventListener("pointerout", (event) => {
    const drawn = ".parallel, .scatter, .trials";
    if (event.target.closest(drawn) && !event.relatedTarget?.closest?.(drawn)) choose(null);
  });
  document.addEventListener("renewed", () => choose(chosen));
})();
