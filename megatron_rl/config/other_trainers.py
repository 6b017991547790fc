"""Settings of verl and TRL with their counterparts here, for those who bring a config of these.

`docs/coming-from.md` has those whose meaning or default differs; a test compares them.
Names of verl 0.9.1 (`trainer/config`) and TRL 1.16.0 (`GRPOConfig`, `ModelConfig`).
"""

from collections.abc import Iterator
from typing import Any

PAGE = "docs/coming-from.md"
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))

# None: no counterpart. A key stands for those below it that are not in the table.
VERL: dict[str, str | None] = {
    "data.train_files": "data.train, or data.mix for several files",
    "data.val_files": "eval.sets",
    "data.prompt_key": "data.columns.prompt",
    "data.reward_fn_key": "data.columns.source",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.filter_overlong_prompts": "data.too_long: skip",
    "data.apply_chat_template_kwargs": "data.template_arguments",
    "data.seed": "seed",
    "data.shuffle": None,
    "data.truncation": None,
    f"{_MODEL}.path": "model.path",
    f"{_MODEL}.trust_remote_code": "model.trust_remote_code",
    f"{_MODEL}.enable_gradient_checkpointing": "trainer.recompute: full",
    f"{_MODEL}.lora_rank": "lora.rank",
    f"{_MODEL}.lora_alpha": "lora.alpha",
    f"{_MODEL}.lora_adapter_path": "lora.path",
    f"{_MODEL}.target_modules": "lora.targets",
    f"{_MODEL}.lora": "lora.*",
    f"{_ACTOR}.ppo_mini_batch_size": (
        "trainer.minibatches = data.train_batch_size / ppo_mini_batch_size"
    ),
    f"{_ACTOR}.ppo_epochs": "trainer.epochs",
    f"{_ACTOR}.ppo_micro_batch_size": "trainer.tokens_per_micro_batch, in tokens",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "trainer.tokens_per_micro_batch, in tokens",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    f"{_ACTOR}.use_dynamic_bsz": "trainer.tokens_per_micro_batch (always packed)",
    f"{_ACTOR}.clip_ratio": "objective.constraint.low and objective.constraint.high",
    f"{_ACTOR}.clip_ratio_low": "objective.constraint.low",
    f"{_ACTOR}.clip_ratio_high": "objective.constraint.high",
    f"{_ACTOR}.clip_ratio_c": "objective.constraint.dual",
    f"{_ACTOR}.loss_agg_mode": "objective.aggregation",
    f"{_ACTOR}.policy_loss.loss_mode": "objective.name",
    f"{_ACTOR}.entropy_coeff": "objective.entropy_coefficient",
    f"{_ACTOR}.use_kl_loss": "objective.kl",
    f"{_ACTOR}.kl_loss_coef": "objective.kl.coefficient",
    f"{_ACTOR}.kl_loss_type": "objective.kl.estimator",
    f"{_ACTOR}.optim.lr": "optimizer.learning_rate",
    f"{_ACTOR}.optim.lr_warmup_steps": "optimizer.warmup_steps",
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": "optimizer.warmup_steps, a number of steps",
    f"{_ACTOR}.optim.lr_decay_style": "optimizer.decay",
    f"{_ACTOR}.optim.lr_scheduler_type": "optimizer.decay",
    f"{_ACTOR}.optim.min_lr": "optimizer.min_learning_rate",
    f"{_ACTOR}.optim.weight_decay": "optimizer.weight_decay",
    f"{_ACTOR}.optim.betas": "optimizer.beta1 and optimizer.beta2",
    f"{_ACTOR}.optim.clip_grad": "optimizer.max_grad_norm",
    f"{_ACTOR}.grad_clip": "optimizer.max_grad_norm",
    f"{_ACTOR}.megatron.tensor_model_parallel_size": "parallel.tensor",
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": "parallel.pipeline",
    f"{_ACTOR}.megatron.virtual_pipeline_model_parallel_size": "parallel.virtual_stages",
    f"{_ACTOR}.megatron.context_parallel_size": "parallel.context",
    f"{_ACTOR}.megatron.expert_model_parallel_size": "parallel.expert",
    f"{_ACTOR}.megatron.expert_tensor_parallel_size": "parallel.expert_tensor",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "parallel.context",
    f"{_ACTOR}.megatron": None,
    f"{_ACTOR}.fsdp_config": None,
    f"{_ROLLOUT}.n": "rollout.responses_per_prompt",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.top_k": "rollout.top_k",
    f"{_ROLLOUT}.name": None,
    f"{_ROLLOUT}.mode": None,
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tensor",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{_ROLLOUT}.max_num_seqs": "rollout.max_num_seqs",
    f"{_ROLLOUT}.engine_kwargs.vllm": "rollout.engine",
    f"{_ROLLOUT}.enable_prefix_caching": "rollout.engine.enable_prefix_caching",
    f"{_ROLLOUT}.enable_rollout_routing_replay": "model.routing_replay",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "environment.max_turns",
    f"{_ROLLOUT}.multi_turn": "environment.*",
    f"{_ROLLOUT}.val_kwargs.n": "eval.samples",
    f"{_ROLLOUT}.val_kwargs.temperature": "eval.temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "eval.top_p",
    "algorithm.adv_estimator": "advantage.estimator",
    "algorithm.norm_adv_by_std_in_grpo": "advantage.std",
    "algorithm.filter_groups.enable": "dynamic_sampling.rounds",
    "algorithm.filter_groups.max_num_gen_batches": "dynamic_sampling.rounds",
    "algorithm.rollout_correction": "objective.rollout_correction",
    "algorithm.use_kl_in_reward": None,
    "algorithm.kl_ctrl": None,
    "algorithm.gamma": None,
    "algorithm.lam": None,
    "custom_reward_function": "reward.verifier: module:function",
    "reward.custom_reward_function": "reward.verifier: module:function",
    "reward.num_workers": "reward.workers",
    "reward_model": None,
    "critic": None,
    "trainer.total_epochs": "data.epochs",
    "trainer.total_training_steps": "trainer.steps",
    "trainer.nnodes": "nodes in the cluster file, or --nodes",
    "trainer.n_gpus_per_node": "parallel.*, or processes_per_node in the cluster file",
    "trainer.project_name": "logging.wandb",
    "trainer.experiment_name": "run.name",
    "trainer.default_local_dir": "run.dir",
    "trainer.logger": "logging.*",
    "trainer.save_freq": "trainer.checkpoint_every",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.resume_mode": "run.resume",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": None,
}

TRL: dict[str, str | None] = {
    "model_name_or_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dataset_name": "data.train: hf:OWNER/NAME",
    "reward_funcs": "reward.verifier: module:function",
    "reward_weights": "reward.weights",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "resume_from_checkpoint": "run.resume",
    "max_completion_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "chat_template_kwargs": "data.template_arguments",
    "num_generations": "rollout.responses_per_prompt",
    "num_generations_eval": "eval.samples",
    "generation_batch_size": "rollout.prompts_per_step = generation_batch_size / num_generations",
    "steps_per_generation": (
        "trainer.minibatches = steps_per_generation / gradient_accumulation_steps"
    ),
    "num_iterations": "trainer.epochs",
    "per_device_train_batch_size": "trainer.tokens_per_micro_batch, in tokens",
    "gradient_accumulation_steps": (
        "trainer.minibatches = steps_per_generation / gradient_accumulation_steps"
    ),
    "num_train_epochs": "data.epochs",
    "max_steps": "trainer.steps",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.decay",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps, a number of steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "max_grad_norm": "optimizer.max_grad_norm",
    "beta": "objective.kl.coefficient",
    "epsilon": "objective.constraint.low",
    "epsilon_high": "objective.constraint.high",
    "delta": "objective.constraint.dual",
    "loss_type": "objective.name, or objective.aggregation",
    "importance_sampling_level": "objective.name",
    "off_policy_mask_threshold": "objective.off_policy_mask",
    "vllm_importance_sampling_correction": "objective.rollout_correction",
    "vllm_importance_sampling_mode": (
        "objective.rollout_correction.level and objective.rollout_correction.mode"
    ),
    "vllm_importance_sampling_clip_max": "objective.rollout_correction.high",
    "vllm_importance_sampling_clip_min": "objective.rollout_correction.low",
    "scale_rewards": "advantage.std",
    "entropy_coef": "objective.entropy_coefficient",
    "mask_truncated_completions": "shaping.truncated: mask",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "repetition_penalty": None,
    "use_vllm": None,
    "vllm_mode": None,
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor",
    "vllm_max_model_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "max_tool_calling_iterations": "environment.max_turns",
    "gradient_checkpointing": "trainer.recompute: full",
    "bf16": "trainer.dtype",
    "fsdp": "parallel.*",
    "deepspeed": "parallel.*",
    "use_peft": "lora",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.targets",
    "lora_dropout": None,
    "eval_steps": "eval.every",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "report_to": "logging.*",
    "log_completions": "logging.sample_every",
    "logging_steps": None,
    "shuffle_dataset": None,
    "sync_ref_model": None,
    "push_to_hub": None,
}
_ROOTS = {"actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "reward_model"}


def unknown_keys(key: str, value: Any) -> list[str]:
    """Describe the settings of verl or TRL below an unknown key; empty if it is none of theirs."""
    messages = [_counterpart(leaf) for leaf in _leaves(key, value)]
    return [message for message in messages if message is not None]


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value and key not in VERL:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _counterpart(key: str) -> str | None:
    if key in TRL:
        return _describe(key, "TRL", key, TRL[key])
    if (name := _in_verl(key)) is not None:
        return _describe(key, "verl", name, VERL[name])
    if key.partition(".")[0] in _ROOTS:
        return _describe(key, "verl", key, None)
    return None


def _in_verl(key: str) -> str | None:
    """Find the row of a key of verl, given in full or by its last parts."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        if (start := ".".join(parts[:end])) in VERL:
            return start
    ends = [name for name in VERL if name.endswith(f".{key}")]
    is_clear = "." in key or "_" in key or key == "lr"
    return ends[0] if is_clear and len(ends) == 1 else None


def _describe(key: str, tool: str, name: str, ours: str | None) -> str:
    if ours is None:
        return f"{key}: unknown key; {tool}'s {name} has no counterpart here ({PAGE}); remove it"
    return f"{key}: unknown key; for {tool}'s {name} set {ours} ({PAGE})"
