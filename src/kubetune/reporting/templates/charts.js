"use strict";
// Draws the charts of the page whose numbers are in #chart-data; again, if others have taken their place.
let leaveCharts = null;
window.drawCharts = () => {
  leaveCharts?.abort();
  leaveCharts = new AbortController();
  const { signal } = leaveCharts;
  const { charts, axes } = JSON.parse(document.getElementById("chart-data").textContent);
  const drawn = new Map();
  const scales = new Map();
  const hidden = new Map(charts.map((_, index) => [index, new Set()]));
  let xName = document.getElementById("x-axis").value;
  let smoothing = 4;
  let onPaper = false;
  const colours = 12;
  const dashes = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 5], [5, 5, 1, 5], [1, 5], [12, 3, 3, 3, 3, 3]];
  const parts = [0, 1 / 320, 1 / 160, 1 / 80, 1 / 40, 1 / 20, 1 / 10]; // of a curve that a value is the mean of

  const byId = (id) => document.getElementById(id);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ofLine = (line) => colour(`--c${line.colour % colours}`);

  const inUnits = (value, digits = 4) => {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit += 1; }
    return `${Number(value.toPrecision(digits))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };
  const write = {
    fixed: (v) => String(Math.abs(v) < 1e-6 ? 0 : Number(v.toPrecision(4))),
    exponent: (v, digits = 3) => (v === 0 ? "0" : Number(v.toPrecision(digits)).toExponential()),
    short: (v) => Math.round(v).toLocaleString("en"),
    bytes: inUnits,
    percent: (v, digits = 4) => `${Number((100 * v).toPrecision(digits))} %`,
  };
  const plain = (v, digits) => String(Number(v.toPrecision(digits)));
  const onAxis = { ...write, short: (v, digits) => (Math.abs(v) >= 10000 ? `${plain(v / 1000, digits)}k` : plain(v, digits)), fixed: plain };
  // With as many digits as tell them apart: no two places of an axis have the same name.
  const ticks = (at, unit, digits = 6) => {
    const texts = at.map((v) => (v === null ? "" : onAxis[unit](v, digits)));
    const known = texts.filter(Boolean);
    return digits < 15 && new Set(known).size < known.length ? ticks(at, unit, digits + 1) : texts;
  };
  const onX = (v) => xName === "share" ? `${Number(v.toPrecision(3))} %` : (Math.abs(v) >= 1e6 ? `${Number((v / 1e6).toPrecision(4))}M` : Number(v.toPrecision(6)).toLocaleString("en"));
  const binary = Array.from({ length: 50 }, (_, power) => 2 ** power);

  // Each value is the mean of those around it, of as many before it as after it, so that a curve turns where its values do
  // and ends where they end. Of few values each is shown as it is.
  const knownOf = (values) => values.filter((v) => v !== null).length;
  const smooth = (values) => {
    const known = [...values.keys()].filter((i) => values[i] !== null);
    const sums = [0];
    for (const i of known) sums.push(sums.at(-1) + values[i]);
    const most = Math.max(1, Math.round((known.length * parts[smoothing]) / 2));
    const result = [...values];
    known.forEach((i, at) => {
      const side = Math.min(most, at, known.length - 1 - at);
      result[i] = (sums[at + side + 1] - sums[at - side]) / (2 * side + 1);
    });
    return result;
  };

  // Where a run was after `step` steps: tokens, epochs or hours, between what is known of the steps around.
  const lastStep = new Map();
  const lastOf = (run) => {
    if (!lastStep.has(run)) {
      const known = charts.flatMap((chart) => chart.lines.map((line, i) => line.run === run ? chart.data[0].findLast((_, at) => chart.data[i + 1][at] !== null) ?? 0 : 0));
      lastStep.set(run, Math.max(1, ...known));
    }
    return lastStep.get(run);
  };
  const reached = (run, step) => {
    if (xName === "step") return step;
    if (xName === "share") return (100 * step) / lastOf(run);
    const [steps, values] = axes[run][xName === "time" ? "hours" : xName];
    let [low, high] = [0, steps.length - 1];
    while (low < high) { const middle = (low + high) >> 1; if (steps[middle] < step) low = middle + 1; else high = middle; }
    const [s0, v0] = low ? [steps[low - 1], values[low - 1]] : [0, 0];
    const value = s0 === steps[low] ? values[low] : v0 + ((values[low] - v0) * (step - s0)) / (steps[low] - s0);
    return xName === "time" ? value * unitOfTime()[0] : value;
  };
  // Hours, minutes or seconds, whichever the longest run took some of.
  const unitOfTime = () => {
    const longest = Math.max(...axes.map(({ hours }) => hours?.[1].at(-1) ?? 0));
    return longest > 3 ? [1, "h"] : longest > 0.05 ? [60, "min"] : [3600, "s"];
  };

  const [leastSmoothed, leastJoined, mostPoints, mostPale] = [50, 5, 40, 6];
  // The lines of a chart as they are drawn now: smoothed, and of these after all others the values themselves, pale.
  const linesOf = (chart) => {
    const lines = chart.lines.map((line, i) => {
      const values = chart.data[i + 1];
      const isSmooth = line.kind === "smooth" && smoothing > 0 && knownOf(values) >= leastSmoothed;
      return { ...line, of: i, isSmooth, isPoints: line.kind === "points" && knownOf(values) <= mostPoints, isBeside: chart.lines[0].kind === "smooth", values: isSmooth ? smooth(values) : values };
    });
    const pale = lines.filter((line) => line.isSmooth);
    return pale.length > mostPale ? lines : [...lines, ...pale.map((line) => ({ ...line, kind: "pale", values: chart.data[line.of + 1] }))];
  };
  // All charts begin and end at the same place, so that they can be read below each other.
  const sharedRange = () => {
    const high = Math.max(...axes.map((_, run) => reached(run, lastOf(run))));
    return high > 0 ? [0, high] : [-1, 1];
  };
  const columnsOf = (chart, lines) => {
    const columns = lines.map((line) => line.values);
    if (xName === "step") return [chart.data[0], ...columns];
    if (lines.every((line) => line.run === lines[0].run)) {
      return [chart.data[0].map((step) => reached(lines[0].run, step)), ...columns];
    }
    return uPlot.join(lines.map((line) => {
      const known = chart.data[0].map((step, at) => [step, line.values[at]]).filter(([, value]) => value !== null);
      return [known.map(([step]) => reached(line.run, step)), known.map(([, value]) => value)];
    }));
  };

  // Points of a second measure are hollow, and the line that joins some points beside a curve is pale, that of few none: nobody measured it.
  const series = (line, isHidden) => {
    const stroke = ofLine(line);
    const dash = line.isPoints ? [] : dashes[(line.dash ?? 0) % dashes.length];
    const common = { label: line.label, stroke, width: 2, dash, show: !isHidden, spanGaps: true, points: { show: knownOf(line.values) === 1, size: 7 } };
    switch (line.kind) {
      case "pale": return { ...common, stroke: `${stroke}48`, width: 1, dash: [], points: { show: false } };
      case "edge": return { ...common, stroke: "transparent", width: 0, points: { show: false } };
      case "points": return { ...common, ...(line.isBeside ? { stroke: knownOf(line.values) < leastJoined ? "transparent" : `${stroke}70`, width: 1 } : { width: 1.5 }),
        points: { show: line.isPoints, size: 8, width: 2, stroke, fill: line.mark && line.dash ? colour("--panel") : stroke } };
      default: return common;
    }
  };

  const marks = (chart) => (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const mark of chart.markers) {
      const x = plot.valToPos(reached(0, mark.step), "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(mark.error ? "--bad" : "--mark");
      ctx.stroke(new Path2D(`M${x} ${bbox.top}v${bbox.height}`));
    }
    ctx.restore();
  };

  // The letter of its run stands on each line a few times, so that lines are told apart without their colours.
  const letters = (chart) => (plot) => {
    const { ctx, bbox } = plot;
    const radius = 7.5 * devicePixelRatio;
    ctx.save();
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    chart.lines.forEach((line, i) => {
      if (!line.mark || !plot.series[i + 1].show) return;
      const known = plot.data[i + 1].map((v, at) => (v == null ? -1 : at)).filter((at) => at >= 0);
      const runs = Math.max(...chart.lines.map((other) => other.run)) + 1;
      for (const part of known.length > 4 ? [0, 1, 2] : [2]) {
        const at = known[Math.round(((part + (line.run + 1) / (runs + 1)) / 3) * (known.length - 1))];
        const x = plot.valToPos(plot.data[0][at], "x", true);
        const y = Math.min(bbox.top + bbox.height, Math.max(bbox.top, plot.valToPos(plot.data[i + 1][at], "y", true)));
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.arc(x, y, radius, 0, 2 * Math.PI);
        ctx.fillStyle = ofLine(line);
        ctx.fill();
        ctx.fillStyle = colour("--panel");
        ctx.font = `700 ${(line.mark.length > 1 ? 8 : 10) * devicePixelRatio}px Inter, system-ui, sans-serif`;
        ctx.fillText(line.mark, x, y);
      }
    });
    ctx.restore();
  };

  const drawing = "http://www.w3.org/2000/svg";
  const sampleOf = (line) => {
    const sample = document.createElementNS(drawing, "svg");
    const stroke = document.createElementNS(drawing, line.isPoints ? "circle" : "path");
    const shape = line.isPoints ? { cx: 22, cy: 5, r: 3.6, fill: line.mark && line.dash ? "none" : ofLine(line) }
      : { d: "M0 5H30", "stroke-dasharray": dashes[(line.dash ?? 0) % dashes.length].join(" ") };
    for (const [name, value] of Object.entries({ ...shape, stroke: ofLine(line), "stroke-width": 2.4 })) stroke.setAttribute(name, value);
    sample.setAttribute("viewBox", "0 0 30 10");
    sample.ariaHidden = "true";
    sample.append(stroke);
    return sample;
  };

  // What the lines are at the cursor, in a box beside it: as all charts share the cursor, each shows its own.
  const showValues = (index) => (plot) => {
    const chart = charts[index];
    const place = document.querySelector(`[data-chart="${index}"]`);
    const box = place.querySelector(".values");
    const at = plot.cursor.idx;
    box.hidden = at === null || at === undefined;
    if (box.hidden) return;
    const x = plot.data[0][at];
    const parts = [`${xName} ${onX(x)}${xName === "time" ? ` ${unitOfTime()[1]}` : ""}`];
    const rows = [Object.assign(document.createElement("b"), { textContent: parts[0] })];
    const add = (line, name, value) => {
      const row = document.createElement("span");
      if (line) row.append(sampleOf(line));
      row.append(name, Object.assign(document.createElement("b"), { textContent: value }));
      rows.push(row);
      parts.push(`${name} ${value}`.trim());
    };
    const lines = linesOf(chart);
    lines.forEach((line, i) => {
      const value = plot.data[i + 1][at];
      if (["edge", "pale"].includes(line.kind) || value == null || !plot.series[i + 1].show) return;
      const band = chart.bands.find(([high]) => high === i + 2);
      const range = band ? ` (${band.map((part) => write[chart.unit](plot.data[part][at])).reverse().join(" to ")})` : "";
      const pale = lines.findIndex((other) => other.kind === "pale" && other.of === i);
      const raw = pale < 0 ? null : plot.data[pale + 1][at];
      add(line, line.label, write[chart.unit](value) + (range || (raw == null ? "" : ` (raw ${write[chart.unit](raw)})`)));
    });
    for (const mark of chart.markers) if (reached(0, mark.step) === x) add(null, mark.text, "");
    box.replaceChildren(...rows);
    const isRight = plot.cursor.left > plot.over.clientWidth / 2;
    box.style.left = isRight ? "auto" : `${plot.cursor.left + 12}px`;
    box.style.right = isRight ? `${plot.over.clientWidth - plot.cursor.left + 12}px` : "auto";
    place.setAttribute("aria-valuemax", plot.data[0].length - 1);
    place.setAttribute("aria-valuenow", at);
    place.setAttribute("aria-valuetext", parts.join(" · "));
  };

  const yScale = (index) => (scales.get(index) ? { distr: 3 }
    // Equal shares, such as zeros, lie on an axis of all shares, high ones below the line of 100 %, and what memory changes by a few bytes is no slope.
    : { range: (u, low, high) => (charts[index].unit === "percent" && low === high ? [0, 1]
      : uPlot.rangeNum(low, charts[index].unit === "bytes" ? Math.max(high, 1.05 * low) : charts[index].unit === "percent" && high > 0.8 ? Math.max(1, high) : high, 0.06, true)) });

  const draw = (index) => {
    const chart = charts[index];
    const place = document.querySelector(`[data-chart="${index}"]`);
    drawn.get(index)?.destroy();
    place.textContent = "";
    // With its legend below it, a chart that fills its box is measured as it will be.
    describe(index);
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, labelSize: 20,
      ticks: { stroke: colour("--grid"), width: 1 }, font: "12px Inter, system-ui, sans-serif", labelFont: "12px Inter, system-ui, sans-serif" };
    const lines = linesOf(chart);
    const columns = columnsOf(chart, lines);
    if (lines.some((line) => line.isSmooth)) byId("smoothing").parentElement.hidden = false;
    const plot = new uPlot({
      width: onPaper ? (place.closest(".hero") ? 560 : 330) : Math.max(200, place.clientWidth),
      height: place.closest(":fullscreen") ? innerHeight - 190 : onPaper ? 190 : place.closest(".hero") ? Math.min(400, Math.max(200, place.clientHeight)) : place.closest(".pane") || innerWidth < 600 ? 200 : 250,
      series: [{ label: xName }, ...lines.map((line) => series(line, hidden.get(index).has(line.of)))],
      bands: chart.bands.map((pair) => ({ series: pair, fill: `${ofLine(chart.lines[pair[0] - 1])}4d` })),
      scales: {
        x: { time: false, range: sharedRange },
        y: yScale(index),
      },
      axes: [
        { ...axis, space: 60, size: 34, labelSize: 16, label: byId("x-axis").selectedOptions[0].textContent + (xName === "time" ? `, ${unitOfTime()[1]}` : ""),
          values: (u, at) => at.map((v) => (Number.isInteger(v) || !["step", "tokens"].includes(xName) ? onX(v) : "")) },
        // A name that is over the chart already, or longer than the axis, is left out.
        { ...axis, ...(chart.axis === chart.title || chart.axis.length > 24 ? {} : { label: chart.axis }), size: (u, texts) => Math.max(62, ...(texts ?? []).map((text) => 14 + 7 * text.length)),
          ...(chart.unit === "bytes" && !scales.get(index) ? { incrs: binary } : {}),
          values: (u, at) => ticks(at, chart.unit) },
      ],
      cursor: { sync: { key: "steps" }, y: false, points: { size: 8 }, focus: { prox: -1 } },
      legend: { show: false },
      hooks: { draw: [marks(chart), letters(chart)], setCursor: [showValues(index)] },
    }, columns, place);
    plot.over.append(Object.assign(document.createElement("div"), { className: "values", hidden: true }));
    drawn.set(index, plot);
  };

  // The legend is of buttons, for the keyboard; each shows its line as it is drawn.
  const describe = (index) => {
    const chart = charts[index];
    const list = document.querySelector(`[data-legend="${index}"]`);
    const focused = [...list.children].findIndex((item) => item.contains(document.activeElement));
    list.textContent = "";
    const shown = linesOf(chart).filter((line) => !["edge", "pale"].includes(line.kind));
    if (shown.length < 2) return;
    for (const line of shown) {
      const i = line.of;
      const button = Object.assign(document.createElement("button"), { type: "button", title: line.label, ariaPressed: String(!hidden.get(index).has(i)) });
      button.append(sampleOf(line), line.label);
      button.addEventListener("click", () => {
        hidden.get(index)[hidden.get(index).has(i) ? "delete" : "add"](i);
        draw(index);
      });
      list.appendChild(document.createElement("li")).append(button);
    }
    if (focused >= 0) list.children[focused].firstChild.focus();
  };

  const drawAll = () => charts.forEach((_, index) => draw(index));

  const move = (plot, at) => {
    const steps = plot.data[0];
    const index = Math.min(steps.length - 1, Math.max(0, at));
    plot.setCursor({ left: plot.valToPos(steps[index], "x"), top: plot.over.clientHeight / 2 });
  };
  const zoom = (plot, factor) => {
    const { min, max } = plot.scales.x;
    const middle = plot.cursor.idx === null || plot.cursor.idx === undefined ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
    const [first, last] = [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];
    const half = Math.max((last - first) / plot.data[0].length, ((max - min) * factor) / 2);
    plot.setScale("x", { min: Math.max(first, middle - half), max: Math.min(last, middle + half) });
  };

  const save = (name, blob) => {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };
  const inCells = (value) => (value == null ? "" : typeof value === "number" ? String(value) : `"${value.replaceAll('"', '""')}"`);
  const table = (chart) => [["step", ...chart.lines.map((line) => line.label)],
    ...chart.data[0].map((step, at) => [step, ...chart.lines.map((_, i) => chart.data[i + 1][at])])]
    .map((row) => row.map(inCells).join(",")).join("\r\n") + "\r\n";
  const picture = (index) => {
    const { name, title, lines } = charts[index];
    const source = drawn.get(index).ctx.canvas;
    const em = 16 * devicePixelRatio;
    const shown = lines.filter((line, i) => line.kind !== "edge" && !hidden.get(index).has(i));
    const canvas = Object.assign(document.createElement("canvas"), { width: source.width, height: source.height + (2.5 + 1.4 * shown.length) * em });
    const ctx = canvas.getContext("2d");
    const say = (text, y, fill) => { ctx.fillStyle = fill; ctx.fillText(text, em, y, source.width - 2 * em); };
    ctx.fillStyle = colour("--panel");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.font = `${em}px Inter, system-ui, sans-serif`;
    say(`${title} · ${document.title}`, 1.4 * em, colour("--ink"));
    ctx.drawImage(source, 0, 2 * em);
    shown.forEach((line, row) => say(line.label, source.height + (2.9 + 1.4 * row) * em, ofLine(line)));
    canvas.toBlob((blob) => save(`${name}.png`, blob));
  };

  charts.forEach((chart, index) => {
    document.querySelector(`[data-chart="${index}"]`).addEventListener("keydown", (event) => {
      const plot = drawn.get(index);
      const count = plot.data[0].length;
      const at = plot.cursor.idx ?? -1;
      const keys = {
        ArrowRight: () => move(plot, at + 1), ArrowLeft: () => move(plot, at - 1),
        PageUp: () => move(plot, at + Math.ceil(count / 20)), PageDown: () => move(plot, at - Math.ceil(count / 20)),
        Home: () => move(plot, 0), End: () => move(plot, count - 1),
        "+": () => zoom(plot, 0.5), "-": () => zoom(plot, 2),
        0: () => plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][count - 1] }),
      };
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
    const scale = document.querySelector(`[data-scale="${index}"]`);
    // A logarithmic scale shows no values up to 0.
    scale.hidden = chart.unit === "percent" || chart.data.slice(1).flat().some((value) => value !== null && value <= 0);
    scale.addEventListener("click", () => {
      scales.set(index, !scales.get(index));
      scale.ariaPressed = String(scales.get(index));
      draw(index);
    });
    document.querySelector(`[data-csv="${index}"]`).addEventListener("click", () =>
      save(`${chart.name}.csv`, new Blob([table(chart)], { type: "text/csv" })));
    document.querySelector(`[data-png="${index}"]`).addEventListener("click", () => picture(index));
    const whole = document.querySelector(`[data-whole="${index}"]`);
    whole.addEventListener("click", () => (document.fullscreenElement ? document.exitFullscreen() : whole.closest("figure").requestFullscreen()));
  });
  byId("x-axis").addEventListener("change", (event) => { xName = event.target.value; drawAll(); });
  byId("smoothing").addEventListener("input", (event) => {
    smoothing = Number(event.target.value);
    const amount = smoothing ? `over ${Number((100 * parts[smoothing]).toPrecision(2))} % of the curve` : "off";
    byId("smoothed").textContent = amount + (smoothing ? "; pale: unsmoothed" : "");
    event.target.setAttribute("aria-valuetext", amount);
    charts.forEach((chart, index) => { if (chart.lines.some((line) => line.kind === "smooth")) draw(index); });
  });

  drawAll();
  // A page that is served brings new numbers of the same charts while its run goes on; a zoom is kept.
  document.addEventListener("charts", (event) => {
    const fresh = JSON.parse(event.detail);
    const isSame = fresh.charts.length === charts.length && fresh.charts.every((chart, i) =>
      chart.name === charts[i].name && chart.lines.length === charts[i].lines.length);
    if (!isSame) { event.preventDefault(); return; }
    fresh.charts.forEach((chart, index) => {
      const plot = drawn.get(index);
      const all = plot.data[0];
      const { min, max } = plot.scales.x;
      const isZoomed = all.length > 1 && (min > all[0] || max < all[all.length - 1]);
      const had = JSON.stringify(charts[index].data);
      lastStep.clear();
      Object.assign(charts[index], chart);
      fresh.axes.forEach((axis, run) => Object.assign(axes[run], axis));
      if (JSON.stringify(chart.data) === had) return;
      draw(index);
      if (isZoomed) drawn.get(index).setScale("x", { min, max });
    });
  }, { signal });
  document.fonts.addEventListener("loadingdone", drawAll, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll, { signal });
  // A chart in a part of the page that was hidden had no width to be drawn in.
  document.querySelectorAll(".more-charts").forEach((part) => part.addEventListener("toggle", () => document.dispatchEvent(new CustomEvent("shown")), { signal }));
  document.addEventListener("shown", () => drawn.forEach((plot, index) => {
    const { clientWidth } = document.querySelector(`[data-chart="${index}"]`);
    if (clientWidth && clientWidth !== plot.width) draw(index);
  }), { signal });
  const paper = (on) => {
    if (onPaper === on) return;
    onPaper = on;
    document.documentElement.classList.toggle("on-paper", on);
    drawAll();
  };
  addEventListener("beforeprint", () => paper(true), { signal });
  addEventListener("afterprint", () => paper(false), { signal });
  addEventListener("resize", () => { if (!onPaper) document.dispatchEvent(new CustomEvent("shown")); }, { signal });
  // The window may have been as large before.
  document.addEventListener("fullscreenchange", drawAll, { signal });
};
if (document.getElementById("chart-data")) window.drawCharts();
