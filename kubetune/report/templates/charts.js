"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("chart-data").textContent);
  const drawn = new Map();
  const isLogarithmic = new Set();
  let onPaper = false;
  const paperWidth = 330;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const inUnits = (value) => {
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit += 1; }
    return `${Number(value.toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
  };
  const write = {
    fixed: (v) => String(Number(v.toPrecision(4))),
    exponent: (v) => (v === 0 ? "0" : Number(v.toPrecision(3)).toExponential()),
    short: (v) => Math.round(v).toLocaleString("en"),
    bytes: inUnits,
    percent: (v) => `${Number((100 * v).toPrecision(3))} %`,
  };
  const onAxis = {
    ...write,
    short: (v) => (Math.abs(v) >= 10000 ? `${Number((v / 1000).toPrecision(4))}k` : v.toLocaleString("en")),
    fixed: (v) => String(Number(v.toPrecision(6))),
  };

  const mostPoints = 40;
  const series = (line, column) => {
    const stroke = colour(`--c${line.colour % 6}`);
    switch (line.kind) {
      case "faint": return { label: line.label, stroke: `${stroke}66`, width: 1, points: { show: false } };
      case "edge": return { label: line.label, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      case "points": return { label: line.label, stroke, width: 2, dash: [6, 3], spanGaps: true,
        points: { show: column.filter((v) => v !== null).length <= mostPoints, size: 7, fill: stroke, stroke } };
      case "rule": return { label: line.label, stroke, width: 1.5, dash: [4, 4], spanGaps: true, points: { show: false } };
      default: return { label: line.label, stroke, width: 2, spanGaps: true, points: { show: false } };
    }
  };

  const marks = (chart) => (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const mark of chart.markers) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(mark.error ? "--bad" : "--mark");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const say = (index) => (plot) => {
    const chart = charts[index];
    const out = document.querySelector(`[data-readout="${index}"]`);
    const at = plot.cursor.idx;
    if (at === null || at === undefined) { out.textContent = ""; return; }
    const value = (i) => chart.data[i + 1][at];
    const parts = chart.lines.map((line, i) => {
      if (line.kind === "rule" || line.kind === "edge" || value(i) === null) return null;
      const band = chart.bands.find(([high]) => high === i + 2);
      const range = band ? ` (${write[chart.unit](value(band[1] - 1))} to ${write[chart.unit](value(band[0] - 1))})` : "";
      return `${line.label} ${write[chart.unit](value(i))}${range}`;
    });
    const step = chart.data[0][at];
    const near = chart.markers.filter((mark) => mark.step === step).map((mark) => mark.text);
    out.textContent = [`step ${step.toLocaleString("en")}`, ...parts.filter(Boolean), ...near].join(" · ");
  };

  const draw = (index) => {
    const chart = charts[index];
    const place = document.querySelector(`[data-chart="${index}"]`);
    drawn.get(index)?.destroy();
    place.textContent = "";
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 },
      ticks: { stroke: colour("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const plot = new uPlot({
      width: onPaper ? paperWidth : Math.max(240, place.clientWidth),
      height: onPaper ? 190 : 260,
      series: [{ label: "step" }, ...chart.lines.map((line, i) => series(line, chart.data[i + 1]))],
      bands: chart.bands.map((pair) => ({ series: pair, fill: `${colour(`--c${chart.lines[pair[0] - 1].colour % 6}`)}4d` })),
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: isLogarithmic.has(index) ? { distr: 3 }
          : { range: (u, low, high) => uPlot.rangeNum(low, high, 0.06, true) },
      },
      axes: [
        { ...axis, space: 60, values: (u, at) => at.map((v) => (Number.isInteger(v) ? v.toLocaleString("en") : "")) },
        { ...axis, size: chart.unit === "bytes" ? 78 : 66, values: (u, at) => at.map((v) => (v === null ? "" : onAxis[chart.unit](v))) },
      ],
      cursor: { sync: { key: "steps" }, points: { size: 8 }, focus: { prox: -1 } },
      legend: { live: false, show: chart.lines.filter((line) => line.kind !== "edge").length > 1 },
      hooks: { draw: [marks(chart)], setCursor: [say(index)] },
    }, chart.data, place);
    place.querySelectorAll(".u-legend .u-series").forEach((row, i) => {
      if (chart.lines[i].kind === "edge") row.style.display = "none";
    });
    drawn.set(index, plot);
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
    const half = Math.max(1, ((max - min) * factor) / 2);
    const [first, last] = [plot.data[0][0], plot.data[0][plot.data[0].length - 1]];
    plot.setScale("x", { min: Math.max(first, middle - half), max: Math.min(last, middle + half) });
  };

  charts.forEach((_, index) => {
    document.querySelector(`[data-chart="${index}"]`).addEventListener("keydown", (event) => {
      const plot = drawn.get(index);
      const count = plot.data[0].length;
      const at = plot.cursor.idx ?? -1;
      const stride = event.shiftKey ? Math.max(1, Math.round(count / 20)) : 1;
      const keys = {
        ArrowRight: () => move(plot, at + stride), ArrowLeft: () => move(plot, at - stride),
        Home: () => move(plot, 0), End: () => move(plot, count - 1),
        "+": () => zoom(plot, 0.5), "-": () => zoom(plot, 2),
        0: () => plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][count - 1] }),
      };
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
  });
  document.querySelectorAll("[data-logarithm]").forEach((box) => box.addEventListener("change", () => {
    const index = Number(box.dataset.logarithm);
    isLogarithmic[box.checked ? "add" : "delete"](index);
    draw(index);
  }));

  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const paper = (on) => {
    if (onPaper === on) return;
    onPaper = on;
    document.documentElement.classList.toggle("on-paper", on);
    drawAll();
  };
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
  matchMedia("print").addEventListener("change", (query) => paper(query.matches));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width && !onPaper) { width = innerWidth; drawAll(); }
  });
})();
