"""The section of the actor's parallel layout."""

from typing import Any

from megatron_rl.config.sections import Count, Section


class ParallelSection(Section):
    """The actor's layout; tensor * pipeline * context * data = number of processes that train."""

    tensor: Count = 1
    """Tensor parallel size."""
    pipeline: Count = 1
    """Number of pipeline stages."""
    context: Count = 1
    """Context parallel size: the number of ranks that each sequence is split over."""
    data: Count | None = None
    """Number of data-parallel replicas; null derives it from the number of processes."""
    engine_ranks: Count | None = None
    """Number of processes, the last ones, that only generate, in engines of `rollout.tensor` each,
    while the others train; null generates and trains on all of them in turn
    (`docs/engine-ranks.md`)."""
    expert: Count = 1
    """Expert parallel size of a mixture-of-experts model; expert * expert_tensor must divide tensor
    * context * data."""
    expert_tensor: Count | None = None
    """Tensor parallel size of each expert, a divisor of `parallel.tensor`; null is 1 (whole
    experts) if `parallel.expert` is above 1, and `parallel.tensor` otherwise."""
    virtual_stages: Count = 1
    """Number of interleaved model chunks per pipeline stage; 1 disables interleaving."""
    stage_layers: list[Count] | None = None
    """Number of layers of each pipeline stage (with virtual stages: of each model chunk, in model
    order); null divides evenly where possible, otherwise with fewer layers at both ends."""
    sequence: bool = True
    """Use sequence parallelism if `parallel.tensor` is above 1."""

    @property
    def model_size(self) -> int:
        """Processes of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context

    @property
    def expert_tensor_size(self) -> int:
        """Tensor parallel size of each expert."""
        if self.expert_tensor is not None:
            return self.expert_tensor
        return 1 if self.expert > 1 else self.tensor


def engine_rank_problems(config: Any) -> list[str]:
    """List conflicts of `config.parallel.engine_ranks` with other settings of a `Config`."""
    number, lag = config.parallel.engine_ranks, config.lag
    if number is None:
        return []
    if config.offline.rollouts is not None:
        return [f"parallel.engine_ranks={number}: offline.rollouts starts no engines; unset one"]
    problems = []
    if lag.policy is not None:
        problems.append(
            f"parallel.engine_ranks={number} cannot be combined with lag.policy={lag.policy}, "
            "whose choice may depend on what is generated while a step is trained; set lag.batches"
        )
    elif lag.batches == 0:
        problems.append(
            f"parallel.engine_ranks={number} with lag.batches=0: a step would wait for its own "
            "rollouts while the ranks that train are idle; set lag.batches to 1 or more, or unset "
            "parallel.engine_ranks"
        )
    unsupported = {
        "lag.partial_rollouts": lag.partial_rollouts is not None,
        "environment": config.environment is not None,
        "lora": config.lora is not None,
        "model.routing_replay": config.model.routing_replay != "none",
    }
    problems += [
        f"parallel.engine_ranks={number} cannot be combined with {name} yet; unset one of them"
        for name, is_set in unsupported.items()
        if is_set
    ]
    return problems
