"""Every number in the text of the first study's results, recomputed from its stored metrics.

`claims` gives the sentences' parts with their numbers filled in; what it does not give must be a
setting. Intervals, counts and correlations of the summary are in test_results_page.py too.
"""

import re
from collections.abc import Iterator

import numpy as np
from scipy import stats

from research.tests.stored_study import (
    PAGE,
    REUSE,
    TEXT,
    TOLERANCES,
    Values,
    column,
    interval,
    read_rows,
    read_values,
)
from research.tests.test_results_page import by_model, of_the_control

FIRST = PAGE.index("**GRPO falls further behind")
LAST = PAGE.index("### What transfers")
SHORT = PAGE.index("### In short")
SHORT_END = PAGE.index("### What we believed")
LONG = ("38", "62", "254")
# Numbers that are no results: rates, bounds, lengths, seeds, thresholds of a definition.
SETTINGS = (
    r"`[^`]*`", r"\d[\d.]*e-\d", r"\d+(, \d+)*( and \d+)? tokens", r"seeds? \d+( to \d+)?",
    r"6 rollout batches instead of 24", r"weight 1, no gate",
    r"eight fresh seeds at 62 \(9 to 16\)", r"254 with eight epochs, 510\)",
    r"first reaches 75", r"c = 2\.7 epochs, from the paper's 283 and 510 s",
    r"threshold of 0\.2", r"exceeded 0\.2", r"whose spread of 0\.2 was set at",
    r"excludes? 0", r" 0 by chance", r"tuned at 38\.",
    r"0\.005 below and 0\.08 above \(GSPO 0\.02 and 0\.0272\), at 254",
    r"and 0\.01 \(0\.0025 and 0\.0034\)", r"0\.04 and 0\.054",
    r"0\.02, 0\.01 and 0\.0025 below for PNPO",
)  # fmt: skip


def against(reuse: Values, point: str, some: str, other: str, key: str = "score") -> str:
    """An interval as the text gives it: mean and half-width of some minus other."""
    place = tuple(point.split())
    mean, half = interval(reuse[*place, some], reuse[*place, other], key)
    return f"{abs(mean):.1f} ± {half:.1f}"


def largest(runs: dict[int, dict], key: str, *, digits: int = 0) -> str:
    return f"{max(run[key] for run in runs.values()):.{digits}f}"


def claims_in_short(reuse: Values) -> Iterator[str]:
    names = ("grpo", "pnpo", "gspo", "gspo_tight_low")
    means = [
        f"{np.mean([reuse['62', '0.0004', epochs, n][seed]['score'] for seed in (1, 2, 3)]):.1f}"
        for epochs in "14" for n in names
    ]  # fmt: skip
    yield "the score is {}, {}, {} and {}".format(*means[:4])
    yield "{}, {}, {} and {} with four".format(*means[4:])
    behind = [against(reuse, place, name, "grpo") for place in ("510 0.0004 4", "254 0.0004 8")
              for name in ("pnpo", "gspo")]  # fmt: skip
    yield (
        "at four epochs by {} and {} points of score at 510 tokens, at eight by {} and {} at 254"
    ).format(*behind)
    over = [against(reuse, f"{length} 0.0004 4", "gspo", "pnpo") for length in ("62", "254")]
    yield (
        "GSPO's score is {} points above PNPO's at 62 tokens (sixteen pairs) and {} at 254"
    ).format(*over)
    for others in (8, 24):
        yield f"p = {stats.fisher_exact([[4, 4], [0, others]]).pvalue:.{2 + others // 24}f}"
    one_sided = ("gspo", "gspo_tight_low", "pnpo_one_sided")
    yield f"none of the {sum(len(reuse['38', '0.0008', '4', n]) for n in one_sided)} runs"
    cell = {n: reuse["62", "0.0004", "4", n] for n in ("gspo", "pnpo", "gspo_tight_low")}
    fresh = {n: {s: r for s, r in runs.items() if s > 8} for n, runs in cell.items()}
    gains = {(key, other): "{:.1f} ± {:.1f}".format(*interval(fresh["gspo_tight_low"], fresh[other],
             key)) for key in ("reward", "score") for other in ("gspo", "pnpo")}  # fmt: skip
    yield "reward is {} points above GSPO's and {} above PNPO's; its final score {} and {}".format(
        *gains.values()
    )
    tight = [against(reuse, "62 0.0004 4", "gspo_tight_low", "gspo_tight", key)
             for key in ("reward", "score")]  # fmt: skip
    yield "the difference is {} of reward and {} of score".format(*tight)
    (score, s), (reward, r) = by_model(reuse)
    yield f"it is {reward:.1f} ± {r:.1f} of reward above GSPO and {score:.1f} ± {s:.1f} of score"
    (score, s), (reward, r) = list(of_the_control(reuse))[:2]
    yield f"is {reward:.1f} ± {r:.1f} of reward and {score:.1f} ± {s:.1f} of score above"


def claims_of_reuse(reuse: Values) -> Iterator[str]:
    for_grpo = [
        against(reuse, f"{length} 0.0004 {epochs}", "pnpo", "grpo")
        for length in LONG
        for epochs in "48"
    ]
    yield (
        "by {} points at four epochs and {} at eight (38 tokens), by {} and {} (62 tokens), and by "
        "{} and {} (254 tokens)"
    ).format(*for_grpo)
    pnpo, gspo, one_sided = (
        reuse["38", "0.0004", "1", name] for name in ("pnpo", "gspo", "pnpo_one_sided")
    )
    three, seven, two = pnpo[3], pnpo[7], pnpo[2]
    yield (
        f"in seed 3 from {three['reward 2']:.0f} to {three['reward 3']:.0f} and "
        f"{three['reward 4']:.0f} in two batches without recovery ({three['score']:.1f} at the "
        f"end, GSPO {gspo[3]['score']:.1f}), in seed 7 from {seven['reward 3']:.0f} to "
        f"{seven['reward 4']:.0f} in one batch, followed by recovery ({seven['score']:.1f} at the "
        "end)"
    )
    yield f"the spread of log w_t was {three['spread']:.2f}, below"
    yield (
        f"fell from {two['reward 3']:.0f} to {two['reward 4']:.0f} for one batch, at "
        f"{two['spread']:.2f}."
    )
    lost = (100 * run["lost"] for run in (three, seven, two))
    yield "{:.0f}%, {:.0f}% and {:.0f}% of the tokens with positive advantage".format(*lost)
    yield "(by {} and {} points from one batch to the next at most".format(
        *(largest(runs, "drop") for runs in (one_sided, gspo))
    )
    spreads = (largest(runs, "spread", digits=2) for runs in (one_sided, gspo))
    yield "spreads up to {} and {})".format(*spreads)
    assert set(one_sided) == set(gspo) == set(pnpo) == set(range(1, 9))
    yield f"({against(reuse, '38 0.0004 1', 'gspo', 'pnpo')}) is that of one collapse"


def claims_of_costs() -> Iterator[str]:
    runs = read_rows("reuse", REUSE)
    found: dict[str, list[tuple[float, float]]] = {}
    last = {}
    for name in ("gspo", "gspo_tight_low", "grpo"):
        for epochs in (1, 4, 8):
            cell = runs["62", "0.0004", str(epochs), name]
            three = [cell[seed] for seed in (1, 2, 3)]
            rewards = np.mean([column(rows, "reward/mean") for rows in three], axis=0)
            tokens = np.cumsum(np.mean([column(rows, "rollout/tokens") for rows in three], axis=0))
            last[name, epochs] = 100 * rewards[-1]
            if (reached := np.flatnonzero(rewards >= 0.75)).size:
                batch = reached[0]
                time = 2.7 * (batch + 1) + epochs * batch
                found.setdefault(name, []).append((tokens[batch] / 1000, time))
    (a, x), (b, y), (c, z) = found["gspo"]
    yield f"after {a:.0f}, {b:.0f} and {c:.0f} thousand generated tokens with 1, 4 and 8 epochs"
    (d, u), (e, v), (f, w) = found["gspo_tight_low"]
    yield f"and after {d:.0f}, {e:.0f} and {f:.0f} of `gspo_tight_low`"
    yield f"these are {x:.1f}, {y:.1f} and {z:.1f}, and {u:.1f}, {v:.1f} and {w:.1f} epochs"
    (a, x), (b, y) = found["grpo"]
    yield f"({a:.0f} thousand with 1 epoch, {b:.0f} with 4) but no time ({x:.1f}, {y:.1f})"
    assert len(found["grpo"]) == 2
    yield "and with 8 epochs it stays below"
    yield f"({last['gspo', 1]:.1f} against {last['gspo', 4]:.1f} for GSPO with four)"


def claims_of_gspo(reuse: Values, tuning: Values) -> Iterator[str]:
    over = {length: against(reuse, f"{length} 0.0004 4", "gspo", "pnpo")
            for length in (*LONG, "62_early", "62_late")}  # fmt: skip
    yield (
        f"by {over['62']} with errors anywhere (sixteen seeds), {over['62_early']} with early "
        f"ones, {over['62_late']} with late ones"
    )
    pairs = [
        reuse[length, "0.0004", "4", "gspo"][seed]["score"] > run["score"]
        for length in ("62", "62_early", "62_late")
        for seed, run in reuse[length, "0.0004", "4", "pnpo"].items()
    ]
    yield f"in {sum(pairs)} of {len(pairs)} pairs"
    scores = {point[2]: runs[101]["score"] for point, runs in tuning.items()
              if point[:2] == ("62", "pnpo")}  # fmt: skip
    looser = [scores[width] - scores["0.5"] for width in ("1", "2")]
    yield "by {:.1f} and {:.1f} points. At 254".format(*looser)
    reward = against(reuse, "254 0.0004 4", "gspo", "pnpo", "reward")
    yield f"in seven of eight pairs ({over['254']} and {reward})"
    means = [over[length].partition(" ")[0] for length in LONG]
    yield "score is {}, {} and {} points above".format(*means)
    counts = [len(reuse[length, "0.0004", "4", "pnpo"]) for length in LONG]
    yield "({}, {} and {} pairs)".format(*counts)
    assert 0.07 < max(
        run["spread"] for p, runs in reuse.items() if p[0] == "62" and p[3] == "pnpo"
        for run in runs.values()
    ) < 0.08  # fmt: skip
    yield "stays below 0.08"
    cell = {name: reuse["254", "0.0004", "4", name]
            for name in ("pnpo", "gspo", "pnpo_one_sided", "grpo")}  # fmt: skip
    yield f"the spread was {largest(cell['pnpo'], 'spread', digits=2)} at most"
    yield f"rejected up to {100 * max(r['lost'] for r in cell['pnpo'].values()):.0f}% of the tokens"
    yield (
        "at most {} points from one batch to the next (GSPO's by {}, the one-sided gate's by {}, "
        "GRPO's by {})"
    ).format(*(largest(runs, "drop") for runs in cell.values()))
    yield f"by {tuning['254', 'pnpo', '0.25'][101]['drop']:.0f} in a run of the tuning"
    high = {name: reuse["254", "0.0008", "4", name] for name in ("pnpo", "gspo")}
    worst = max(high["pnpo"].values(), key=lambda run: run["drop"])
    yield f"runs lost {worst['drop']:.0f} points of reward from one batch to the next"
    yield f"(GSPO's {largest(high['gspo'], 'drop')} at most), with {100 * worst['lost']:.0f}% of"
    yield f"(here it was {largest(high['pnpo'], 'spread', digits=2)} at most)"


def claims_of_early_errors(reuse: Values) -> Iterator[str]:
    tenths = []
    for length in ("62_early", "62"):
        runs = read_rows("reuse", REUSE)[length, "0.0004", "4", "pnpo"].values()
        for tenth in ("0.2", "1.0"):
            key = f"by_fraction/{tenth}/prefix_mean_log_std"
            tenths.append(np.mean([column(rows, key)[0] for rows in runs]))
    yield (
        "is {:.2f} in the second tenth of a response and {:.2f} in the last; with errors anywhere "
        "{:.2f} and {:.2f})"
    ).format(*tenths)
    cell = {name: reuse["62_early", "0.0004", "4", name] for name in ("pnpo", "gspo", "pnpo_loose")}
    shares = {
        name: 100 * np.mean([r["above first"] for r in runs.values()])
        for name, runs in cell.items()
    }
    yield f"it rejects {shares['pnpo']:.0f}% of the tokens with positive advantage from above"
    yield f"where GSPO rejects {shares['gspo']:.1f}%"
    yield f"reject {shares['pnpo_loose']:.0f}% of those tokens"
    early = "62_early 0.0004 4"
    yield f"is {against(reuse, early, 'pnpo', 'gspo', 'reward 1')} points below GSPO's"
    eight = {name: {seed: reuse["62", "0.0004", "4", name][seed] for seed in range(1, 9)}
             for name in ("pnpo", "gspo")}  # fmt: skip
    anywhere = "{:.1f} ± {:.1f}".format(*interval(eight["pnpo"], eight["gspo"], "reward 1"))
    yield f"with errors anywhere {anywhere} above"
    yield f"GSPO's reward is {against(reuse, early, 'gspo', 'pnpo', 'reward')} higher"
    late = against(reuse, "62_late 0.0004 4", "gspo", "pnpo", "reward")
    yield f"the rewards do not differ ({late})"
    second = [f"{cell[name][seed]['reward 1']:.0f}" for name in ("pnpo_loose", "pnpo", "gspo")
              for seed in (1, 2, 3)]  # fmt: skip
    yield "are then {}, {} and {} (PNPO {}, {} and {}, GSPO {}, {} and {})".format(*second)


def claims_of_runaways(reuse: Values) -> Iterator[str]:
    high = {name: reuse["38", "0.0008", "4", name] for name in ("pnpo", "pnpo_one_sided", "gspo")}
    away = [high["pnpo"][seed] for seed in (3, 4, 6, 8)]
    scores = (run["score"] for run in away)
    yield "with final scores of {:.1f}, {:.1f}, {:.1f} and {:.1f}".format(*scores)
    assert all(run["spread"] > 0.2 for run in high["pnpo"].values())
    others = high["pnpo_one_sided"] | {-seed: run for seed, run in high["gspo"].items()}
    assert len(others) == 16
    yield f"did ({largest(others, 'spread', digits=2)} at most)"
    eight = {p[3]: runs for p, runs in reuse.items() if p[:3] == ("38", "0.0004", "8")}
    assert sum(run["spread"] > 0.2 for run in eight.pop("pnpo").values()) == 3
    rest = [run for runs in eight.values() for run in runs.values()]
    assert all(run["spread"] <= 0.2 for run in rest)
    yield f"in none of the {len(rest)} others"
    counts = [sum(len(runs) for p, runs in reuse.items() if re.match(length, p[0]) and
                  p[3] == "pnpo") for length in ("62", "254", "510")]  # fmt: skip
    yield "of {} at 62 tokens none, of {} at 254 and {} at 510 none".format(*counts)
    low = max(reuse["38", "0.0002", "4", "pnpo"].values(), key=lambda run: run["drop"])
    yield (
        f"fell from {low['reward 2']:.0f} to {low['reward 3']:.0f} for a batch, at a spread of "
        f"{low['spread']:.2f}"
    )
    lost = (100 * run["lost"] for run in away)
    yield "up to {:.0f}%, {:.0f}%, {:.0f}% and {:.0f}% of the tokens".format(*lost)
    gains = [against(reuse, "38 0.0008 4", n, "pnpo") for n in ("pnpo_one_sided", "gspo")]
    yield "gains {} points of score on PNPO, GSPO {};".format(*gains)
    costs = [against(reuse, "38 0.0004 4", "pnpo_one_sided", "pnpo", key)
             for key in ("score", "reward")]  # fmt: skip
    yield "costs {} points of score and {} of reward (three pairs".format(*costs)


def claims_of_ablations(reuse: Values) -> Iterator[str]:
    cell = {p[3]: runs for p, runs in reuse.items() if p[:3] == ("38", "0.0004", "4")}
    score = {name: [f"{runs[seed]['score']:.1f}" for seed in sorted(runs)]
             for name, runs in cell.items()}  # fmt: skip
    three = np.mean([cell["pnpo"][seed]["score"] for seed in (1, 2, 3)])
    yield "(scores {}, {} and {}; PNPO {:.1f} on average)".format(*score["pnpo_ungated"], three)
    first, second, third = score["pnpo_constant"]
    yield f"({third} at the end; the others {first} and {second})"
    first, second, third = score["pnpo_constant_tight"]
    stalled = cell["pnpo_constant_tight"][1]["spread"]
    yield f"(and recovered: {third}), and another stalled at a spread of {stalled:.2f} "
    yield f"({first} at the end; the third {second})"
    point = "38 0.0004 4"
    equal = [against(reuse, point, "pnpo_sequence", "pnpo", key) for key in ("score", "reward")]
    yield "({} points of score below, {} of reward above)".format(*equal)
    token = [against(reuse, point, "pnpo_token", "pnpo", key) for key in ("reward", "score")]
    yield "loses {} points of reward and {} of score".format(*token)


def claims_of_rejection(reuse: Values, tuning: Values) -> Iterator[str]:
    runs = [reuse["38", "0.0004", "4", name].values() for name in ("grpo", "pnpo", "gspo")]
    shares = [100 * np.mean([run["below first"] for run in some]) for some in runs]
    shares.append(100 * tuning["38", "gspo_tight_low", "0.5"][101]["below first"])
    yield "GRPO rejects {:.0f}% from below in the first batch, PNPO {:.0f}%, GSPO {:.0f}%".format(
        *shares
    )
    yield f"{shares[3]:.0f}% (38 tokens, four epochs, 4e-4; the last in the tuning)"
    counts, ranks = [], []
    for length in LONG:
        some = [runs[101] for point, runs in tuning.items() if point[0] == length]
        counts.append(len(some))
        ranks.append([stats.spearmanr([r["below first"] for r in some], [r[key] for r in some])
                      .statistic for key in ("reward", "score")])  # fmt: skip
    (a, x), (b, y), (c, z) = ranks
    yield "is {:.2f} at 38 tokens ({} runs), {:.2f} at 62 ({}) and {:.2f} at 254 ({})".format(
        *(value for pair in zip((a, b, c), counts, strict=True) for value in pair)
    )
    yield f"the final score {x:.2f}, {y:.2f} and {z:.2f}."


def claims_of_a_smaller_bound(reuse: Values, tuning: Values) -> Iterator[str]:
    name = "gspo_tight_low"
    wins = [
        run["reward"] > others[seed]["reward"]
        for point, runs in reuse.items()
        if point[3] == name and point[1:3] == ("0.0004", "4") and point[0][:2] in ("62", "25")
        for others in (reuse[*point[:3], "pnpo"], reuse[*point[:3], "gspo"])
        for seed, run in runs.items()
    ]
    assert all(wins)
    yield f"each of the {len(wins) // 2} pairs at 62 and 254 tokens"
    high = [against(reuse, "38 0.0008 4", name, "gspo", key) for key in ("score", "reward")]
    yield "it is {} points of score and {} of reward above GSPO".format(*high)
    yield f"None of its {sum(len(r) for p, r in reuse.items() if p[3] == name)} runs ran away"
    half = [against(reuse, "62 0.0004 4", "gspo_tight", "gspo", k) for k in ("reward", "score")]
    rest = [against(reuse, "62 0.0004 4", name, "gspo_tight", k) for k in ("reward", "score")]
    yield "the reward rises by {} and the score by {}".format(*half)
    yield "is {} and {} above that".format(*rest)
    gspo = {point[2]: runs[101]["reward"] for point, runs in tuning.items()
            if point[:2] == ("38", "gspo")}  # fmt: skip
    yield f"had {gspo['2'] - gspo['0.5']:.1f} points less reward in the tuning"
    yield f"had {tuning['38', name, '0.5'][101]['reward'] - gspo['2']:.1f} more"
    over = [against(reuse, f"38 {rate} 4", "gspo", "pnpo_one_sided", "reward")
            for rate in ("0.0004", "0.0008")]  # fmt: skip
    yield "higher by {} at 4e-4 and by {} at 8e-4".format(*over)
    places = ("62 0.0004 4", "38 0.0004 4")
    prefix = [against(reuse, place, "pnpo_tight_low", "gspo", "reward") for place in places]
    yield "is {} points of reward above GSPO at 62 and {} below it at 38".format(*prefix)
    above = [against(reuse, place, name, "pnpo_tight_low", "reward") for place in places]
    yield "is {} and {} above it".format(*above)
    yield "The large table has 234 of them, so about 12 exclude"
    assert round(0.05 * 234) == 12  # counted in test_results_page.py


def claims() -> list[str]:
    reuse, tuning = read_values("reuse", REUSE), read_values("tolerances", TOLERANCES)
    return [
        *claims_in_short(reuse),
        *claims_of_reuse(reuse),
        *claims_of_costs(),
        *claims_of_gspo(reuse, tuning),
        *claims_of_early_errors(reuse),
        *claims_of_runaways(reuse),
        *claims_of_ablations(reuse),
        *claims_of_rejection(reuse, tuning),
        *claims_of_a_smaller_bound(reuse, tuning),
    ]


def test_numbers_in_text_are_recomputed_or_settings() -> None:
    found = claims()
    assert [claim for claim in found if claim not in TEXT] == []
    sections = PAGE[SHORT:SHORT_END] + PAGE[FIRST:LAST]
    prose = [line for line in sections.splitlines() if not line.startswith("|")]
    left = " ".join(" ".join(prose).split())
    assert len(found) > 40
    for claim in found:
        left = left.replace(claim, "#")
    for setting in SETTINGS:
        left = re.sub(setting, "#", left)
    assert re.findall(r"[^.]{0,50}\d[\d.]*.{0,30}", left) == []
