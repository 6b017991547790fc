"""PNPO in a subclass of TRL 1.16.0's GRPOTrainer (docs/use-in-your-trainer.md)."""

import torch
from trl import GRPOTrainer

from megatron_rl.objectives import build_objective, policy_loss
from megatron_rl.types import Denominators


class PNPOTrainer(GRPOTrainer):
    objective = build_objective("pnpo")

    def _compute_loss(self, model, inputs):
        completion, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        logprobs, *_ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion.size(1),
        )
        old = inputs.get("old_per_token_logps")
        mode = "train" if self.model.training else "eval"
        parts = self.current_gradient_accumulation_steps if mode == "train" else 1
        processes = self.accelerator.num_processes
        # TRL counts the tokens of a generation batch, which has steps_per_generation parts.
        of_generation = parts / self.args.steps_per_generation if mode == "train" else 1.0
        loss, metrics = policy_loss(
            self.objective,
            policy_logprobs=logprobs,
            behavior_logprobs=logprobs.detach() if old is None else old,
            advantages=inputs["advantages"],
            response_mask=mask.bool(),
            denominators=Denominators(
                responses=float(mask.size(0) * parts * processes),
                tokens=float(inputs["num_items_in_batch"]) * of_generation,
            ),
            metrics="summary",
        )
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)
        return loss * processes  # TRL adds the parts and averages over processes
