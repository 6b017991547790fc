// Line charts with bands, drawn with uPlot.
"use strict";

const AXIS = { stroke: "#5f6b7a", font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif",
  grid: { stroke: "#edf0f3", width: 1 }, ticks: { stroke: "#dfe3e8", width: 1, size: 4 } };

const WHOLE = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

const FRACTION_SPAN = 0.2;

const faded = (color, alpha) => color + Math.round(255 * alpha).toString(16).padStart(2, "0");

/**
 * lines: {label, color, x, y, low?, high?, faint?, dash?, width?}; low and high form a band, faint is
 * drawn in a pale color behind. onHover is called with the x under the cursor, or null. leastSpan:
 * minimum range of the axis for fractions, so that noise does not look like structure.
 */
function lineChart({ title, lines, xLabel, height = 210, format = show, yRange, leastSpan = 0, onHover, xFormat = show, marks, whole }) {
  const host = h("figure", { class: "chart" }, h("figcaption", {}, explained(title)));
  const plot = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", hidden: true });
  host.append(plot, tip);
  const columns = [], series = [{}], bands = [], keys = [];
  const tables = lines.map((line) => {
    const table = [line.x, line.y];
    keys.push({ line, place: columns.length + 1 });
    columns.push("y");
    series.push({ stroke: line.color, width: line.width ?? 1.8, dash: line.dash, spanGaps: true,
      points: { show: line.points ?? false, size: 5, fill: line.color, stroke: line.color } });
    if (line.high) {
      table.push(line.high, line.low);
      bands.push({ series: [columns.length + 1, columns.length + 2], fill: faded(line.color, 0.15) });
      columns.push("high", "low");
      series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } })));
    }
    if (line.faint) {
      table.push(line.faint);
      columns.push("faint");
      series.push({ stroke: faded(line.color, 0.28), width: 1.2, spanGaps: true, points: { show: false } });
    }
    return table;
  });
  const data = uPlot.join(tables);
  const hover = (u) => {
    const at = u.cursor.idx;
    if (onHover) onHover(at == null || u.cursor.left < 0 ? null : data[0][at]);
    if (at == null || u.cursor.left < 0) { tip.hidden = true; return; }
    const rows = keys.filter(({ line }) => line.label).map(({ line, place }) => {
      const near = nearest(data[place], at);
      return near == null ? null : h("div", {}, h("i", { style: { background: line.color } }),
        `${line.label} `, h("b", {}, format(data[place][near])),
        near !== at ? ` at ${xFormat(data[0][near])}` : "");
    });
    tip.replaceChildren(h("div", { class: "at" }, `${xLabel} ${xFormat(data[0][at])}`), ...rows.filter(Boolean));
    tip.hidden = false;
    const right = u.cursor.left > u.over.clientWidth / 2;
    tip.style.left = right ? "auto" : `${u.over.offsetLeft + u.cursor.left + 14}px`;
    tip.style.right = right ? `${plot.clientWidth - u.over.offsetLeft - u.cursor.left + 14}px` : "auto";
  };
  const options = {
    width: 300, height, series, bands, legend: { show: false }, cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: { x: { time: false }, y: yRange ? { range: yRange } : { range: (u, low, high) => padded(low, high, leastSpan) } },
    axes: [
      { ...AXIS, label: xLabel, labelSize: 18, size: 28, incrs: whole ? WHOLE : undefined, values: (u, ticks) => ticks.map((t) => xFormat(t)) },
      { ...AXIS, size: (u, texts) => 16 + 6.4 * Math.max(4, ...(texts ?? []).map((text) => text.length)), values: (u, ticks) => ticks.map((t) => format(t)) },
    ],
    hooks: { setCursor: [hover], draw: marks ? [(u) => drawMarks(u, marks)] : [] },
  };
  const chart = new uPlot(options, data, plot);
  host.uplot = chart;
  new ResizeObserver(() => {
    if (plot.clientWidth && plot.clientWidth !== chart.width) chart.setSize({ width: plot.clientWidth, height });
  }).observe(plot);
  return host;
}

function padded(low, high, leastSpan) {
  if (low == null) return [0, 1];
  if (leastSpan && high - low < leastSpan && low >= 0 && high <= 1) {
    const start = Math.max(0, Math.min(1 - leastSpan, (low + high - leastSpan) / 2)), margin = 0.04 * leastSpan;
    return [start > 0 ? start : -margin, start + leastSpan + margin];
  }
  const room = 0.08 * (high - low) || 0.08 * Math.abs(high) || 1;
  return [low >= 0 && low < room ? 0 : low - room, high + room];
}

function nearest(column, at) {
  for (let distance = 0; distance < column.length; distance += 1) {
    for (const place of [at - distance, at + distance]) if (column[place] != null) return place;
  }
  return null;
}

/** Horizontal lines: {y, color}. */
function drawMarks(u, marks) {
  const context = u.ctx;
  context.save();
  context.setLineDash([4, 4]);
  context.lineWidth = 1;
  for (const { y, color } of marks) {
    const at = Math.round(u.valToPos(y, "y", true)) + 0.5;
    if (at < u.bbox.top || at > u.bbox.top + u.bbox.height) continue;
    context.strokeStyle = color;
    context.beginPath();
    context.moveTo(u.bbox.left, at);
    context.lineTo(u.bbox.left + u.bbox.width, at);
    context.stroke();
  }
  context.restore();
}

/** One line per group: the mean over its runs, with a band from minimum to maximum. */
function overRuns(group, read, { points = false, faint } = {}) {
  const table = new Map();
  for (const index of group.runs) {
    const run = DATA.runs[index], values = read(run), pale = faint ? faint(run) : null;
    run.spent.batches.forEach((batch, place) => {
      if (values[place] == null) return;
      if (!table.has(batch)) table.set(batch, { x: [], y: [], pale: [] });
      const row = table.get(batch);
      row.x.push(run.spent[STATE.axis][place]);
      row.y.push(values[place]);
      if (pale && pale[place] != null) row.pale.push(pale[place]);
    });
  }
  const rows = [...table].sort((a, b) => a[0] - b[0]).map((entry) => entry[1]);
  if (!rows.length) return null;
  const line = { label: group.label, color: group.color, points, dash: group.dash,
    x: rows.map((row) => mean(row.x)), y: rows.map((row) => mean(row.y)) };
  if (group.runs.length > 1) {
    line.low = rows.map((row) => Math.min(...row.y));
    line.high = rows.map((row) => Math.max(...row.y));
  }
  if (faint) line.faint = rows.map((row) => (row.pale.length ? mean(row.pale) : null));
  return line;
}
