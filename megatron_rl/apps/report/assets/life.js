// Per-token log-probs across epochs: every token of one response at every epoch.
"use strict";

const QUANTITIES = {
  prefix: ["log wₜ = Sₜ / t", (t) => t.prefix], local: ["ℓₜ", (t) => t.local], cumulative: ["Sₜ", (t) => t.cumulative],
  weight: ["the objective's log-weight", (t) => t.weight ?? t.prefix],
};
const WORST = 20;

function floats(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

/** Values of a traced response by epoch and token; computed at first use. */
function traceOf(response) {
  if (!response.trace || response.table) return response.table;
  const { behavior, engine, policy, log_weight: weights, kept, ids, pieces, observed, restarts } = response.trace;
  const before = floats(behavior);
  const epochs = policy.map((packed, epoch) => {
    const now = floats(packed), length = now.length;
    const local = new Float64Array(length), cumulative = new Float64Array(length), prefix = new Float64Array(length);
    let sum = 0;
    for (let t = 0; t < length; t += 1) {
      local[t] = now[t] - before[t];
      sum += local[t];
      cumulative[t] = sum;
      prefix[t] = sum / (t + 1);
    }
    return { policy: now, local, cumulative, prefix, weight: weights ? floats(weights[epoch]) : null,
      kept: (t) => !kept || kept[epoch][t] === "1", rejected: kept ? [...kept[epoch]].filter((one) => one === "0").length : 0 };
  });
  response.table = { length: ids.length, ids, behavior: before, engine: floats(engine), epochs, decided: Boolean(kept), observed: new Map(observed ?? []), restarts: new Set(restarts ?? []),
    pieces: pieces ?? ids.map((id) => `#${id} `) };
  return response.table;
}

/** Replace invisible and direction-changing characters by their codes. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const visible = (text) => text.replace(UNSEEN, (c) => `⟨${c.charCodeAt(0).toString(16).padStart(4, "0")}⟩`);
const quoted = (text) => `“${visible(text).replace(/\n/g, "↵")}”`;

/** Blue below 0, red above, white at 0. */
function diverging(value, reach) {
  const strength = Math.min(1, Math.abs(value) / reach) ** 0.75;
  const end = value < 0 ? [33, 92, 170] : [190, 40, 35];
  const [r, g, b] = end.map((channel) => Math.round(255 + (channel - 255) * strength));
  return { background: `rgb(${r},${g},${b})`, dark: strength > 0.6 };
}

/** The largest change of a response's prefix mean by its last epoch; -1 if not traced. */
const moved = (response) => (response.trace ? largest(traceOf(response).epochs.at(-1).prefix.map(Math.abs)) : -1);

function mostMoved(items, size) {
  const sizes = items.map(size);
  return sizes.indexOf(Math.max(...sizes));
}

class Life {
  constructor() {
    this.view = { life: 0, group: 0, response: 0, epoch: 0, quantity: "prefix" };
    this.host = h("div", { class: "life" });
    this.choose({ life: 0 });
  }

  get life() { return DATA.life[this.view.life]; }
  get group() { return this.life.groups[this.view.group]; }
  get response() { return this.group.responses[this.view.response]; }
  get table() { return traceOf(this.response); }
  get run() { return DATA.runs[this.life.run]; }

  /** Show another run, group or response; by default the group and response with the largest change. */
  choose({ life = this.view.life, group, response, epoch }) {
    const view = this.view;
    view.life = life;
    view.group = group ?? mostMoved(this.life.groups, (one) => Math.max(...one.responses.map(moved)));
    view.response = response ?? mostMoved(this.group.responses, moved);
    const traced = this.group.responses.map((one, place) => (one.trace ? place : -1)).filter((place) => place >= 0);
    view.epochs = Math.max(...traced.map((place) => traceOf(this.group.responses[place]).epochs.length));
    view.epoch = Math.min(epoch ?? view.epochs - 1, view.epochs - 1);
    this.draw();
  }

  /** The 98% quantile of |value| over all epochs of the group, the end of the color scale. */
  reach() {
    const read = QUANTITIES[this.view.quantity][1];
    const sizes = this.group.responses.flatMap((one) => (one.trace ? traceOf(one).epochs.flatMap((epoch) => [...read(epoch)].map(Math.abs)) : []));
    sizes.sort((a, b) => a - b);
    return sizes[Math.floor(0.98 * (sizes.length - 1))] || 1e-6;
  }

  draw() {
    const view = this.view;
    this.colors = this.reach();
    this.parts = { strips: h("div", { class: "strips" }), tokens: h("div", { class: "tokens", dir: "ltr", tabindex: 0, role: "group", "aria-label": "tokens of the response; arrow keys move between them" }), chart: h("div"), worst: h("div", { class: "worst" }), legend: h("div", { class: "scale" }), opened: h("small", { id: "opened" }) };
    const steps = [...new Set(this.life.groups.map((group) => group.step))];
    const ofStep = this.life.groups.map((group, place) => ({ group, place })).filter(({ group }) => group.step === this.group.step);
    const first = (step) => this.life.groups.findIndex((group) => group.step === step);
    this.host.replaceChildren(...[
      h("div", { class: "controls" },
        DATA.life.length > 1 ? this.select("run", DATA.life.map((life) => DATA.runs[life.run].name), view.life, (life) => this.choose({ life })) : null,
        slider("step", { id: "life-step", min: 0, max: steps.length - 1, value: steps.indexOf(this.group.step), text: (at) => String(steps[at]) }, (at) => this.choose({ group: first(steps[at]), epoch: view.epoch })),
        ofStep.length > 1 ? this.select("prompt", ofStep.map(({ group }) => visible(group.prompt).slice(0, 40)), ofStep.findIndex(({ place }) => place === view.group), (at) => this.choose({ group: ofStep[at].place, epoch: view.epoch })) : null),
      h("div", { class: "controls main" },
        slider("epoch of reuse", { id: "life-epoch", min: 1, max: view.epochs, value: view.epoch + 1, text: (at) => `${at} of ${view.epochs}` }, (at) => { view.epoch = at - 1; this.paint(); }),
        choice("color", Object.entries(QUANTITIES).filter(([name]) => name !== "weight" || this.hasOwnWeight()).map(([name, [title]]) => [name, title]), view.quantity, (name) => { view.quantity = name; this.draw(); }),
        this.parts.legend),
      h("p", { class: "prompt" }, h("b", {}, "Prompt "), h("span", { class: "quote" }, visible(this.group.prompt)), h("b", {}, " Truth "), h("span", { class: "quote" }, visible(this.group.truth)), this.elsewhere()),
      h("h3", {}, "The responses of the group"), this.parts.strips,
      h("h3", {}, "The response ", this.parts.opened), h("p", { class: "nothing" }, "Point at a token, tap it, or move with the arrow keys to see its values: ", ["ℓₜ", "Sₜ", "log wₜ", "log π", "gate", "behavior", "engine"].flatMap((term, place) => [place ? ", " : "", explain(term)]), "."), this.parts.tokens, this.parts.chart,
      h("h3", {}, `The ${Math.min(WORST, this.table.length)} tokens that changed most, each by itself (|ℓₜ|)`), this.parts.worst,
    ].filter(Boolean));
    this.drawTokens();
    this.paint();
  }

  /** Links to the same prompt and step in other runs; runs with the same seed trace the same prompts. */
  elsewhere() {
    const { step, prompt_index: prompt } = this.group;
    const links = DATA.life.filter((life) => life !== this.life && life.groups.some((group) => group.step === step && group.prompt_index === prompt && group.prompt === this.group.prompt))
      .map((life) => h("a", { href: this.link(this.response, DATA.runs[life.run]) }, DATA.runs[life.run].name));
    return links.length ? h("span", { class: "elsewhere" }, "Same prompt in ", links) : null;
  }

  hasOwnWeight() {
    return Boolean(this.life.objective) && !["prefix_mean", "token", "prefix_product"].includes(this.life.objective.weight);
  }

  select(label, options, current, act) {
    return h("label", { class: "select" }, h("span", { class: "label" }, label),
      h("select", { "aria-label": label, on: { change: (event) => act(event.target.selectedIndex) } },
        options.map((text, place) => h("option", { selected: place === current }, text))));
  }

  /** Redraw the parts that depend on the epoch: colors, strips, chart and the largest changes. */
  paint() {
    const { epoch, quantity } = this.view, read = QUANTITIES[quantity][1], now = this.table.epochs[epoch];
    const values = read(now);
    this.spans.forEach((span, t) => {
      const { background, dark } = diverging(values[t], this.colors);
      span.style.background = background;
      span.className = `token${dark ? " dark" : ""}${now.kept(t) ? "" : " rejected"}`;
    });
    this.parts.legend.replaceChildren(h("span", {}, signed(-this.colors, 2)), h("span", { class: "ramp" }), h("span", {}, signed(this.colors, 2)),
      this.table.decided ? h("span", { class: "key" }, h("span", { class: "token rejected" }, "token"), " rejected by the constraint") : h("span", { class: "key" }, `rejected tokens are not shown: ${this.life.no_decisions}`));
    this.paintStrips(read);
    this.paintChart(values);
    this.paintWorst();
    const one = this.response;
    this.parts.opened.textContent = `${one.sample + 1} of ${this.group.responses.length}: reward ${show(one.reward)}, advantage ${one.turn_advantages ? `by turn ${one.turn_advantages.map((value) => signed(value)).join(", ")}` : signed(one.advantage)}, ${this.table.length} tokens${one.turns > 1 ? ` in ${one.turns} turns` : ""}${one.histories > 1 ? ` and ${one.histories} histories` : ""}`
      + (this.table.decided ? `, ${now.rejected} rejected in epoch ${epoch + 1}` : "");
  }

  link(response, run = this.run) {
    const parts = [run.name, this.group.step, this.group.prompt_index, response.sample, this.view.epoch + 1];
    return `#life/${parts.map(encodeURIComponent).join("/")}`;
  }

  paintStrips(read) {
    const longest = Math.max(...this.group.responses.map((one) => one.length));
    this.parts.strips.replaceChildren(...this.group.responses.map((one, place) => {
      const table = traceOf(one), open = place === this.view.response;
      const right = one.reward >= 1; // as pass@k counts it
      const verdict = h("span", { class: right ? "verdict right" : "verdict wrong", title: `${one.reason}${one.extracted == null ? "" : `: ${visible(String(one.extracted))}`}; ✓ if the reward is at least 1` },
        `${right ? "✓" : "✗"} ${show(one.reward)}`);
      const text = h("span", { class: "what" }, `${one.sample + 1}`);
      if (!table) {
        return h("div", { class: "strip" }, text, verdict, h("span", { class: "advantage" }, signed(one.advantage, 2)),
          h("div", { class: "untraced quote", title: "not traced" }, visible(one.text ?? "").slice(0, 160)), h("span", { class: "few" }, "not traced"));
      }
      const now = table.epochs[Math.min(this.view.epoch, table.epochs.length - 1)];
      const canvas = h("canvas", { width: 1200, height: 36 });
      paintStrip(canvas, read(now), now, longest, this.colors);
      canvas.onpointermove = (event) => {
        const t = Math.floor((event.offsetX / canvas.clientWidth) * longest);
        this.pointAt(table, t < table.length ? t : null, canvas, event.clientX);
      };
      canvas.onpointerleave = () => this.pointAt(table, null);
      return h("div", { class: `strip${open ? " open" : ""}` }, text, verdict, h("span", { class: "advantage" }, signed(one.advantage, 2)),
        h("button", { type: "button", "aria-label": `open response ${one.sample + 1}`, on: { click: () => this.choose({ group: this.view.group, response: place, epoch: this.view.epoch }) } }, canvas),
        h("span", { class: "few" }, table.decided ? `${now.rejected} of ${table.length} rejected` : `${table.length} tokens`),
        h("a", { href: this.link(one), title: "Link to this response" }, "link"));
    }));
  }

  drawTokens() {
    this.tip ??= document.body.appendChild(h("div", { class: "tip token-tip", hidden: true }));
    this.spans = this.table.pieces.map((piece, t) => h("span", { class: "token", "data-t": t }, visible(piece).replace(/\n/g, "↵\n") || "·"));
    // What an environment wrote stands between the turns; it has no log-probs and is not trained.
    const observation = (t) => h("span", this.table.restarts.has(t)
      ? { class: "observed restart quote", title: "new history, in place of everything before it; not trained" }
      : { class: "observed quote", title: "observation of the environment, not trained" }, visible(this.table.observed.get(t)).replace(/\n/g, "↵\n"));
    this.parts.tokens.replaceChildren(...this.spans.flatMap((span, t) => (this.table.observed.has(t) ? [observation(t), span] : [span])));
    this.parts.tokens.onpointerover = (event) => {
      const t = event.target.dataset?.t;
      if (t != null) this.point(Number(t), event.target);
    };
    this.parts.tokens.onpointerleave = () => this.point(null);
    this.parts.tokens.onblur = () => this.point(null);
    this.parts.tokens.onkeydown = (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") this.point(null);
      if (!move) return;
      event.preventDefault();
      const t = Math.max(0, Math.min(this.spans.length - 1, this.pointed == null ? 0 : this.pointed + move));
      this.spans[t].scrollIntoView({ block: "nearest" });
      this.point(t);
    };
  }

  /** Show all values of one token of the open response next to it. */
  point(t, span) {
    this.pointed = t;
    this.spans.forEach((one) => one.classList.remove("pointed"));
    if (t != null) this.spans[t].classList.add("pointed");
    this.pointAt(this.table, t, span ?? this.spans[t]);
  }

  /** Show all values of a token next to an element, at x if given; null hides the box. */
  pointAt(table, t, element, x) {
    if (t == null) { this.tip.hidden = true; return; }
    const length = table.length, own = this.hasOwnWeight();
    this.tip.replaceChildren(
      h("div", { class: "at" }, h("b", { class: "quote" }, quoted(table.pieces[t])), ` token ${table.ids[t]}, position ${t + 1} of ${length}`),
      h("table", {}, h("thead", {}, h("tr", {}, ["epoch", "log π", "ℓₜ", "Sₜ", "log wₜ", own ? "log-weight" : null, table.decided ? "gate" : null].filter(Boolean).map((name) => h("th", {}, name)))),
        h("tbody", {}, table.epochs.map((now, epoch) => h("tr", { class: epoch === this.view.epoch ? "now" : "" }, h("th", {}, epoch + 1),
          h("td", {}, show(now.policy[t], 4)), h("td", {}, signed(now.local[t])), h("td", {}, signed(now.cumulative[t])), h("td", {}, signed(now.prefix[t])),
          own ? h("td", {}, signed(now.weight[t])) : null,
          table.decided ? h("td", { class: now.kept(t) ? "" : "no" }, now.kept(t) ? "kept" : "rejected") : null)))),
      h("div", { class: "behind" }, `behavior ${show(table.behavior[t], 4)}, engine ${show(table.engine[t], 4)}, p ${show(Math.exp(table.behavior[t]))}`, this.boundsAt(t + 1, length)));
    this.tip.hidden = false;
    const box = element.getBoundingClientRect(), width = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(8, Math.min(x ?? box.left, innerWidth - width - 12)) + scrollX}px`;
    const below = box.bottom + this.tip.offsetHeight + 10 < innerHeight;
    this.tip.style.top = `${(below ? box.bottom + 6 : box.top - this.tip.offsetHeight - 6) + scrollY}px`;
  }

  /** [low, high] bounds of the objective's log-weight at position t of a response, or null. */
  bounds(t, length) {
    const bounds = this.life.objective?.bounds;
    if (!bounds) return null;
    const scale = { constant: 1, "sqrt(L/t)": Math.sqrt(length / t), "t^p": t ** (bounds.power ?? 0) }[bounds.scale];
    const at = (reach, sign) => (reach == null ? null : bounds.space === "log" ? sign * reach * scale : Math.log1p(Math.max(-1, sign * reach * scale)));
    return [at(bounds.low, -1), at(bounds.high, 1)];
  }

  boundsAt(t, length) {
    const bounds = this.bounds(t, length);
    return bounds ? `, bounds ${bounds.map((one) => (one == null ? "none" : signed(one))).join(" … ")}` : "";
  }

  paintChart(values) {
    const { epoch, quantity } = this.view, read = QUANTITIES[quantity][1], table = this.table;
    const x = table.ids.map((_, t) => t + 1);
    const ramp = (place) => ["#c9d6e8", "#9db8da", "#6f97c8", "#2f6db3"][Math.round(3 * place / Math.max(1, table.epochs.length - 1))];
    const lines = table.epochs.map((now, place) => ({ label: `epoch ${place + 1}`, x, y: [...read(now)],
      color: place === epoch ? "#111827" : ramp(place), width: place === epoch ? 2 : 1.3 }));
    lines.push(...lines.splice(epoch, 1));
    const weighs = { prefix_mean: "prefix", token: "local", prefix_product: "cumulative" }[this.life.objective?.weight] ?? "weight";
    if (this.life.objective?.bounds && weighs === quantity) {
      for (const side of [0, 1]) {
        const y = x.map((t) => this.bounds(t, table.length)[side]);
        if (y.some((one) => one != null)) lines.push({ color: "#c2410c", dash: [5, 4], width: 1.3, x, y });
      }
    }
    const size = (line) => largest(finite(line.y).map(Math.abs));
    let reach = 1.15 * Math.max(1e-9, ...lines.filter((line) => line.label).map(size));
    const bounds = lines.filter((line) => line.dash), near = -largest(bounds.flatMap((line) => finite(line.y).map((value) => -Math.abs(value))));
    if (near < 4 * reach) reach = Math.max(reach, 1.15 * near);
    const note = !bounds.length ? "" : near <= reach ? "; dashed: the bounds" : `; the bounds are outside the chart, from ${show(near, 2)}`;
    const chart = lineChart({ title: [`${QUANTITIES[quantity][0]} by position, `, h("b", {}, `epoch ${epoch + 1} in black`), note],
      lines, xLabel: "position t", height: 220, whole: true, format: (v) => show(v, 2), yRange: [-reach, reach], marks: [{ y: 0, color: "#aab2bd" }],
      onHover: (t) => { this.spans.forEach((one) => one.classList.remove("pointed")); if (t != null) this.spans[t - 1]?.classList.add("pointed"); } });
    this.parts.chart.replaceChildren(chart);
  }

  paintWorst() {
    const table = this.table, now = table.epochs[this.view.epoch];
    // By the change of each token alone: a mean or a sum up to it also moves with the tokens before.
    const order = [...now.local.keys()].sort((a, b) => Math.abs(now.local[b]) - Math.abs(now.local[a])).slice(0, WORST);
    const around = (t) => [table.pieces.slice(Math.max(0, t - 6), t).join(""), table.pieces[t], table.pieces.slice(t + 1, t + 7).join("")].map((text) => visible(text).replace(/\n/g, "↵"));
    const heads = ["t", "where", "ℓₜ", "Sₜ", "log wₜ", "p before", "p now", ...(table.decided ? ["gate"] : [])];
    this.parts.worst.replaceChildren(tableOf("left", heads, order.map((t) => h("tr", { on: { click: () => this.goTo(t) } },
        h("td", {}, h("button", { type: "button", class: "go", "aria-label": `token ${t + 1} in the response` }, t + 1)),
        h("td", { class: "where quote" }, around(t)[0], h("mark", {}, around(t)[1] || "·"), around(t)[2]),
        h("td", {}, signed(now.local[t])), h("td", {}, signed(now.cumulative[t])), h("td", {}, signed(now.prefix[t])),
        h("td", {}, show(Math.exp(table.behavior[t]))), h("td", {}, show(Math.exp(now.policy[t]))),
        table.decided ? h("td", { class: now.kept(t) ? "" : "no" }, now.kept(t) ? "kept" : "rejected") : null))));
  }

  goTo(t) {
    this.spans[t].scrollIntoView({ block: "center" });
    requestAnimationFrame(() => this.point(t));
  }

  /** Open the response that a link names; false if the page does not contain it. */
  open(hash) {
    const [kind, ...parts] = hash.replace(/^#/, "").split("/");
    if (kind !== "life" || parts.length < 4) return false;
    const [name, step, prompt, sample, epoch] = parts.map(decodeURIComponent);
    const life = DATA.life.findIndex((one) => DATA.runs[one.run].name === name);
    const group = life < 0 ? -1 : DATA.life[life].groups.findIndex((one) => one.step === Number(step) && one.prompt_index === Number(prompt));
    const response = group < 0 ? -1 : DATA.life[life].groups[group].responses.findIndex((one) => one.sample === Number(sample) && one.trace);
    if (response < 0) return false;
    this.choose({ life, group, response, epoch: Math.max(0, Number(epoch ?? 1) - 1) });
    return true;
  }
}

/** One cell per token, scaled to the group's longest response; rejected tokens are marked below. */
function paintStrip(canvas, values, now, longest, reach) {
  const context = canvas.getContext("2d"), width = canvas.width / longest;
  for (let t = 0; t < values.length; t += 1) {
    context.fillStyle = diverging(values[t], reach).background;
    context.fillRect(t * width, 0, width + 0.5, 26);
    context.fillStyle = now.kept(t) ? "#e5e9ee" : "#111827";
    context.fillRect(t * width, 28, Math.max(0.7, width - (width > 3 ? 1 : 0)), 8);
  }
}

function tokenHistory() {
  if (!DATA.life.length) return h("p", { class: "nothing" }, "This page contains no traced responses: logging.traced_responses was 0, traces/ or rollouts/ was removed, or --megabytes was 0.");
  const life = new Life();
  const shown = [...new Set(DATA.life.map(({ steps, steps_traced: of }) => (steps < of ? `${steps} of ${of}` : null)).filter(Boolean))];
  const runs = DATA.life.length < DATA.traced ? `The page contains ${DATA.life.length} of ${DATA.traced} runs with traces. ` : "";
  window.addEventListener("hashchange", () => follow(life));
  queueMicrotask(() => follow(life));
  const steps = shown.length ? `Traced steps shown: ${shown.join(", ")}. ` : "";
  const sampled = DATA.sampled.length ? `Only a sample of the rollout groups was kept, including the traced ones (logging.keep_rollouts): ${DATA.sampled.join(", ")}. ` : "";
  const room = runs || steps ? `${runs}${steps}Increase --megabytes to include more.` : "";
  return [sampled || room ? h("p", { class: "nothing" }, sampled + room) : null, life.host];
}

function follow(life) {
  if (location.hash.startsWith("#life/") && life.open(location.hash)) document.getElementById("life").scrollIntoView();
}
