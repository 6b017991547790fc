// Responses of some steps with their rewards.
"use strict";

const ORDERS = { best: ["highest reward", (a, b) => b.reward - a.reward], worst: ["lowest reward", (a, b) => a.reward - b.reward],
  longest: ["most tokens", (a, b) => b.tokens - a.tokens] };

function responseOf(row) {
  const part = (name, text) => text != null && h("p", { class: "text" }, h("b", {}, `${name} `), h("span", { class: "quote" }, visible(text)));
  return h("details", {}, h("summary", {}, h("b", {}, show(row.reward)), ` · ${row.tokens} tokens${row.finish === "length" ? " (cut)" : ""} · `,
    h("span", { class: "quote" }, visible(row.response).replace(/\s+/g, " ").slice(0, 100))),
  h("p", { class: "label" }, `prompt ${row.place[0]}, response ${row.place[1]}: ${visible(row.reason ?? "")}`),
  part("Prompt", row.prompt), part("Response", row.response), part("Extracted", row.extracted), part("Truth", row.truth));
}

function recordedResponses() {
  if (!DATA.responses.length) return h("p", { class: "nothing" }, "No responses were recorded, or --megabytes leaves no room for them.");
  const view = { run: 0, step: Infinity, order: "best" }, controls = h("div", { class: "controls" }), list = h("div", { class: "responses" });
  const note = h("p", { class: "nothing" });
  const drawList = () => {
    const { steps } = DATA.responses[view.run], { rows } = steps[Math.min(view.step, steps.length - 1)];
    list.replaceChildren(...[...rows].sort(ORDERS[view.order][1]).map(responseOf));
  };
  const draw = () => {
    const { steps, recorded } = DATA.responses[view.run], last = steps.length - 1;
    controls.replaceChildren(...[
      DATA.responses.length > 1 && h("label", { class: "select" }, h("span", { class: "label" }, "run"),
        h("select", { "aria-label": "run", on: { change: (event) => { view.run = event.target.selectedIndex; draw(); } } },
          DATA.responses.map(({ run }, place) => h("option", { selected: place === view.run }, DATA.runs[run].name)))),
      last > 0 && slider("step", { id: "responses-step", min: 0, max: last, value: Math.min(view.step, last), text: (at) => String(steps[at].step) }, (at) => { view.step = at; drawList(); }),
      choice("order", Object.entries(ORDERS).map(([name, [title]]) => [name, title]), view.order, (name) => { view.order = name; drawList(); }),
    ].filter(Boolean));
    note.textContent = `${steps.length} of ${recorded} recorded steps${last ? "" : ` (step ${steps[0].step})`}, with a few responses each. All: megatron-rl rollouts.`;
    drawList();
  };
  draw();
  return [controls, note, list];
}
