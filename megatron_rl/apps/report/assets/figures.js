// Figures of runs and groups: tables, curves, positions, seconds, settings.
"use strict";

const setName = (key) => key.replace(/^eval\//, "");
const chip = (group) => h("span", { class: "name" }, h("i", { style: { background: group.color } }), group.label);

function scoreTable() {
  if (!DATA.scores.length) return h("p", { class: "nothing" }, "No held-out set was evaluated.");
  const several = DATA.scores.length > 1;
  const columns = ["Before", ...DATA.scores, ...(several ? ["Avg."] : []), "Last"];
  const titles = [several ? "Avg. before training" : "Before training", ...DATA.scores.map((key) => `Best ${setName(key)}`), ...(several ? ["Avg. of best"] : []), several ? "Avg. of last" : "Last"];
  return live(() => {
    const groups = shownGroups();
    const top = columns.map((key) => Math.max(...finite(groups.map((group) => group.best[key]?.mean))));
    return tableOf("", ["Runs", "Seeds", ...titles], groups.map((group) => h("tr", {}, h("th", {}, chip(group)), h("td", {}, group.runs.length),
        columns.map((key, column) => {
          const score = group.best[key], before = group.best[`before ${key}`];
          if (!score) return h("td", {}, "–");
          const best = groups.length > 1 && key !== "Before" && score.mean >= top[column] - 1e-9;
          return h("td", { class: best ? "best" : "" }, `${percent(score.mean)}%`,
            group.runs.length > 1 && h("small", {}, ` ${percent(score.low)}–${percent(score.high)}`),
            several && before && h("small", {}, h("br"), `${percent(before.mean)}% before`),
            score.truncated != null && h("small", {}, h("br"), `${score.truncated.toFixed(1)}% truncated`),
            score.ungraded > 0 && h("small", { class: "wrong" }, h("br"), `${score.ungraded.toFixed(1)}% not graded`));
        }))));
  });
}

function learningCurves() {
  const grid = (charts, kind = "") => h("div", { class: `grid ${kind}` }, charts.filter(Boolean));
  const chart = (title, read, options = {}) => {
    const lines = shownGroups().map((group) => overRuns(group, read, options)).filter(Boolean);
    return lines.length ? lineChart({ title, lines, xLabel: UNITS[STATE.axis].title, xFormat: UNITS[STATE.axis].format, whole: STATE.axis !== "hours",
      format: options.format, leastSpan: title.endsWith("(fraction)") ? FRACTION_SPAN : 0 }) : null;
  };
  const hundred = (key) => (run) => run.scores[key].map((value) => (value == null ? null : 100 * value));
  const macro = (run) => run.spent.batches.map((_, place) => {
    const values = DATA.scores.map((key) => run.scores[key][place]);
    return values.every((value) => value != null) ? 100 * mean(values) : null;
  });
  return [
    live(() => grid([
      DATA.scores.length > 1 ? chart("Macro average of the held-out scores (%)", macro, { points: true }) : null,
      ...DATA.scores.map((key) => chart(`${setName(key)} (%)`, hundred(key), { points: true })),
      chart("Mean rollout reward, raw and smoothed over 11 steps", (run) => run.smooth, { faint: (run) => run.reward }),
    ], DATA.scores.length < 2 ? "two" : "")),
    h("details", { open: DATA.groups.length < 9 }, h("summary", {}, "Training metrics"),
      live(() => grid(Object.entries(DATA.curves).map(([key, title]) => chart(title, (run) => run.curves[key]))))),
  ];
}

/** The cost when a run's smoothed reward first reached the threshold; null if never. */
function firstPassage(run, threshold) {
  const place = run.smooth.findIndex((value) => value != null && value >= threshold);
  if (place < 0) return null;
  return Object.fromEntries(Object.keys(UNITS).map((name) => [name, run.spent[name][place]]));
}

function timeToReward() {
  const tops = DATA.runs.map((run) => Math.max(...finite(run.smooth)));
  const lows = DATA.runs.map((run) => Math.min(...finite(run.smooth)));
  const lowest = Math.min(...lows), highest = Math.max(...tops);
  if (!Number.isFinite(highest)) return h("p", { class: "nothing" }, "No rollout batch is recorded yet.");
  // Steps of 0.01, or smaller so that there are at least twenty.
  const decimals = Math.min(12, Math.max(2, Math.ceil(-Math.log10((highest - lowest) / 20 || 1)))), step = 10 ** -decimals;
  const rounded = (value) => Number((Math.floor(value / step + 1e-9) * step).toFixed(decimals));
  const low = rounded(lowest), high = rounded(highest);
  let threshold = DATA.threshold ?? rounded(Math.min(...tops));
  const host = h("div");
  const draw = () => {
    const groups = shownGroups().map((group) => {
      const passages = group.runs.map((index) => (threshold === DATA.threshold
        ? DATA.runs[index].passage : firstPassage(DATA.runs[index], threshold)));
      return { group, reached: passages.filter(Boolean) };
    });
    const units = Object.keys(UNITS);
    const most = units.map((unit) => Math.max(...groups.flatMap(({ reached }) => reached.map((p) => p[unit])), 1e-12));
    host.replaceChildren(tableOf("bars", ["Runs", "Reached", ...units.map((unit) => (unit === "hours" ? "wall time" : UNITS[unit].title))], groups.map(({ group, reached }) => h("tr", {}, h("th", {}, chip(group)),
        h("td", {}, `${reached.length} of ${group.runs.length}`),
        units.map((unit, column) => {
          if (!reached.length) return h("td", {}, "never");
          const values = reached.map((passage) => passage[unit]), format = UNITS[unit].format;
          return h("td", {}, h("div", { class: "bar", style: { width: `${96 * mean(values) / most[column]}%`, background: faded(group.color, 0.22) } }),
            h("span", {}, format(mean(values)), Math.min(...values) < Math.max(...values) && h("small", {}, ` ${format(Math.min(...values))}–${format(Math.max(...values))}`)));
        })))));
  };
  STATE.listeners.push(draw);
  draw();
  return [slider("mean reward", { id: "threshold", min: low, max: high, step, value: threshold, ends: true, text: (value) => value.toFixed(decimals) },
    (value) => { threshold = value; draw(); }), host];
}

const SCALES = { local: ["Local", "ℓₜ, one token"], cumulative: ["Cumulative", "Sₜ = ℓ₁ + … + ℓₜ"], sequence: ["Sequence", "log s, the mean of ℓ over the whole response"], prefix: ["Prefix", "log wₜ = Sₜ / t"] };

/** The last epoch of the groups shown. */
const lastEpoch = (part, otherwise) => Math.max(...shownGroups().map((group) => group[part]?.epochs ?? 0)) || otherwise;

function logRatios() {
  const has = DATA.groups.filter((group) => group.ratios);
  if (!has.length) return h("p", { class: "nothing" }, "No response was traced (logging.traced_responses).");
  const epochs = Math.max(...has.map((group) => group.ratios.epochs));
  let epoch = lastEpoch("ratios", epochs) - 1, same = false;
  const host = h("div", { class: "grid four" });
  const draw = () => {
    const groups = shownGroups().filter((group) => group.ratios && group.ratios.epochs > epoch);
    if (!groups.length) return host.replaceChildren(h("p", { class: "nothing" }, `None of these has an epoch ${epoch + 1}.`));
    const all = groups.flatMap((group) => Object.values(group.ratios.scales).flatMap((scale) => [...scale.q05[epoch], ...scale.q95[epoch]]));
    const reach = Math.max(...all.map(Math.abs), 1e-9);
    host.replaceChildren(...Object.entries(SCALES).map(([name, [title, formula]]) => lineChart({
      title: [h("b", {}, title), ` · ${formula}`], xLabel: "position t", whole: true, height: 230,
      yRange: same ? [-1.05 * reach, 1.05 * reach] : undefined, format: (value) => show(value, 2),
      marks: [{ y: 0, color: "#aab2bd" }],
      lines: groups.flatMap((group) => {
        const { positions, scales } = group.ratios, color = group.color, scale = scales[name];
        return [
          { label: group.label, color, x: positions, y: scale.median[epoch], low: scale.q05[epoch], high: scale.q95[epoch] },
          ...[1, -1].map((sign) => ({ label: sign > 0 ? "± std" : "", color, dash: [3, 3], width: 1, x: positions, y: scale.std[epoch].map((v) => sign * v) })),
        ];
      }),
    })));
  };
  STATE.listeners.push(draw);
  draw();
  return [h("div", { class: "controls" },
    slider("epoch of reuse", { id: "ratio-epoch", min: 1, max: epochs, value: epoch + 1 }, (value) => { epoch = value - 1; draw(); }),
    choice("scale", [[false, "per panel"], [true, "shared"]], same, (value) => { same = value; draw(); })), host];
}

const GATE = { acceptance: "accepted", prefix_mean_log_std: "std of log w", prefix_mean_log_median: "median of log w", prefix_mean_log_q05: "5% quantile", prefix_mean_log_q95: "95% quantile" };

function gateByPosition() {
  const has = DATA.groups.filter((group) => group.gate);
  if (!has.length) return h("p", { class: "nothing" }, "These runs have no metrics by position.");
  const steps = [...new Set(has.flatMap((group) => group.gate.steps))].sort((a, b) => a - b);
  const epochs = Math.max(...has.map((group) => group.gate.epochs));
  let what = "acceptance", step = 0, epoch = lastEpoch("gate", epochs);
  const tables = h("div", { class: "heats" }), fan = h("div", { class: "grid two" });
  const pick = (group) => (step === 0 ? group.gate.all : group.gate.each[group.gate.steps.indexOf(steps[step - 1])]);
  const draw = () => {
    const groups = shownGroups().filter((group) => group.gate && pick(group));
    const reach = Math.max(...finite(groups.flatMap((group) => pick(group)[what].flat())).map(Math.abs), 1e-12);
    tables.replaceChildren(...groups.map((group) => heat(group, pick(group)[what], what, reach)));
    const tenths = [...Array(10).keys()].map((tenth) => (tenth + 0.5) / 10);
    const at = (group, name) => pick(group)[name][epoch - 1];
    const lines = groups.filter((group) => group.gate.epochs >= epoch);
    const fans = lines.filter((group) => finite(at(group, "prefix_mean_log_median")).length);
    const bounded = fans.some((group) => !group.bounds.missing) ? "; dashed: the bounds" : "";
    const without = fans.filter((group) => group.bounds.missing).map((group) => h("p", { class: "nothing" }, `The bounds of ${group.label} are not drawn: ${group.bounds.missing}.`));
    fan.replaceChildren(...[
      fans.length && lineChart({ title: `log wₜ in epoch ${epoch}: median, band from the 5% to the 95% quantile${bounded}`, xLabel: "t / L", format: (v) => show(v, 2), xFormat: (x) => show(x, 2),
        marks: [{ y: 0, color: "#aab2bd" }],
        lines: fans.flatMap((group) => [{ label: group.label, color: group.color, x: tenths, y: at(group, "prefix_mean_log_median"),
          low: at(group, "prefix_mean_log_q05"), high: at(group, "prefix_mean_log_q95") }, ...boundLines(group, tenths)]) }),
      lines.length && lineChart({ title: `Accepted tokens in epoch ${epoch} (fraction)`, xLabel: "t / L", format: (v) => show(v, 3), xFormat: (x) => show(x, 2),
        leastSpan: FRACTION_SPAN, lines: lines.map((group) => ({ label: group.label, color: group.color, x: tenths, y: at(group, "acceptance"), points: true })) }), ...without,
    ].filter(Boolean));
  };
  STATE.listeners.push(draw);
  draw();
  return [h("div", { class: "controls" },
    choice("show", Object.entries(GATE), what, (value) => { what = value; draw(); }),
    slider("step", { id: "gate-step", min: 0, max: steps.length, value: 0, text: (at) => (at === 0 ? "mean of all" : String(steps[at - 1])) }, (value) => { step = value; draw(); })),
  tables,
  h("div", { class: "controls" }, slider("epoch of reuse", { id: "gate-epoch", min: 1, max: epochs, value: epoch }, (value) => { epoch = value; draw(); })), fan];
}

/** The bounds of log w, if the constraint has them; null where no weight is too small. */
function boundLines(group, tenths) {
  const bounds = group.bounds;
  return ["low", "high"].filter((side) => bounds[side] != null).map((side) => ({ color: group.color, dash: [6, 4], width: 1.2, x: tenths,
    y: tenths.map((x) => {
      const reach = bounds[side] * (bounds.scale === "constant" ? 1 : Math.sqrt(1 / x)), sign = side === "low" ? -1 : 1;
      if (bounds.space === "log") return sign * reach;
      return sign * reach > -1 ? Math.log1p(sign * reach) : null;
    }) }));
}

const accepted100 = (value) => (value > 99.94 ? "100" : value.toFixed(value >= 99.5 ? 1 : 0));

function heat(group, rows, what, reach) {
  const cell = (value) => {
    if (value == null) return h("td", {}, "–");
    const accepted = what === "acceptance";
    const strength = accepted ? 1 - value : Math.abs(value) / reach;
    const color = accepted || value > 0 ? "#c2410c" : "#1d5fa8";
    return h("td", { style: { background: faded(color, 0.85 * Math.min(1, strength) ** 0.6), color: strength > 0.45 ? "#fff" : "" } },
      accepted ? accepted100(100 * value) : show(value, 2));
  };
  return h("table", { class: "heat" }, h("caption", {}, chip(group)),
    h("thead", {}, h("tr", {}, h("th", {}, "epoch"), [...Array(10).keys()].map((tenth) => h("th", {}, tenth === 9 ? "t/L = 1" : `.${tenth + 1}`)))),
    h("tbody", {}, rows.map((row, epoch) => h("tr", {}, h("th", {}, epoch + 1), row.map(cell)))));
}

const PHASE_COLORS = ["#2f6db3", "#7fb069", "#e3c567", "#b0a8d8", "#8c6d5a", "#d9822b", "#c8553d", "#8a8f98", "#5b6770", "#c9ccd1"];

function timeByPhase() {
  return live(() => {
    const rows = shownGroups().map((group) => {
      const runs = group.runs.map((index) => DATA.runs[index]), steps = runs.reduce((sum, run) => sum + run.steps, 0);
      return { group, parts: DATA.phases.map((phase) => runs.reduce((sum, run) => sum + run.seconds[phase], 0) / Math.max(steps, 1)) };
    });
    const total = (row) => row.parts.reduce((sum, value) => sum + value, 0);
    const most = Math.max(...rows.map(total), 1e-12);
    const used = DATA.phases.map((_, place) => rows.some((row) => row.parts[place] > 0.001 * most));
    return [
      h("div", { class: "stacks" }, rows.map((row) => h("div", { class: "stack" }, h("div", { class: "who" }, chip(row.group)),
        h("div", { class: "track" }, row.parts.map((value, place) => value > 0 && h("div", { class: "part", title: `${DATA.phases[place]}: ${show(value)} s per step, ${percent(100 * value / total(row))}%`,
          style: { width: `${100 * value / most}%`, background: PHASE_COLORS[place], color: [2, 3, 9].includes(place) ? "#16202c" : "" } },
        h("span", {}, `${DATA.phases[place]} ${show(value, 2)}`)))),
        h("div", { class: "sum" }, `${show(total(row))} s`)))),
      h("details", {}, h("summary", {}, "Seconds of every phase"),
        tableOf("", ["Runs", ...DATA.phases.filter((_, place) => used[place]), "sum"], rows.map((row) => h("tr", {}, h("th", {}, chip(row.group)),
          row.parts.filter((_, place) => used[place]).map((value) => h("td", {}, show(value))), h("td", {}, show(total(row))))))),
      h("div", { class: "legend" }, DATA.phases.map((phase, place) => used[place] && h("span", {}, h("i", { style: { background: PHASE_COLORS[place] } }), phase))),
    ];
  });
}

/** The intervals of some steps, clipped: of each group's first run that has a timeline with `step`. */
function timelineRows(step, steps) {
  return shownGroups().flatMap((group) => {
    const line = group.runs.map((index) => DATA.runs[index].timeline).find((one) => one?.steps.includes(step));
    if (!line) return [];
    const last = line.steps.indexOf(step) + 1, ends = line.ends.slice(Math.max(0, last - steps), last + 1);
    const begin = ends[0], end = ends.at(-1);
    return Object.entries(line.ranks).map(([ranks, intervals]) => ({ group, ranks, length: end - begin,
      edges: ends.slice(1, -1).map((edge) => edge - begin),
      parts: intervals.map(([phase, start, seconds]) => ({ phase, start: Math.max(start, begin) - begin, end: Math.min(start + seconds, end) - begin }))
        .filter((part) => part.end - part.start > 1e-4 * (end - begin)) })); // not what rounding leaves of a neighbor
  });
}

function timeline() {
  const numbers = [...new Set(DATA.runs.flatMap((run) => run.timeline?.steps ?? []))].sort((a, b) => a - b);
  if (!numbers.length) return h("p", { class: "nothing" }, "These runs have no timeline.jsonl.");
  let place = numbers.length - 1, steps = 3;
  const host = h("div");
  const draw = () => {
    const rows = timelineRows(numbers[place], steps);
    if (!rows.length) return host.replaceChildren(h("p", { class: "nothing" }, `None of these has a timeline of step ${numbers[place]}.`));
    const most = Math.max(...rows.map((row) => row.length));
    const used = [...DATA.phases.keys()].filter((phase) => rows.some((row) => row.parts.some((part) => part.phase === phase)));
    const of = (row, phase) => row.parts.reduce((sum, part) => sum + (part.phase === phase ? part.end - part.start : 0), 0);
    const busy = (row) => Math.min(1, used.reduce((sum, phase) => sum + of(row, phase), 0) / row.length);
    const text = (row) => [...used.filter((phase) => of(row, phase) > 0).map((phase) => `${DATA.phases[phase]} ${show(of(row, phase))} s`), `waits ${show((1 - busy(row)) * row.length)} s`].join(", ");
    host.replaceChildren(
      h("div", {}, rows.map((row) => h("div", { class: "stack" }, h("div", { class: "who" }, chip(row.group), ` ${row.ranks}`),
        h("div", {}, h("div", { class: "lane", role: "img", "aria-label": `${row.ranks}: ${text(row)}`, style: { width: `${100 * row.length / most}%` } },
          row.parts.map((part) => h("i", { title: `${DATA.phases[part.phase]}: from ${show(part.start)} s, ${show(part.end - part.start)} s`,
            style: { left: `${100 * part.start / row.length}%`, width: `${100 * (part.end - part.start) / row.length}%`, background: PHASE_COLORS[part.phase] } })),
          row.edges.map((edge) => h("b", { style: { left: `${100 * edge / row.length}%` } })))),
        h("div", { class: "sum" }, `${Math.round(100 * busy(row))}% busy`)))),
      h("details", {}, h("summary", {}, "The same as a table"),
        tableOf("", ["Runs", "Ranks", "Phase", "Start (s)", "Seconds"], rows.flatMap((row) => row.parts.map((part) => h("tr", {}, h("th", {}, chip(row.group)),
          h("td", {}, row.ranks), h("td", {}, DATA.phases[part.phase]), h("td", {}, show(part.start)), h("td", {}, show(part.end - part.start))))))),
      h("div", { class: "legend" }, used.map((phase) => h("span", {}, h("i", { style: { background: PHASE_COLORS[phase] } }), DATA.phases[phase])),
        h("span", {}, h("i", { class: "waits" }), "waits")));
  };
  STATE.listeners.push(draw);
  draw();
  return [h("div", { class: "controls" },
    slider("up to step", { id: "timeline-step", min: 0, max: numbers.length - 1, value: place, text: (at) => String(numbers[at]) }, (value) => { place = value; draw(); }),
    choice("show", [[1, "1 step"], [3, "3 steps"], [numbers.length, "all"]], steps, (value) => { steps = value; draw(); })), host];
}

function settingsTable() {
  const value = (key, run) => DATA.settings[key].values[DATA.settings[key].of[run] ?? 0] ?? "–";
  const table = (corner, heads, keys, cells) => h("div", { class: "scroll" }, h("table", { class: "numbers left settings" },
    h("thead", {}, h("tr", {}, h("th", {}, corner), heads.map((head) => h("th", {}, head)))),
    h("tbody", {}, keys.map((key) => h("tr", {}, h("th", {}, h("code", {}, key)), cells(key).map((cell) => h("td", {}, cell)))))));
  const folded = (title, draw) => h("details", {}, h("summary", {}, title), draw());
  const keys = Object.keys(DATA.settings), of = (key) => DATA.settings[key].of.length;
  const common = keys.filter((key) => !of(key)), apart = keys.filter(of);
  return [
    live(() => {
      const groups = shownGroups();
      const differ = DATA.differs.filter((key) => new Set(groups.map((group) => value(key, group.runs[0]))).size > 1);
      return differ.length ? table("Differences", groups.map(chip), differ, (key) => groups.map((group) => value(key, group.runs[0]))) : null;
    }),
    folded(several ? "Common to all runs" : "All settings", () => table("Setting", ["Value"], common, (key) => [value(key, 0)])),
    apart.length ? folded("Differences between the runs shown, including seeds and folders", () => live(() => {
      const runs = shownGroups().flatMap((group) => group.runs);
      return table("Setting", runs.map((run) => DATA.runs[run].name), apart, (key) => runs.map((run) => value(key, run)));
    })) : null,
  ];
}
