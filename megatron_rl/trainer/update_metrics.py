"""The metrics of one step's optimizer updates, from what each update reports."""

from dataclasses import dataclass, field

from megatron_rl.actor.actor import UpdateResult


@dataclass
class UpdateMetrics:
    """Collects update results; nothing is reduced or copied to the host until `metrics()`."""

    results: list[UpdateResult] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Updates so far."""
        return len(self.results)

    def add(self, result: UpdateResult) -> None:
        """Keep one update's result."""
        self.results.append(result)

    def metrics(self) -> dict[str, float]:
        """Means over the updates; `ratio/first_minibatch_max_deviation` of the first one alone.

        That deviation is exactly 0 when behavior log-probs come from the packs and the weights
        that the first update trains on.
        """
        rows = [result.statistics.to_metrics() for result in self.results]
        merged = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}
        return merged | {
            "ratio/first_minibatch_max_deviation": rows[0]["ratio/max_deviation"],
            "ratio/max_deviation": max(row["ratio/max_deviation"] for row in rows),
            "grad/norm": sum(result.grad_norm for result in self.results) / self.count,
            "grad/norm_max": max(result.grad_norm for result in self.results),
            "optimizer/learning_rate": self.results[-1].learning_rate,
            "train/updates": self.count,
        }
