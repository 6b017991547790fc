"""Run the code of docs/use-in-your-trainer.md in TRL and verl.

    pip install --target OTHER --no-deps verl==0.9.1 ray==2.60.0 tensordict==0.10.0 \
        accelerate==1.15.0 datasets==5.2.0 peft==0.21.2 hydra-core==1.3.8 omegaconf==2.4.0 \
        antlr4-python3-runtime==4.9.3 torchdata==0.11.0 codetiming cloudpickle dill fsspec msgpack \
        multiprocess orjson pandas python-dateutil pytz pyvers six wandb xxhash
    PYTHONPATH=.:OTHER python research/tools/try_in_trainers.py verl
    pip install --target TRL --no-deps trl==1.16.0  # verl wants an older one or none
    PYTHONPATH=.:TRL:OTHER python research/tools/try_in_trainers.py trl

The code is extracted from the page unchanged. A tiny model is updated with plain SGD on the CPU,
from whole minibatches, from accumulated parts and, in verl, on two processes. The weights must be
the same; in verl they must also match PNPO's equation (`megatron_rl/objectives/padded.py`, in
float64) on the same tokens. Exits with 1 if an update differs by more than 1e-4 of its norm.

verl's trainer is a Ray process that sends commands to its workers. This script sends the same
commands to verl's workers (`TrainingWorker`, FSDP 2, `ppo_loss`), on a CPU platform that it adds to
verl's registry.
"""

import argparse
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.objectives import build_objective
from megatron_rl.objectives.padded import pnpo_loss

TOLERANCE = 1e-4  # float32 gradients are summed in a different order
VERL_UPDATES = 2  # the first has a ratio of 1, the second a gate
VERL_LEARNING_RATE = 0.1
GATE = 0.05  # wider than published: float32 weights need larger steps
ROWS, PROMPT, RESPONSE = 8, 4, 12


def code_of_page(marker: str) -> dict[str, Any]:
    """Return the definitions of the page's code block with this marker."""
    page = Path(__file__).parents[2] / "docs" / "use-in-your-trainer.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (code,) = (block for block in blocks if marker in block)
    namespace: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), namespace)
    return namespace


def tiny_model() -> Any:
    """Build a Qwen2 with one layer and 32 tokens, always with the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def flat(model: Any) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def compare(what: str, update: Tensor, expected: Tensor) -> float:
    """Print and return the relative difference of two updates."""
    assert expected.norm() > 0, "the update is zero, so there is nothing to compare"
    difference = float((update.double() - expected.double()).norm() / expected.double().norm())
    print(f"{what}: {difference:.1e}", flush=True)
    return difference


# TRL


def trl_update(objective: str, accumulation: int) -> Tensor:
    """Return the change of the weights in one update of TRL's trainer on 8 responses."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig

    words = ["<pad>", "<eos>", *(str(number) for number in range(30))]
    vocabulary = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>"
    )
    model = tiny_model()
    before = flat(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, seed=1, report_to=[], save_strategy="no",
            per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
            num_generations=2, max_completion_length=12, max_steps=1, optim="sgd",
            learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, beta=0.0,
        )  # fmt: skip
        trainer = code_of_page("GRPOTrainer")["PNPOTrainer"](
            model=model,
            args=arguments,
            reward_funcs=lambda completions, **_: [float(len(text) % 5) for text in completions],
            train_dataset=Dataset.from_dict({"prompt": [f"{n} {n + 1}" for n in range(8)]}),
            processing_class=tokenizer,
        )
        trainer.objective = build_objective(objective)
        trainer.train()
    return flat(model) - before


def try_trl() -> float:
    """Return the largest difference between whole and accumulated updates in TRL's trainer."""
    import trl

    print(f"TRL {trl.__version__}")
    worst = 0.0
    for objective in ("pnpo", "dapo"):  # a response mean and a token mean
        whole = trl_update(objective, 1)
        for parts in (2, 4):
            what = f"{objective}, {parts} accumulated parts against the whole"
            worst = max(worst, compare(what, trl_update(objective, parts), whole))
    return worst


# verl


def verl_batch() -> dict[str, Tensor]:
    """Build eight rows in verl's format: prompts padded left, responses right, masked tokens."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (ROWS, columns), generator=generator)

    prompt_mask = (torch.arange(PROMPT) >= PROMPT - draw(1, PROMPT + 1, 1)).long()
    response_mask = (torch.arange(RESPONSE) < draw(1, RESPONSE + 1, 1)).long()
    prompts = draw(2, 32, PROMPT) * prompt_mask
    responses = draw(2, 32, RESPONSE) * response_mask
    trained = response_mask * (draw(0, 100, RESPONSE) < 85)
    trained[:, 0] = 1
    attention = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompts, "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": trained,
        "advantages": torch.randn(ROWS, 1, generator=generator) * trained,
    }  # fmt: skip


def verl_on_cpu() -> None:
    """Register a "cpu" platform in verl, with the same FSDP engine as on CUDA."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    memory = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    device = SimpleNamespace(
        **dict.fromkeys((*memory, "empty_cache", "synchronize"), nothing),
        get_device_name=lambda: "CPU",
        mem_get_info=lambda: (0, 0),
    )

    class PlatformCpu(PlatformCUDA):
        device_name = vendor_name = "cpu"
        device_module = device
        current_device = staticmethod(lambda: torch.device("cpu"))
        is_available = staticmethod(lambda: True)
        empty_cache = synchronize = set_device = staticmethod(nothing)

    platform_manager.set_platform(PlatformCpu())
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"


def verl_worker(model: str, rows: int) -> Any:
    """Build verl's actor worker with the page's loss, in float32."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    page = code_of_page("register_policy_loss")
    page["PNPO"] = build_objective("pnpo", constraint={"low": GATE, "high": GATE})
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=precision, use_torch_compile=False,
        micro_batch_size_per_gpu=rows, infer_micro_batch_size_per_gpu=rows, use_dynamic_bsz=False,
    )  # fmt: skip
    actor = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=rows, rollout_n=2, fsdp_config=engine,
        policy_loss=PolicyLossConfig(loss_mode="megatron_rl_pnpo"),
    )  # fmt: skip
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model, load_tokenizer=False, override_config={"attn_implementation": "eager"},
            use_remove_padding=False, enable_gradient_checkpointing=False,
        ),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(
            optimizer="SGD", lr=VERL_LEARNING_RATE, weight_decay=0.0, clip_grad=1e9,
            total_training_steps=VERL_UPDATES,
        ),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, actor))
    return worker


def verl_process(rank: int, processes: int, rows: int, folder: str) -> None:
    """Run one of verl's workers: old log-probs, then updates, as in `RayPPOTrainer`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "unused", "MASTER_PORT": "unused"}  # verl requires them
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes
    )
    verl_on_cpu()
    from verl import DataProto
    from verl.utils import tensordict_utils as verl_data
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    worker = verl_worker(f"{folder}/model", rows)
    mine = {name: value.chunk(processes)[rank] for name, value in verl_batch().items()}

    def unpadded(**settings: Any) -> Any:
        batch = DataProto.from_dict(tensors=mine, meta_info={"temperature": 1.0})
        data = left_right_2_no_padding(batch.to_tensordict())
        verl_data.assign_non_tensor(data, calculate_entropy=False, **settings)
        return data

    data = unpadded(compute_loss=False)
    log_probs = verl_data.get(worker.infer_batch(data), "log_probs")
    mine["old_log_probs"] = no_padding_2_padding(log_probs, data).float()
    sizes = {"global_batch_size": ROWS, "mini_batch_size": ROWS, "epochs": VERL_UPDATES}
    order = {"seed": 1, "dataloader_kwargs": {"shuffle": False}}
    output = worker.train_mini_batch(unpadded(compute_loss=True, **sizes, **order))
    weights = {name: tensor.cpu() for name, tensor in worker.engine.get_per_tensor_param()[0]}
    if rank == 0:
        torch.save((weights, verl_data.get(output, "metrics")), f"{folder}/result.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def equation_update() -> Tensor:
    """Compute the same updates from PNPO's equation, in float64, with plain transformers."""
    batch, model = verl_batch(), tiny_model().double()
    before, behavior = flat(model), None
    for _ in range(VERL_UPDATES):
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
        ).logits[:, PROMPT - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1)
        logprobs = logprobs.gather(2, batch["responses"][:, :, None]).squeeze(2)
        behavior = logprobs.detach() if behavior is None else behavior
        mask = batch["response_mask"].bool()
        advantages = batch["advantages"][:, 0].double()
        loss = pnpo_loss(logprobs, behavior, advantages, mask, low=GATE, high=GATE)
        model.zero_grad()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=VERL_LEARNING_RATE).step()
    return flat(model) - before


def try_verl() -> float:
    """Return the largest difference between verl's updates and the equation's."""
    import verl

    print(f"verl {verl.__version__}")
    worst, expected = 0.0, equation_update()
    for processes, rows in ((1, ROWS), (1, 2), (2, 2)):
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model()
            before = flat(model)
            model.save_pretrained(f"{folder}/model")
            torch.multiprocessing.spawn(verl_process, (processes, rows, folder), processes)
            weights, metrics = torch.load(f"{folder}/result.pt", weights_only=False)
        update = torch.cat([weights[name].reshape(-1) for name, _ in model.named_parameters()])
        accepted = ", ".join(f"{part:.2f}" for part in metrics["actor/gate/acceptance"])
        what = f"{processes} processes, micro-batches of {rows}, accepted {accepted}"
        worst = max(worst, compare(what, update - before, expected))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=("trl", "verl"))
    worst = try_trl() if parser.parse_args().trainer == "trl" else try_verl()
    sys.exit("the updates differ" if worst > TOLERANCE else 0)


if __name__ == "__main__":
    main()
