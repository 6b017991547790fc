// Elements and number formats. Text from runs is only inserted as text nodes.
"use strict";

const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
const DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
const COLORS = ["#2f6db3", "#d9822b", "#2e9268", "#b3477d", "#7457b0", "#7a838f", "#b29500", "#2b9db0",
  "#9a5b3f", "#5b6770", "#d1495b", "#4d7c0f", "#17365d", "#d67ab1"];

/** Create an element: properties by name (`on` maps listeners, `style` styles), then children. */
function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "class") element.className = value;
    else if (name.startsWith("aria-")) element.setAttribute(name, String(value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** Format a number with a few digits. */
function show(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return value.toExponential(digits - 1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

const signed = (value, digits = 3) => (value > 0 ? "+" : "") + show(value, digits).replaceAll("-", "−");
const percent = (value) => (value == null ? "–" : value.toFixed(1));
const count = (value) => (value < 100 ? show(value) : Math.round(value).toLocaleString("en-US"));

function duration(hours) {
  if (hours < 2 / 60) return `${show(3600 * hours)} s`;
  return hours < 2 ? `${show(60 * hours)} min` : `${show(hours)} h`;
}

const UNITS = {
  batches: { title: "rollout batches", format: count },
  hours: { title: "hours", format: duration },
  tokens: { title: "generated tokens", format: (n) => (n < 1e6 ? count(n) : `${show(n / 1e6)} M`) },
  updates: { title: "optimizer updates", format: count },
  simulated: { title: "simulated time (epochs)", format: count },
};

const finite = (values) => values.filter((value) => value != null && Number.isFinite(value));
// Not Math.max(...values): a long response has more values than a call allows arguments.
const largest = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** State that all figures depend on, and listeners to its changes. `kept`: the selected groups. */
const STATE = { kept: DATA.first, hidden: new Set(), axis: "batches", listeners: [] };
const changed = () => STATE.listeners.forEach((listener) => listener());

/** The selected groups with their colors; a subset has labels with only the parts that differ. */
function keptGroups() {
  const kept = STATE.kept.map((index, place) => ({ ...DATA.groups[index], index,
    color: COLORS[place % COLORS.length], dash: place < COLORS.length ? undefined : [7, 3] }));
  if (kept.length < DATA.groups.length) {
    const apart = DATA.naming.map((_, key) => new Set(kept.map((group) => group.named[key][0])).size > 1);
    const used = apart.includes(true) ? apart : apart.map((_, key) => key === 0);
    for (const group of kept) group.label = group.named.filter((_, key) => used[key]).map(([, part]) => part).join(" · ");
  }
  return kept;
}
const shownGroups = () => keptGroups().filter((group) => !STATE.hidden.has(group.index));

/** A part of the page that is redrawn whenever the state changes. */
function live(draw) {
  const host = h("div");
  const redraw = () => host.replaceChildren(...[draw()].flat(Infinity).filter(Boolean));
  STATE.listeners.push(redraw);
  redraw();
  return host;
}

/** A row of buttons, one of them selected. */
function choice(label, options, current, act) {
  const buttons = options.map(([value, text]) => h("button", {
    type: "button", "aria-pressed": value === current, on: {
      click: () => {
        buttons.forEach((button, i) => button.setAttribute("aria-pressed", options[i][0] === value));
        act(value);
      },
    },
  }, text));
  return h("div", { class: "choice", role: "group", "aria-label": label },
    h("span", { class: "label" }, label), h("span", { class: "buttons" }, buttons));
}

/** A slider with its value; `ends` also shows the minimum and the maximum. */
function slider(label, { min, max, value, step = 1, text = String, id, ends = false }, act) {
  const output = h("output", {}, text(value));
  const input = h("input", {
    type: "range", min, max, step, value, id, "aria-label": label, on: {
      input: () => { output.textContent = text(Number(input.value)); act(Number(input.value)); },
    },
  });
  const end = (at) => ends && h("small", { class: "label" }, text(at));
  return h("label", { class: "slider" }, h("span", { class: "label" }, label), end(min), input, end(max), output);
}

function section(id, title, explanation, ...children) {
  return h("section", { id }, h("h2", {}, title), explanation && h("p", { class: "explanation" }, explained(explanation)),
    ...children);
}
