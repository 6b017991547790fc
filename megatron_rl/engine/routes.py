"""The experts that the engine's routers chose for each token of a request.

vLLM returns them with a finished request on CUDA (`enable_return_routed_experts`). On a CPU it
refuses to, so they are read from its routers' own callback after each step of the engine. Prefix
caching is off there: tokens of a cached prefix pass through no router.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models.shape import ModelShape


def id_dtype(num_experts: int) -> np.dtype:
    """Return the dtype of an expert's number in a row of routes."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def find_request(names: Iterable[str], name: str) -> str:
    """Find a request among vLLM's own names, which have a random part at their end; or ""."""
    return next((n for n in names if n == name or n.startswith(f"{name}-")), "")


class EngineRoutes:
    """Reads the routes of finished requests; an `EngineFeature`. shape: of a model with experts."""

    def __init__(self, shape: ModelShape, *, on_cuda: bool) -> None:
        assert shape.experts is not None, "routes are those of a mixture of experts"
        self.experts, self.layers = shape.experts, shape.num_layers
        # By vLLM's name of a request: (first position, [positions, layers, k]) of each step.
        self._recorded: dict[str, list[tuple[int, np.ndarray]]] | None = None if on_cuda else {}
        self._of_step: dict[int, Tensor] = {}  # by layer: [tokens, k]

    def arguments(self) -> dict[str, Any]:
        on_cuda = self._recorded is None
        return {"enable_return_routed_experts" if on_cuda else "enable_prefix_caching": on_cuda}

    def start(self, llm: Any) -> None:
        if self._recorded is not None:
            self._record(llm)

    def clear(self) -> None:
        """Forget requests that never finished."""
        if self._recorded:
            self._recorded.clear()

    def of(self, output: Any) -> np.ndarray:
        """Return the experts of a finished request as bytes of `id_dtype`; flat uint8.

        They are those of [positions, layers, k]: each token that the engine has read, so all of
        prompt and response but the last. Raises RuntimeError if vLLM's are not of this shape or
        not k different experts of the model.
        """
        completion = output.outputs[0]
        positions = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        found = completion.routed_experts
        if self._recorded is not None:
            found = self._join_steps(output.request_id, positions)
        k, shape = self.experts.experts_per_token, None if found is None else found.shape
        if found is None or shape != (positions, self.layers, k):
            raise RuntimeError(
                f"the engine returned routes of shape {shape} for a request of {positions} tokens "
                f"in {self.layers} layers with {k} experts each; set model.routing_replay to "
                "behavior or none"
            )
        ordered = np.sort(found.astype(np.int64), axis=2)
        count = self.experts.num_experts
        if (
            ordered[..., 0].min() < 0
            or ordered[..., -1].max() >= count
            or not np.diff(ordered).all()
        ):
            raise RuntimeError(
                f"the engine returned routes that are not {k} different experts of {count}; set "
                "model.routing_replay to behavior or none"
            )
        return found.astype(id_dtype(count)).reshape(-1).view(np.uint8)

    def _join_steps(self, name: str, positions: int) -> np.ndarray | None:
        """Put the recorded steps of a request together; None if a position is missing."""
        assert self._recorded is not None
        known = find_request(self._recorded, name)
        rows = np.zeros((positions, self.layers, self.experts.experts_per_token), np.int64)
        is_there = np.zeros(positions, bool)
        for first, step in reversed(self._recorded.pop(known, [])):
            # After a preemption positions are computed again; the first computation counts.
            stop = min(first + len(step), positions)
            rows[first:stop], is_there[first:stop] = step[: stop - first], True
        return rows if is_there.all() else None

    def _record(self, llm: Any) -> None:
        """Keep what the routers choose in each step of the engine."""
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        for layer, router in _routers(runner.model):
            router.set_capture_fn(
                lambda experts, layer=layer: self._of_step.__setitem__(layer, experts.clone())
            )
        execute = runner.execute_model

        def execute_and_record(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            result = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                self._append_step(runner.input_batch, scheduled.num_scheduled_tokens)
            return result

        runner.execute_model = execute_and_record

    def _append_step(self, batch: Any, counts: dict[str, int]) -> None:
        assert self._recorded is not None
        one = next(iter(self._of_step.values()))
        experts = torch.zeros(len(one), self.layers, one.shape[1], dtype=torch.int64)
        for layer, chosen in self._of_step.items():
            experts[:, layer] = chosen
        start = 0
        for name in batch.req_ids:
            first = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]])
            rows = experts[start : start + counts[name]].to(torch.int16).numpy()
            self._recorded.setdefault(name, []).append((first, rows))
            start += counts[name]


def _routers(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the number of each layer with experts, and its router."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            yield module.layer_id, module.router
