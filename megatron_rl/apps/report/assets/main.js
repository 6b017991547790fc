// Page layout, from top to bottom.
"use strict";

function chipOf(group, press) {
  const { index } = group;
  return h("button", { type: "button", class: "chip", title: `Click: show or hide. Double-click: show only this. ${group.runs.map((run) => DATA.runs[run].name).join(", ")}`, on: {
    click: () => {
      if (STATE.hidden.has(index)) STATE.hidden.delete(index); else STATE.hidden.add(index);
      if (STATE.hidden.size === STATE.kept.length) STATE.hidden.clear(); // do not hide everything
      press();
    },
    dblclick: () => {
      STATE.kept.forEach((other) => (other === index ? STATE.hidden.delete(other) : STATE.hidden.add(other)));
      press();
    },
  } }, h("i", { style: { background: group.color } }), group.label);
}

/** For many groups: a row of buttons for each part of the labels, to select values. */
function facets(keep) {
  const values = DATA.naming.map((_, key) => [...new Set(DATA.groups.map((group) => group.named[key][0]))]
    .sort((one, other) => one.localeCompare(other, "en", { numeric: true })));
  const chosen = values.map((_, key) => new Set(DATA.first.map((index) => DATA.groups[index].named[key][0])));
  const all = [...DATA.groups.keys()];
  const matching = () => all.filter((index) => chosen.every((set, key) => set.has(DATA.groups[index].named[key][0])));
  const message = h("p", { class: "nothing" });
  const draw = () => {
    rows.forEach((buttons, key) => buttons.forEach((one, place) => one.setAttribute("aria-pressed", chosen[key].has(values[key][place]))));
    message.textContent = `${matching().length} of ${all.length} settings are shown. Click a value to add or remove it; double-click to select only it.`;
  };
  const choose = (key, wanted) => {
    const before = chosen[key];
    chosen[key] = wanted;
    if (!matching().length) {
      if ([...wanted].every((value) => before.has(value))) chosen[key] = before; // do not hide everything
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
    h("span", { class: "label" }, DATA.naming[key]), h("div", { class: "chips" }, buttons, h("button", { type: "button", class: "chip", on: { click: () => choose(key, new Set(values[key])) } }, "all")))), message);
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
    h("header", {}, h("h1", {}, DATA.title), h("p", {}, explained(what)), h("dl", { class: "about" }, DATA.about.flatMap(({ name, values, more }) => [
      h("dt", {}, name), h("dd", {}, values.flatMap((value, place) => [place ? h("br") : null, name === "Command" ? h("code", {}, visible(value)) : visible(value)]), more > 0 && `, and ${more} more`)])), DATA.first.length < DATA.groups.length && facets(keep)),
    h("nav", {}, bar,
      choice("x axis", Object.entries(UNITS).map(([name, { title }]) => [name, title.replace("rollout ", "").replace("generated ", "").replace("optimizer ", "").replace(" time (epochs)", "")]), STATE.axis, (name) => { STATE.axis = name; changed(); })),
  ];
}

const several = DATA.runs.length > 1;
document.body.append(...header(), h("main", {},
  section("scores", "Scores before training, best and last", `Of the held-out sets, in percent: before training (the evaluation at step 0), the best score, selected per set and run${several ? ", then averaged over seeds (minimum–maximum)" : ""}, and the final evaluation.`, scoreTable()),
  section("curves", "Learning", several ? "Lines are means over seeds, bands range from minimum to maximum." : null, learningCurves()),
  section("time", "Time to a reward", "Cost until the centered 11-step mean of the rollout reward first reaches a value.", timeToReward()),
  section("ratios", "Four log-ratios, measured", "Log-ratios of the traced responses at each update: line and band are the median and the 5% to 95% quantiles by position; dashed lines are one standard deviation around 0.", logRatios()),
  section("gate", "Constraint decisions by position and epoch", "Over all computed tokens. Accepted: fraction of tokens with non-zero advantage whose weight the constraint left unchanged. log w is the prefix mean Sₜ / t for every objective.", gateByPosition()),
  section("seconds", "Time by phase", "Seconds per rollout batch.", timeByPhase()),
  section("timeline", "Timeline", "What the first rank of each group of ranks did when, in one run of each setting. Lines are ends of steps; hatched: the rank waits for the other group.", timeline()),
  section("life", "Per-token log-probs across epochs", "One response, generated once and trained on in every epoch. Color shows the change from the behavior policy: red, more likely now; blue, less likely.", tokenHistory()),
  section("responses", "Responses", "Recorded responses with their rewards, those of a step spread from its lowest reward to its highest.", recordedResponses()),
  section("settings", "Settings", null, settingsTable())));
// Scroll targets and sticky elements stay below the sticky navigation bar.
new ResizeObserver(([bar]) => document.documentElement.style.setProperty("--nav", `${bar.target.offsetHeight}px`)).observe(document.querySelector("nav"));
document.body.dataset.drawn = true;
