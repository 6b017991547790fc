// The page, from top to bottom.
"use strict";

function header() {
  const seeds = new Set(DATA.runs.map((run) => run.seed));
  const what = `${DATA.runs.length} run${DATA.runs.length > 1 ? "s" : ""}, ${DATA.groups.length} setting${DATA.groups.length > 1 ? "s" : ""}, ${seeds.size} seed${seeds.size > 1 ? "s" : ""}`;
  const chips = DATA.groups.map((group, index) => h("button", { type: "button", class: "chip", "aria-pressed": true, title: `click: show or hide; double click: alone. ${group.runs.map((run) => DATA.runs[run].name).join(", ")}`, on: {
    click: (event) => {
      if (STATE.hidden.has(index)) STATE.hidden.delete(index); else STATE.hidden.add(index);
      if (STATE.hidden.size === DATA.groups.length) STATE.hidden.clear(); // nothing to see is no answer
      press();
    },
    dblclick: () => {
      DATA.groups.forEach((_, place) => (place === index ? STATE.hidden.delete(place) : STATE.hidden.add(place)));
      press();
    },
  } }, h("i", { style: { background: colorOf(index) } }), group.label));
  const press = () => {
    chips.forEach((one, place) => one.setAttribute("aria-pressed", !STATE.hidden.has(place)));
    changed();
  };
  return [
    h("header", {}, h("h1", {}, DATA.title), h("p", {}, what)),
    h("nav", {}, h("div", { class: "chips" }, chips),
      choice("over", Object.entries(UNITS).map(([name, { title }]) => [name, title.replace("rollout ", "").replace("generated ", "").replace("optimizer ", "")]), STATE.axis, (name) => { STATE.axis = name; changed(); })),
  ];
}

for (const [index, group] of DATA.groups.entries()) group.index = index;
const several = DATA.runs.length > 1;
document.body.append(...header(), h("main", {},
  section("scores", "Best observed scores", `In percent; each set's best over a run is chosen for itself${several ? ", then averaged over seeds (lowest–highest)" : ""}. The last column is the final evaluation.`, scoreTable()),
  section("curves", "Learning", several ? "A line is the mean over seeds, its band reaches from the lowest to the highest." : null, learningCurves()),
  section("time", "Time to a reward", "When the centered 11-step mean of the rollout reward first reaches a value, and what had been spent by then.", timeToReward()),
  section("ratios", "Four log-ratios, measured", "Of the traced responses, as the updates saw them: line and band are the median and the 5% to 95% quantiles by position, dashed is one standard deviation around 0.", logRatios()),
  section("gate", "What the constraint did, by position and epoch", "Over all computed tokens. Tokens accepted are those whose weight was left alone, of those with an advantage; log w is the prefix mean Sₜ / t whatever the objective weighs by.", gateByPosition()),
  section("seconds", "Where the time went", "Seconds a rollout batch, by phase.", whereTimeWent()),
  section("life", "The life of a token over reuse", "One response that was generated once and trained on in every epoch. Color says how far the policy has moved from the one that wrote it: red, more likely now; blue, less.", lifeOfAToken()),
  section("settings", "Settings", null, settingsTable())));
