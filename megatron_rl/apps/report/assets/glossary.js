// Explanations of words, opened where they stand by pointer, touch or keyboard.
"use strict";

const GLOSSARY = {
  "avg@k": "Mean reward of k sampled responses to each problem of a held-out set.",
  "held-out": "Problems that are evaluated and never trained on.",
  seeds: "Runs that differ only in the numbers from which random choices are drawn.",
  "rollout batch": "The responses that one step generates, and that training then uses for one or several epochs.",
  "rollout reward": "The verifier's grade of a response that was generated for training; here the mean over a rollout batch.",
  epoch: "One pass of optimizer updates over a rollout batch. From the second one on its responses are reused: the policy has changed since they were generated.",
  "behavior policy": "The model as it was when it generated the responses, before the updates of this rollout batch.",
  "log-prob": "Logarithm of the probability of a token; 0: certain, −0.7: about one half, −2.3: one tenth.",
  "p before": "Probability of the token under the behavior policy.",
  "p now": "Probability of the token in the selected epoch.",
  "log-ratio": "Logarithm of how much more likely a token is now than under the behavior policy. 0: unchanged; 0.1: about 10% more likely.",
  "ℓₜ": "Log-ratio of the token at position t alone: log-prob now minus log-prob under the behavior policy.",
  "Sₜ": "Sum of the log-ratios of all tokens of a response up to position t.",
  "log wₜ": "Sₜ / t, the mean log-ratio of all tokens up to position t. PNPO limits it.",
  "log w": "Sₜ / t, the mean log-ratio of all tokens up to a position. PNPO limits it.",
  "log π": "Logarithm of the probability of a token under the policy of an epoch.",
  constraint: "The rule by which an objective leaves tokens out of an update, or limits their weight, because the policy has moved too far from the behavior policy there.",
  gate: "Whether the constraint kept the token in the update.",
  accepted: "Fraction of tokens with non-zero advantage whose weight the constraint left unchanged.",
  advantage: "How much better a response is graded than the others to the same prompt; its sign says whether training makes its tokens more or less likely. 0: no effect.",
  drift: "Spread of log w over all tokens: how far the policy has moved from the behavior policy.",
  entropy: "How undecided the policy is about the next token, in nats; near 0 it always chooses the same one.",
  "KL": "Kullback-Leibler divergence: the mean log-ratio by which two policies differ, in nats per token.",
  "effective sample fraction": "Share of the tokens that count after weighting; 1 if all weights are equal.",
  "gradient norm": "Length of the gradient of all weights before clipping; a sudden rise is a warning.",
  truncated: "Cut at the maximum response length, without an end of its own.",
  "zero advantage": "All responses to a prompt were graded alike, so that they teach nothing.",
  traced: "Recorded with the log-prob of every token at every epoch (logging.traced_responses).",
  "t / L": "Position of a token as a fraction of its response's length.",
  "simulated time": "Cost in epochs of training: each rollout batch counts as some epochs (2.7 by default), plus the epochs themselves. It does not depend on how busy the machine was.",
  "optimizer updates": "Changes of the weights; a rollout batch has several per epoch.",
  behavior: "Log-prob under the behavior policy, recomputed by the training code.",
  engine: "Log-prob that the inference engine reported when it generated the token.",
};
const SPELLINGS = { "avg@k": "avg@\\d+", epoch: "epochs?", "log-ratio": "log-ratios?", "log-prob": "log-probs?", seeds: "seeds?", "rollout batch": "rollout batch(?:es)?", accepted: "accepted|acceptance", behavior: null, engine: null, "ℓₜ": "ℓₜ", "log w": "log w(?!ₜ)" };
const TERMS = Object.keys(GLOSSARY).filter((term) => SPELLINGS[term] !== null)
  .map((term) => [term, SPELLINGS[term] ?? term]).sort((one, other) => other[1].length - one[1].length);
const WORDS = new RegExp(TERMS.map(([, spelling]) => `((?<![\\p{L}\\d_-])(?:${spelling})(?![\\p{L}\\d_]))`).join("|"), "giu");

const NOTE = document.body.appendChild(h("div", { id: "note", popover: "auto", role: "note" }));

/** A word that shows its explanation when it is pressed, next to it and inside the window. */
function explain(term, text = term) {
  return h("button", { type: "button", class: "term", on: {
    click: (event) => {
      event.stopPropagation();
      NOTE.replaceChildren(h("b", {}, text), ` ${GLOSSARY[term]}`);
      NOTE.showPopover();
      const box = event.currentTarget.getBoundingClientRect();
      const below = box.bottom + NOTE.offsetHeight + 10 < innerHeight;
      NOTE.style.left = `${Math.max(8, Math.min(box.left, innerWidth - NOTE.offsetWidth - 8))}px`;
      NOTE.style.top = `${Math.max(8, below ? box.bottom + 6 : box.top - NOTE.offsetHeight - 6)}px`;
    },
  } }, text);
}

/** A text with a button for the first mention of each word of the glossary. */
function explained(text) {
  if (typeof text !== "string") return Array.isArray(text) ? text.map(explained) : text;
  const parts = [], seen = new Set();
  let end = 0;
  for (const match of text.matchAll(WORDS)) {
    const term = TERMS[match.slice(1).findIndex((group) => group != null)][0];
    if (seen.has(term)) continue;
    seen.add(term);
    parts.push(text.slice(end, match.index), explain(term, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

// A table's cells carry the heads of their columns, which narrow windows show instead of a head.
function tableOf(kind, heads, rows) {
  const body = rows.map((row) => {
    [...row.cells].forEach((cell, place) => cell.setAttribute("data-head", [heads[place]].flat().map((one) => one.textContent ?? one).join("")));
    return row;
  });
  return h("table", { class: `numbers cards ${kind}` },
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", {}, explained(head))))), h("tbody", {}, body));
}
