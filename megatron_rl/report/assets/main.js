// The page, from top to bottom.
"use strict";

function chipOf(group, press) {
  const { index } = group;
  return h("button", { type: "button", class: "chip", title: `click: show or hide; double click: alone. ${group.runs.map((run) => DATA.runs[run].name).join(", ")}`, on: {
    click: () => {
      if (STATE.hidden.has(index)) STATE.hidden.delete(index); else STATE.hidden.add(index);
      if (STATE.hidden.size === STATE.kept.length) STATE.hidden.clear(); // nothing to see is no answer
      press();
    },
    dblclick: () => {
      STATE.kept.forEach((other) => (other === index ? STATE.hidden.delete(other) : STATE.hidden.add(other)));
      press();
    },
  } }, h("i", { style: { background: group.color } }), group.label);
}

/** Of many groups: a row of buttons for each thing that labels say, to choose which values are kept. */
function facets(keep) {
  const values = DATA.naming.map((_, key) => [...new Set(DATA.groups.map((group) => group.named[key][0]))]
    .sort((one, other) => one.localeCompare(other, "en", { numeric: true })));
  const chosen = values.map((_, key) => new Set(DATA.first.map((index) => DATA.groups[index].named[key][0])));
  const all = [...DATA.groups.keys()];
  const matching = () => all.filter((index) => chosen.every((set, key) => set.has(DATA.groups[index].named[key][0])));
  const say = h("p", { class: "nothing" });
  const draw = () => {
    rows.forEach((buttons, key) => buttons.forEach((one, place) => one.setAttribute("aria-pressed", chosen[key].has(values[key][place]))));
    say.textContent = `${matching().length} of ${all.length} settings are shown. Click a value to add it or to take it away, twice to have it alone.`;
  };
  const choose = (key, wanted) => {
    const before = chosen[key];
    chosen[key] = wanted;
    if (!matching().length) {
      if ([...wanted].every((value) => before.has(value))) chosen[key] = before; // nothing to see is no answer
      else all.filter((index) => wanted.has(DATA.groups[index].named[key][0])).forEach((index) => chosen.forEach((set, other) => set.add(DATA.groups[index].named[other][0])));
    }
    draw();
    keep(matching());
  };
  const rows = values.map((every, key) => every.map((value) => h("button", { type: "button", class: "chip", on: {
    click: () => choose(key, new Set(chosen[key].has(value) ? [...chosen[key]].filter((one) => one !== value) : [...chosen[key], value])),
    dblclick: () => choose(key, new Set([value])),
  } }, value)));
  draw();
  return h("div", { class: "facets" }, rows.map((buttons, key) => h("div", { class: "facet", role: "group", "aria-label": DATA.naming[key] },
    h("span", { class: "label" }, DATA.naming[key]), h("div", { class: "chips" }, buttons, h("button", { type: "button", class: "chip", on: { click: () => choose(key, new Set(values[key])) } }, "all")))), say);
}

function header() {
  const seeds = new Set(DATA.runs.map((run) => run.seed));
  const what = `${DATA.runs.length} run${DATA.runs.length > 1 ? "s" : ""}, ${DATA.groups.length} setting${DATA.groups.length > 1 ? "s" : ""}, ${seeds.size} seed${seeds.size > 1 ? "s" : ""}`;
  const bar = h("div", { class: "chips" });
  const press = () => {
    [...bar.children].forEach((one, place) => one.setAttribute("aria-pressed", !STATE.hidden.has(STATE.kept[place])));
    changed();
  };
  const keep = (kept) => {
    STATE.kept = kept;
    STATE.hidden.clear();
    bar.replaceChildren(...keptGroups().map((group) => chipOf(group, press)));
    press();
  };
  keep(STATE.kept);
  return [
    h("header", {}, h("h1", {}, DATA.title), h("p", {}, what), DATA.first.length < DATA.groups.length && facets(keep)),
    h("nav", {}, bar,
      choice("over", Object.entries(UNITS).map(([name, { title }]) => [name, title.replace("rollout ", "").replace("generated ", "").replace("optimizer ", "")]), STATE.axis, (name) => { STATE.axis = name; changed(); })),
  ];
}

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
// What is scrolled to, and what sticks itself, stays below what sticks to the top.
new ResizeObserver(([bar]) => document.documentElement.style.setProperty("--nav", `${bar.target.offsetHeight}px`)).observe(document.querySelector("nav"));
document.body.dataset.drawn = true;
