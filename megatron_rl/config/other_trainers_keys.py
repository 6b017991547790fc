"""Settings of verl 0.9.1 and TRL 1.16.0: their counterparts here, or why there is none.

`docs/coming-from.md` has those whose meaning or default differs. Tests compare it with these
tables, and both with the keys of the released configs (`tests/unit/other_trainers/`): of verl
`_generated_ppo_*trainer.yaml` and `sft_trainer_engine.yaml`, of TRL `GRPOConfig`, `SFTConfig`,
`ModelConfig`, the scripts' arguments, and what these inherit from `TrainingArguments`.
"""

NONE = "none: "  # begins the reason why a setting has no counterpart
_ACTOR, _ROLLOUT, _MODEL, _REF = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref")
)
_MEGATRON, _OPTIM = f"{_ACTOR}.megatron", f"{_ACTOR}.optim"


def _none(reason: str, *keys: str, below: str = "") -> dict[str, str]:
    """Return rows of settings without a counterpart; below: section of all of them."""
    prefix = f"{below}." if below else ""
    return {f"{prefix}{key}": f"{NONE}{reason}" for key in keys}


_TEXT_ONLY = "models are trained on text alone"
_CRITIC = "the critic has the layout, optimizer and packs of the policy; its own settings: critic.*"
_BACKENDS = "Megatron-core trains the model, in the layout of parallel.*"
_OFFLOAD = "nothing is offloaded to the host; trainer.recompute and parallel.* save memory"
_LOSS_MEMORY = "the loss computes log-probs and entropy in parts that bound its memory"
_PADDING = "sequences are packed, without padding"
_PROFILER = "timings are in metrics.jsonl and in the report"
_KERNELS = "kernels are those of Megatron-core and Transformer Engine"
_CHECKPOINTS = "a checkpoint has everything for an exact resume, and the trained model is exported"
_ADAMW = "the optimizer is AdamW, with float32 master weights"
_WARMUP = "the warm-up starts at 0 and is linear"
_NO_RAY = "one process for each device trains and generates, without Ray"
_ENGINE = "vLLM runs in the processes of training"
_QUANTIZED = "weights are not quantized; model.fp8 trains in FP8"
_SERVER = "a verifier calls a reward model on your server (docs/rewards.md)"
_KL = "the KL term is in the loss: objective.kl"
_LISTED = "all responses are kept in rollouts/ (logging.keep_rollouts)"

# A key stands for those below it that are not in the table.
VERL: dict[str, str] = {
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
    f"{_ROLLOUT}.n": "rollout.responses_per_prompt",
    f"{_ROLLOUT}.temperature": "rollout.temperature",
    f"{_ROLLOUT}.top_p": "rollout.top_p",
    f"{_ROLLOUT}.top_k": "rollout.top_k",
    f"{_ROLLOUT}.tensor_model_parallel_size": "rollout.tensor",
    f"{_ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{_ROLLOUT}.max_num_seqs": "rollout.max_num_seqs",
    f"{_ROLLOUT}.engine_kwargs.vllm": "rollout.engine",
    f"{_ROLLOUT}.enable_prefix_caching": "rollout.engine.enable_prefix_caching",
    f"{_ROLLOUT}.enable_rollout_routing_replay": "model.routing_replay",
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": "environment.max_turns",
    f"{_ROLLOUT}.val_kwargs.n": "eval.samples",
    f"{_ROLLOUT}.val_kwargs.temperature": "eval.temperature",
    f"{_ROLLOUT}.val_kwargs.top_p": "eval.top_p",
    "algorithm.adv_estimator": "advantage.estimator",
    "algorithm.norm_adv_by_std_in_grpo": "advantage.std",
    "algorithm.filter_groups.enable": "dynamic_sampling.rounds",
    "algorithm.filter_groups.max_num_gen_batches": "dynamic_sampling.rounds",
    "algorithm.rollout_correction": "objective.rollout_correction",
    "custom_reward_function": "reward.verifier: module:function",
    "reward.custom_reward_function": "reward.verifier: module:function",
    "reward.num_workers": "reward.workers",
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
    "data.gen_batch_size": "rollout.prompts_per_step, with dynamic_sampling.rounds",
    "data.tool_config_path": "environment.name: module:class, with its tools",
    "data.function_tool_path": "environment.name: module:class, with its tools",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.messages_key": "data.columns.prompt",
    "data.tools_key": "data.columns.tools",
    "data.enable_thinking_default": "data.template_arguments.enable_thinking",
    "data.max_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "data.max_token_len_per_gpu": "trainer.tokens_per_micro_batch",
    "data.micro_batch_size_per_gpu": "trainer.tokens_per_micro_batch, in tokens",
    "data.use_dynamic_bsz": "trainer.tokens_per_micro_batch (always packed)",
    f"{_MODEL}.lora.rank": "lora.rank",
    f"{_MODEL}.lora.alpha": "lora.alpha",
    f"{_MODEL}.lora.target_modules": "lora.targets",
    f"{_MODEL}.lora.dropout": "lora.dropout, 0 alone",
    f"{_MODEL}.lora.adapter_path": "lora.path",
    f"{_MODEL}.lora.merge": "lora.push",
    f"{_ACTOR}.loss_scale_factor": "objective.constant",
    f"{_MEGATRON}.dtype": "trainer.dtype",
    f"{_MEGATRON}.router_replay": "model.routing_replay",
    f"{_MEGATRON}.override_transformer_config.recompute_granularity": "trainer.recompute",
    f"{_MEGATRON}.max_seqlen_per_dp_cp_rank": "trainer.tokens_per_micro_batch",
    f"{_ACTOR}.fsdp_config.dtype": "trainer.dtype",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": "parallel.context",
    f"{_ACTOR}.torchtitan.tensor_parallel_size": "parallel.tensor",
    f"{_ACTOR}.torchtitan.pipeline_parallel_size": "parallel.pipeline",
    f"{_ACTOR}.torchtitan.context_parallel_size": "parallel.context",
    f"{_ACTOR}.torchtitan.expert_parallel_size": "parallel.expert",
    f"{_ACTOR}.torchtitan.data_parallel_size": "parallel.data",
    f"{_ACTOR}.veomni.expert_parallel_size": "parallel.expert",
    f"{_ACTOR}.veomni.ulysses_parallel_size": "parallel.context",
    f"{_ROLLOUT}.prompt_length": "data.max_prompt_tokens",
    f"{_ROLLOUT}.response_length": "rollout.max_response_tokens",
    f"{_ROLLOUT}.max_model_len": "data.max_prompt_tokens and rollout.max_response_tokens",
    f"{_ROLLOUT}.seed": "seed",
    f"{_ROLLOUT}.dtype": "trainer.dtype",
    f"{_ROLLOUT}.do_sample": "rollout.temperature",
    f"{_ROLLOUT}.expert_parallel_size": "rollout.expert_parallel",
    f"{_ROLLOUT}.max_num_batched_tokens": "rollout.engine.max_num_batched_tokens",
    f"{_ROLLOUT}.cudagraph_capture_sizes": "rollout.engine.cudagraph_capture_sizes",
    f"{_ROLLOUT}.enforce_eager": "rollout.engine.enforce_eager",
    f"{_ROLLOUT}.enable_chunked_prefill": "rollout.engine.enable_chunked_prefill",
    f"{_ROLLOUT}.scheduling_policy": "rollout.engine.scheduling_policy",
    f"{_ROLLOUT}.multi_turn.enable": "environment.name: module:class",
    f"{_ROLLOUT}.multi_turn.max_user_turns": "environment.max_turns",
    f"{_ROLLOUT}.multi_turn.tool_config_path": "environment.name: module:class, with its tools",
    f"{_ROLLOUT}.multi_turn.function_tool_path": "environment.name: module:class, with its tools",
    f"{_ROLLOUT}.agent": "environment.name: module:class",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "resharding.bucket_mib",
    f"{_ROLLOUT}.nnodes": "parallel.engine_ranks",
    f"{_ROLLOUT}.n_gpus_per_node": "parallel.engine_ranks",
    f"{_ROLLOUT}.val_kwargs.do_sample": "eval.temperature, 0 for greedy",
    "algorithm.rollout_correction.rollout_is": "objective.rollout_correction.level",
    "algorithm.rollout_correction.rollout_is_threshold": "objective.rollout_correction.high",
    "algorithm.rollout_correction.rollout_rs": "objective.rollout_correction.mode: mask",
    "algorithm.rollout_correction.rollout_rs_threshold": "objective.rollout_correction.high",
    "algorithm.rollout_correction.bypass_mode": "behavior: engine",
    "distillation.enabled": "objective.kl with model.reference, the teacher",
    "distillation.teacher_models": "model.reference",
    "distillation.teacher_key": "data.columns.source, with model.reference by source",
    "distillation.distillation_loss.loss_mode": "objective.kl.estimator",
    "distillation.distillation_loss.distillation_loss_coef": "objective.kl.coefficient",
    "trainer.resume_from_path": "run.name, with run.resume: auto",
    "trainer.max_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.seed": "seed",
    "trainer.log_val_generations": "logging.sample_every",
    "trainer.rollout_data_dir": "logging.keep_rollouts",
    "trainer.v1.trainer_mode": "lag.batches, with parallel.engine_ranks",
    "trainer.v1.separate_async": "lag.batches, with parallel.engine_ranks",
    "trainer.v1.colocate_async": "lag.batches",
    "trainer.v1.sampler": "lag.policy",
}
VERL |= (
    _none("prompts are shuffled, by seed", "data.shuffle", f"{_ACTOR}.shuffle")
    | _none("no prompt is cut: data.too_long refuses or skips it", "data.truncation")
    | _none("the tokenizer is the one in the folder of model.path", "data.tokenizer",
            f"{_MODEL}.tokenizer_path")
    | _none("a file is read whole; prepare a smaller one", "data.train_max_samples",
            "data.val_max_samples")
    | _none("all prompts of a set are evaluated together", "data.val_batch_size",
            "data.validation_shuffle")
    | _none("prompts are read, checked and tokenized before the start",
            "data.dataloader_num_workers", "data.num_workers", "data.use_shm",
            "data.filter_overlong_prompts_workers", "data.custom_cls",
            "data.return_raw_input_ids", "data.return_raw_chat", "data.return_full_prompt",
            "data.ignore_input_ids_mismatch", "data.enable_thinking_key")
    | _none(_TEXT_ONLY, "data.image_patch_size", "data.image_key", "data.video_key",
            "data.audio_key", "data.return_multi_modal_inputs", "data.mm_processor_kwargs",
            f"{_ACTOR}.freeze_vision_tower")
    | _none(_PADDING, "data.pad_mode", "data.balance_dp_token", f"{_ACTOR}.pad_to_length",
            f"{_ACTOR}.use_remove_padding", f"{_MODEL}.use_remove_padding")
    | _none("the model's own files say this", "hf_config_path", "external_lib",
            "override_config", below=_MODEL)
    | {f"{_MODEL}.custom_chat_template": "data.template"}
    | _none("models are read from the disk", "use_shm", below=_MODEL)
    | _none("all layers of the kinds in lora.targets get adapters", f"{_MODEL}.exclude_modules")
    | _none("adapters are plain LoRA (docs/lora.md)", f"{_MODEL}.lora")
    | _none("heads for several tokens are not trained", f"{_MODEL}.mtp", f"{_ROLLOUT}.mtp")
    | _none(_KERNELS, f"{_MODEL}.use_liger", f"{_MODEL}.use_fused_kernels",
            f"{_MODEL}.fused_kernel_options", f"{_MODEL}.tiled_mlp",
            f"{_ACTOR}.use_torch_compile", f"{_ACTOR}.use_fused_kernels")
    | _none(_OFFLOAD, f"{_MODEL}.enable_activation_offload", f"{_MEGATRON}.param_offload",
            f"{_MEGATRON}.optimizer_offload")
    | _none(_LOSS_MEMORY, f"{_ACTOR}.entropy_from_logits_with_chunking",
            f"{_ACTOR}.entropy_from_logits_chunk_size", f"{_ACTOR}.entropy_checkpointing")
    | _none(_BACKENDS, f"{_ACTOR}.strategy", f"{_ACTOR}.fsdp_config", f"{_ACTOR}.veomni",
            f"{_ACTOR}.torchtitan", _MEGATRON)
    | _none(_CHECKPOINTS, f"{_ACTOR}.checkpoint", "checkpoint", "trainer.default_hdfs_dir",
            "trainer.del_local_ckpt_after_load", "trainer.checkpoint_callback_class",
            "trainer.esi_redundant_time")
    | _none(_QUANTIZED, f"{_ACTOR}.qat", f"{_ROLLOUT}.qat", f"{_ROLLOUT}.quantization",
            f"{_ROLLOUT}.quantization_config_file")
    | _none(_PROFILER, f"{_ACTOR}.profiler", f"{_ROLLOUT}.profiler", "global_profiler",
            "trainer.profile_interval", f"{_ROLLOUT}.prometheus", f"{_ROLLOUT}.trace",
            f"{_ROLLOUT}.disable_log_stats", f"{_ROLLOUT}.moe_load_balance_metrics_interval")
    | _none("runs are reproducible from seed alone", f"{_ACTOR}.data_loader_seed",
            f"{_ROLLOUT}.full_determinism")
    | _none("the entropy is among the metrics", f"{_ACTOR}.calculate_entropy")
    | _none("an objective's own settings are below objective (docs/objectives.md)",
            f"{_ACTOR}.policy_loss", f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg")
    | _none("it is rollout.responses_per_prompt", f"{_ACTOR}.rollout_n")
    | _none("the loss does not need it", f"{_ACTOR}.calculate_sum_pi_squared")
    | _none("trainer.share_prompts does it", f"{_ACTOR}.use_prefix_grouper")
    | _none(_ADAMW, _OPTIM)
    | _none(_WARMUP, f"{_OPTIM}.lr_warmup_init", f"{_OPTIM}.warmup_style")
    | _none("the decay ends with the last step", f"{_OPTIM}.lr_decay_steps",
            f"{_OPTIM}.total_training_steps", f"{_OPTIM}.num_cycles")
    | _none("optimizer.min_learning_rate is an absolute value", f"{_OPTIM}.min_lr_ratio")
    | _none("the frozen reference policy is computed in the policy's layout", _REF)
    | _none(_ENGINE, f"{_ROLLOUT}.name", f"{_ROLLOUT}.mode",
            f"{_ROLLOUT}.engine_kwargs", f"{_ROLLOUT}.skip_tokenizer_init",
            f"{_ROLLOUT}.router_config_path", f"{_ROLLOUT}.disaggregation")
    | _none("engines have rollout.tensor ranks each, and all ranks have one",
            f"{_ROLLOUT}.data_parallel_size", f"{_ROLLOUT}.pipeline_model_parallel_size")
    | _none("as many responses are generated as are trained", f"{_ROLLOUT}.over_sample_rate")
    | _none("the forward pass of behavior log-probs uses trainer.tokens_per_micro_batch",
            *(f"{_ROLLOUT}.log_prob_{name}" for name in (
                "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz",
                "max_token_len_per_gpu")))
    | _none("a response ends at its end token", f"{_ROLLOUT}.ignore_eos")
    | _none("vLLM is sent the policy's weights and caches memory for them while it generates",
            f"{_ROLLOUT}.free_cache_engine", f"{_ROLLOUT}.load_format",
            f"{_ROLLOUT}.layered_summon", f"{_ROLLOUT}.multi_stage_wake_up",
            f"{_ROLLOUT}.checkpoint_engine")
    | _none("log-probs of the policy are always computed", f"{_ROLLOUT}.calculate_log_probs",
            f"{_ROLLOUT}.logprobs_mode")
    | _none("the environment decides it (docs/agents.md)", f"{_ROLLOUT}.multi_turn")
    | _none("evaluation has eval.temperature and eval.top_p", f"{_ROLLOUT}.val_kwargs")
    | _none(_KL, "algorithm.use_kl_in_reward", "algorithm.kl_ctrl", "algorithm.kl_penalty")
    | {
        "algorithm.gamma": "critic.gamma",
        "algorithm.lam": "critic.gae_lambda and critic.target_lambda",
        "critic.cliprange_value": "critic.value_clip",
        "critic.enable": "critic: {} or null",
        "critic.model.path": "critic.path",
        "critic.optim.lr": "critic.learning_rate",
        "trainer.critic_warmup": "critic.warmup_steps",
        "trainer.max_critic_ckpt_to_keep": "trainer.keep_checkpoints: a checkpoint has both models",
    }
    | _none(
        _CRITIC,
            "checkpoint", "data_loader_seed", "forward_max_token_len_per_gpu",
            "forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "fsdp",
            "grad_clip", "loss_agg_mode", "loss_scale_factor", "megatron", "model",
            "nccl_timeout", "optim", "ppo_epochs", "ppo_max_token_len_per_gpu",
            "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
            "ppo_mini_batch_size", "profiler", "rollout_n", "shuffle", "strategy",
            "torchtitan", "ulysses_sequence_parallel_size", "use_dynamic_bsz",
            "veomni",
        below="critic",
    )
    | _none("prompts are not weighted", "algorithm.use_pf_ppo", "algorithm.pf_ppo")
    | _none("groups with equal rewards are left out", "algorithm.filter_groups")
    | _none("correction is per token or sequence, without normalization",
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "algorithm.rollout_correction.loss_type")
    | _none("distillation is objective.kl towards model.reference, on the policy's own devices",
            "distillation")
    | _none(_SERVER, "reward_model", "reward.reward_model")
    | _none("rewards come from reward.verifier", "reward.reward_manager")
    | _none("a verifier calls a sandbox of your own (docs/rewards.md)", "reward.sandbox_fusion",
            "sandbox_fusion")
    | _none(_NO_RAY, "ray_kwargs", "trainer.ray_wait_register_center_timeout", "transfer_queue",
            "trainer.use_v1", "trainer.v1", "actor_rollout_ref.hybrid_engine")
    | _none("resharding.time_limit_seconds and trainer.stall_seconds limit waiting",
            "actor_rollout_ref.nccl_timeout")
    | _none("packs are always balanced over ranks", "trainer.balance_batch")
    | _none("eval.sets are always evaluated before training", "trainer.val_before_train")
    | _none("megatron-rl eval does it", "trainer.val_only")
    | _none(_LISTED, "trainer.validation_data_dir")
    | _none("CUDA devices are used if there are any", "trainer.device")
    | _none("a step is not skipped", "skip")
)  # fmt: skip

TRL: dict[str, str] = {
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
    "eval_steps": "eval.every",
    "save_steps": "trainer.checkpoint_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "report_to": "logging.*",
    "log_completions": "logging.sample_every",
    "reward_model_name_or_path": "reward.verifier: module:function, which calls your server",
    "dataset_config": "data.train: hf:OWNER/NAME with its configuration (docs/prompts.md)",
    "dataset_train_split": "data.train: hf:OWNER/NAME with its split (docs/prompts.md)",
    "dataset_test_split": "eval.sets: {NAME: hf:OWNER/NAME} with its split (docs/prompts.md)",
    "model_revision": "model.path: OWNER/NAME@REVISION",
    "dtype": "trainer.dtype",
    "project": "logging.wandb",
    "seed": "seed",
    "data_seed": "seed",
    "max_length": "data.max_prompt_tokens and rollout.max_response_tokens",
    "dataset_text_field": "data.columns.prompt",
    "chat_template_path": "data.template",
    "metric_for_best_model": "trainer.keep_best",
    "load_best_model_at_end": "trainer.keep_best",
    "vllm_importance_sampling_cap": "objective.rollout_correction.high",
    "hub_model_id": "megatron-rl export --push OWNER/NAME",
    "push_to_hub": "megatron-rl export --push OWNER/NAME",
    "ddp_timeout": "trainer.stall_seconds",
    "fp16": "trainer.dtype",
}
TRL |= (
    _none("the model's own files say this", "model_init_kwargs", "attn_implementation",
          "cache_implementation", "use_cache", "eos_token", "pad_token", "disable_dropout")
    | _none("the router's auxiliary losses are off", "router_aux_loss_coef")
    | _none(_KERNELS, "use_liger_kernel", "liger_kernel_config", "torch_compile",
            "torch_compile_backend", "torch_compile_mode", "cast_lm_head_to_fp32", "tf32")
    | _none(_PADDING, "pad_to_multiple_of", "packing", "packing_strategy", "padding_free",
            "eval_packing", "train_sampling_strategy", "length_column_name")
    | _none("prompts are shuffled, by seed", "shuffle_dataset")
    | _none("prompts are read, checked and tokenized before the start", "dataset_num_proc",
            "dataset_kwargs", "dataset_streaming", "remove_unused_columns", "label_names",
            "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
            "dataloader_persistent_workers", "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context", "dataloader_in_order")
    | _none("no text is cut: data.too_long refuses or skips it", "truncation_mode")
    | _none("the assistant's messages alone are trained: sft.turns", "assistant_only_loss",
            "completion_only_loss")
    | _none("responses are sampled by rollout.*", "generation_kwargs", "repetition_penalty",
            "vllm_structured_outputs_regex")
    | _none(_ENGINE, "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_server_base_url",
            "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
            "use_transformers_continuous_batching", "transformers_continuous_batching_config",
            "use_transformers_paged", "ds3_gather_for_generation")
    | _none("vLLM releases its memory while the model trains", "vllm_enable_sleep_mode",
            "torch_empty_cache_steps")
    | _none("an objective's own settings are below objective (docs/objectives.md)",
            "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos",
            "vespo_k_neg", "vespo_lambda_neg")
    | _none("rewards are added by reward.weights", "multi_objective_aggregation")
    | _none("model.reference is frozen", "sync_ref_model", "ref_model_mixup_alpha",
            "ref_model_sync_steps")
    | _none("all tokens of a response are trained", "top_entropy_quantile")
    | _none("objective.entropy_coefficient is constant", "use_adaptive_entropy",
            "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
    | _none("the KL term is weighted by the likelihood ratio", "use_bias_correction_kl")
    | _none(_TEXT_ONLY, "log_multimodal")
    | _none(_LISTED, "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo")
    | _none("all linear layers of lora.targets get plain adapters (docs/lora.md)",
            "lora_target_parameters", "lora_modules_to_save", "lora_task_type", "use_rslora",
            "use_dora")
    | {"lora_dropout": "lora.dropout, 0 alone"}
    | _none(_QUANTIZED, "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type",
            "use_bnb_nested_quant", "bnb_4bit_quant_storage")
    | _none(_ADAMW, "optim", "optim_args", "optim_target_modules", "lr_scheduler_kwargs")
    | _none("the loss is that of objective, or cross entropy", "label_smoothing_factor",
            "neftune_noise_alpha", "average_tokens_across_devices")
    | _none("trainer.dtype is for training and evaluation", "bf16_full_eval", "fp16_full_eval")
    | _none("trainer.recompute has no settings of its own", "gradient_checkpointing_kwargs")
    | _none(_OFFLOAD, "activation_offloading")
    | _none("trainer.tokens_per_micro_batch bounds memory", "auto_find_batch_size",
            "per_device_eval_batch_size", "eval_accumulation_steps")
    | _none("metrics of every step are in metrics.jsonl and on the console", "logging_steps",
            "logging_strategy", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter",
            "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
            "debug", "skip_memory_metrics")
    | _none("trackio uploads with its own settings", "trackio_space_id", "trackio_bucket_id",
            "trackio_static_space_id")
    | _none("eval.sets are evaluated before training, and then by eval.every", "eval_strategy",
            "eval_delay", "eval_on_start", "do_train", "do_eval", "do_predict")
    | _none("scores come from reward.verifier", "prediction_loss_only", "eval_do_concat_batches",
            "eval_use_gather_object", "include_for_metrics", "batch_eval_metrics",
            "greater_is_better")
    | _none(_CHECKPOINTS, "save_only_model", "save_strategy", "save_on_each_node",
            "enable_jit_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint")
    | _none("a run does not upload; megatron-rl export --push does afterwards", "hub_strategy",
            "hub_token", "hub_private_repo", "hub_always_push", "hub_revision")
    | _none("runs are reproducible from seed alone", "full_determinism")
    | _none("CUDA devices are used if there are any", "use_cpu")
    | _none(_BACKENDS, "accelerator_config", "parallelism_config", "fsdp_config",
            "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
            "ddp_static_graph", "ddp_backend", "local_rank", "ignore_bias_buffers")
)  # fmt: skip
