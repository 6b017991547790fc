"""Refused settings, files and models: a row is a case, with words of its one error.

A new refusal is a row here if it needs no more than its settings, its file or its config.json. A
command with a folder of its own, which must also stay as it is, is a row of
`tests/functional/bad_inputs.py`.
"""

import json
import math
import re

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.sections import ColumnsSection
from megatron_rl.data.rows import check_prompt_file
from megatron_rl.models.shape import read_model_shape
from megatron_rl.objectives import build_objective
from tests.unit.models.test_config_keys import LLAMA3, YARN, base
from tests.unit.preflight.test_settings import EXPERTS, check

MINIMAL = "model: {path: m}\ndata: {train: t.parquet}\n"


def refused(words):
    """Expect an error with these words, between which " ... " stands for any others."""
    return pytest.raises(ValueError, match=".*".join(map(re.escape, words.split(" ... "))))


# Settings on the command line, added to MINIMAL.
SETTINGS = [
    ("rollout.prompts_per_step=10", "rollout.prompts_per_step=10 cannot be split into"),
    ("optimizer.min_learning_rate=1", "min_learning_rate is above"),
    ("rollout.top_p=0.9 & rollout.min_p=0.1",
     "rollout.top_p=0.9 and rollout.min_p=0.1 needs rollout.top_k, which bounds"),
    ("advantage.estimator=leave_one_out & advantage.std=none",
     "advantage.std=none: no effect with advantage.estimator=leave_one_out, which divides"),
    ("eval={samples: 6, sets: {a: a.parquet}} & trainer.keep_best=eval/a/pass@3",
     "not a score of this run's evaluations; give true, or eval_macro or eval/a followed by "
     "/avg@6, /pass@2, /pass@4, /pass@6, /maj@6"),
    ("advantage.beta=0.5", "no effect with advantage.estimator=group_relative"),
    ("optimizer.min_learning_rate=1e-7", "no effect with optimizer.decay=constant"),
    ("replay.capacity=2", "no effect with replay.fresh=1"),
    ("eval.sets={math/x: a.parquet}", "eval.sets.math/x"),
    ("eval.sets={a: 3}", "eval.sets.a=3: must be a path, or a mapping of path and"),
    ("reward.weights={a-b: 1}", "reward.weights.a-b: its name must be letters, dig"),
    ("workers.variables=[A B]", "workers.variables.0='A B': must be letters, dig"),
    ("lora.targets=[]", "lora.targets=[]: must"),
    ("data.template_arguments={tokenize: true}",
     "tokenize: set by the run, not an argument of the template; remove it"),
    ("optimizer.beta1=1.0", "optimizer.beta1=1.0: must be below 1"),
    ("rollout.gpu_memory_utilization=0", "rollout.gpu_memory_utilization=0: must be above 0"),
    ("run.name=a/b", "run.name='a/b': must be a file name of at most 200 letters, digits, '.',"),
    ("logging.wandb={project: p}", "must be a text, not a mapping; give the text"),
    ("lag.partial_rollouts=8", "set behavior=engine, or cache: recompute"),
    ("logging.keep_rollouts=2.5", "must be all, sampled, or the number of"),
    ("lag.partial_rollouts={every_tokens: 8, cache: drop}", "cache: recompute}"),
    ("eval.sets={a: b} & eval.every=5 & lag.sync_weights_every=2",
     "eval.every=5: the engine gets the current weights only every lag.sync_weights_every=2"),
    ("replay={fresh: 0.001, capacity: 9}", "rounds to no groups or to all of them"),
    ("reward.time_limit_seconds=600",
     "reward.time_limit_seconds=600: one call of the verifier may take longer than trainer."),
    ("lora.rank=8", "lora needs a learning rate of its own"),
    ("lora.dropout=0.1", "lora.dropout=0.1: must be 0: the same weights must give"),
    ("lora.targets=[qkv, qkv]", "lists a linear twice"),
    ("lag.batches=1 & lag.policy=a:B", "policy=a:B and batches=1 both set the lag"),
    ("lag.settings={low: 0}", "settings are those of lag.policy, which is not set"),
    ("data.epochs=2 & trainer.steps=150",
     "data.epochs=2 and trainer.steps=150 both set the length of the run; remove"),
    ("data.epochs=2 & data.too_long=skip & environment={name: 'a:b', max_context_tokens: 9}",
     "data.epochs=2 cannot count the prompts that data.too_long=skip leaves out"),
    ("seed", "not of the form key=value"),
    ("eval={every: 1, every: 2}", "not valid YAML: 'every' is given twice, in lines"),
    # A key of another program names ours; nothing is suggested for its spelling alone.
    ("actor_rollout_ref={rollout: {n: 8}, actor: {fsdp_config: {offload: true}, x: 1}}",
     "  actor_rollout_ref.rollout.n: unknown key; for verl's actor_rollout_ref.rollout.n set "
     "rollout.responses_per_prompt (docs/coming-from.md)\n"
     "  actor_rollout_ref.actor.fsdp_config.offload: unknown key; verl's "
     "actor_rollout_ref.actor.fsdp_config has no counterpart here: Megatron-core trains the "
     "model, in the layout of parallel.* (docs/coming-from.md); leave it out\n"
     "  actor_rollout_ref.actor.x: unknown key; it begins as verl's, but verl 0.9.1 has no"),
    ("rollout.n=8", "rollout.n: unknown key; for verl's actor_rollout_ref.rollout.n"),
    ("+trainer.steps=5", "'+trainer.steps=5': + is Hydra's and not known here; write"),
    ("++rollout.n=8", "rollout.n: unknown key; for verl's actor_rollout_ref.rollout.n"),
    ("rollout.multi_turn={max_assistant_turns: 3, max_parallel_calls: 1}",
     "for verl's actor_rollout_ref.rollout.multi_turn.max_assistant_turns set environment."),
    ("epsilon=0.2", "for TRL's epsilon set objective.constraint.low"),
    ("name=a", "name: unknown key; did you mean run.name?"),
    ("mesh=2", "mesh: unknown key; valid here: seed, behavior, run, model, lora,"),
    ("objective=gspoo", "objective.name: unknown objective 'gspoo'; did you mean 'gspo'?"),
    ("objective=3", "objective=3: must be a name, as in objective: gspo, or a mapping"),
    ("objective.constraint=0.2",
     "objective.constraint is 0.2: give its keys (low, high, space, scale, power, sided), as "
     "{low: 0.0007, high: 0.00095}; or give a new one as {kind: ...} of ppo_clip"),
    ("objective.constraint.low=-1", "objective.constraint: low is -1: it must be >= 0"),
    ("lag.partial_rollouts=x", "lag.partial_rollouts='x': must be a number of tokens, at l"),
    ("trainer.keep_best=3", "trainer.keep_best=3: must be true, false or the name of a score"),
    ("trainer=null", "trainer=null: must be a mapping of steps, epochs,"),
    ("eval.sets={a: {pth: b}}", "eval.sets.a.pth: unknown key; did you mean eval.sets.a.path?"),
    ("rollout.prompts_per_step=2.5", "rollout.prompts_per_step=2.5: must be a whole number"),
    ("run.check_memory=maybe", "run.check_memory='maybe': must be true or false"),
    ("trainer.share_prompts=maybe", "s='maybe': must be true or false, or 'auto'"),
    ("optimizer.learning_rate=.inf", "optimizer.learning_rate=inf: must be a finite number"),
    ("run.resume=yes", "run.resume='yes': must be 'never' or 'auto'"),
    ("optimizer.learning_rate=true", "optimizer.learning_rate=true: must be a number"),
    ("seed=on", "seed=true: must be a number"),
    ("reward.weights={a: yes}", "reward.weights={'a': True}: must be a number"),
    ("rollout.stop_token_ids=[true]", "rollout.stop_token_ids=[True]: must be a number"),
    (r"rollout.stop=['\n\nQ:']", "has a backslash and n; for a line break or a tab write it in"),
    ("data.template_arguments={a: 'False'}", "a is the text 'False', which a template takes"),
    ("data.system_prompt=p/system.txt", "is the name of a file; give the text itself"),
    ("data.columns.prompt=null", "prompt=null: must be a text; put it in quotes"),
    ("rollout.stop=no", "rollout.stop='no': must be a list, such as [no]"),
    ("lag.batches=-1", "lag.batches=-1"),
    ("lag.batches=true", "lag.batches=true: must be a number"),
    ("critic={lora: {rank: 4}, learning_rate: 1e-4} & model.fp8=tensorwise",
     "critic.lora cannot be combined with model.fp8"),
    ("early_stopping.kl=0.1 & trainer.epochs=1", "trainer.epochs=1"),
    ("eval.samples=4", "eval.samples: no effect with no eval.sets; unset one"),
    ("sft={} & advantage.credit=turn", "advantage.credit=turn: has no meaning with sft"),
    ("data.columns.completion=chosen", "completion: no effect with rollouts; it is of sft"),
    ("data.template=raw & data.date=2026-01-31", "data.date: no effect with data.template=raw"),
    ("run.name=" + "a" * 201, "must be a file name of at most 200"),
    ("early_stopping.acceptance=0.9 & objective=sapo & trainer.epochs=2",
     "early_stopping.acceptance=0.9: no effect with objective.name=sapo"),
    ("shaping.overlong.buffer=21 & rollout.max_response_tokens=20",
     "shaping.overlong.buffer=21 is more than"),
    ("environment.name=a:B & environment.max_context_tokens=16 & data.max_prompt_tokens=16",
     "must be above data.max_prompt_tokens=16"),
    ("environment.name=a:B & environment.max_context_tokens=64 & environment.max_turn_tokens=33 "
     "& rollout.max_response_tokens=32 & data.max_prompt_tokens=16",
     "environment.max_turn_tokens=33 is more than all turns"),
    ("environment.name=a:B & environment.max_context_tokens=64 & "
     "environment.time_limit_seconds=60 & rollout.stall_seconds=50 & data.max_prompt_tokens=16",
     "environment.time_limit_seconds=60: one answer may take longer than rollout.stall"),
    ("environment.name=a:B & environment.max_context_tokens=64 & lag.partial_rollouts=8 & "
     "data.max_prompt_tokens=16",
     "lag.partial_rollouts cannot be combined with environment.name"),
    ("environment.name=a:B & environment.max_context_tokens=64 & offline.rollouts=r & "
     "data.max_prompt_tokens=16",
     "offline.rollouts cannot be combined with environment.name"),
    ("environment.name=a:B & environment.max_context_tokens=64 & environment.max_rewrites=8 & "
     "data.max_prompt_tokens=16",
     "environment.max_rewrites=8 must be below environment.max_tur"),
    ("offline.rollouts=r & eval.sets={held: x.jsonl}",
     "offline.rollouts cannot be combined with eval.sets"),
    ("offline.rollouts=r & reward.weights={correct: 1}", "no effect with offline.rollouts, whose"),
    ("trainer.keep_best=true", "without scores none is best; give eval.sets"),
    ("advantage.estimator=raw & advantage.std=population", "divides by no standard deviation"),
    ("objective.kl={coefficient: 1, estimator: forward_kl, top_k: true}", "top_k is True: it must"),
    ("lora=", "override 'lora=': lora is empty, which would mean null; write null, or a value"),
    ("critic={lora: }", "lora is empty, which would mean null"),
    ("reward.verifier=", "override 'reward.verifier=': reward.verifier is empty, which would"),
    ("logging.wandb=''", "logging.wandb='': is empty; give a value, or null for none"),
    ("model.reference=''", "model.reference='': is empty; give a value, or null"),
    ("eval.sets={h: a} & eval={samples: 4}", "override 'eval={samples: 4}' would drop eval.sets, "
     "which the file or an earlier override gives; write eval.samples=..., or give"),
    ("critic={gamma: 0.9, lora: {rank: 4, alpha: 2}} & critic={gamma: 0.9, lora: {rank: 8}}",
     "would drop critic.lora.alpha"),
    ("offline.rollouts=r & offline.behavior=m & behavior=engine",
     "behavior=engine: no effect with offline.behavior=m, which recomputes the log-probs"),
    ("objective={function: my_losses}",
     "function is 'my_losses': it must be module:function, such as"),
    ("objective={name: gspo, function: m:f}", "objective.name=gspo and objective.function=m:f are"),
    ("objective=function", "objective.function needs 'function'"),
    ("objective={function: m:f, kl: {coefficient: 0.1}}", "objective.kl cannot be combined with"),
    ("objective={function: m:f, entropy_coefficient: 0.1}",
     "objective.entropy_coefficient cannot be combined with"),
    ("objective={function: m:f, rollout_correction: {}}",
     "objective.rollout_correction cannot be combined with"),
    ("objective={function: m:f, constraint: {low: 0.1}}",
     "objective.constraint cannot be combined with"),
    ("objective={function: m:f, constant: 2.0}", "use response_sum or token_sum"),
]  # fmt: skip

# Config files.
FILES = [
    (b"seed: 1\n", "model.path: missing"),
    (b"- a\n- b\n", "must contain a mapping"),
    *((f"model: {{path: m}}\n{key}\n".encode(), f"run.yaml, line {line}: {name} is empty, which")
      for key, name, line in (("lora:", "lora", 2), ("critic:  # none", "critic", 2),
                              ("shaping:\n  overlong:", "overlong", 3),
                              ("critic:\n  value_clip:", "value_clip", 3),
                              ("reward: {verifier: }", "verifier", 2))),
    (b"model: {path: m}\n# caf\xe9\n", "run.yaml, line 2: byte 0xe9 is not UTF-8; save the"),
    (b"model:\n\tpath: m\n", "run.yaml, line 2: not valid YAML: a tab; indent with spaces"),
    (b"a: b\nmodel: {path: m\x07}\n", "run.yaml, line 2: not valid YAML: the character U+0007"),
    (b"model: {path: m\nseed: 1\n", "run.yaml, line 2: not valid YAML: while parsing a flow"),
    (b"a: &x {b: *x}\n", "run.yaml: an alias (*) refers to itself, or nesting is"),
    (b"defaults: &d\n  steps: 1\nmodel.path: m\ndata.train: t\ntrainer: *d\n",
     "  defaults: unknown key; an anchor (&) belongs to a setting: write it where its value is "
     "used first, and refer to it (*) from then on (run.yaml, line 1)"),
    (b"model: {path: m}\ndata: {train: t}\ntrainer:\n  epoch: 1\n  steps: 0\n",
     "  trainer.steps=0: must be at least 1 (run.yaml, line 5)\n"
     "  trainer.epoch: unknown key; did you mean trainer.epochs? (run.yaml, line 4)"),
    (b"model: {path: m}\nseed: 1\nmodel: {path: n}\n", "'model' is given twice, in lines 1 and 3"),
    (MINIMAL.encode() + b"trainer: {steps: 1:30}\n", "trainer.steps='1:30': must be a whole num"),
    (MINIMAL.encode() + b"model.path: b\n", "model.path is given twice, with and without dots"),
]  # fmt: skip

# Keys added to a config.json of a family.
FULL, LOCAL, DELTA = "full_attention", "sliding_attention", "linear_attention"
MODELS = [
    # Read by vLLM and not by transformers, or by neither.
    ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "remove the key for ru"),
    ("Qwen2", {"qk_layernorm": True}, "=true (unknown key) ... ; remove an unknown key"),
    # Of which one value is supported: by all, if not null, by experts, and by one architecture.
    ("Llama", {"is_causal": False}, "is_causal=false (supported: true)"),
    ("Llama", {"rotary_pct": 0.25}, "rotary_pct=0.25 (supported: 1.0)"),
    ("Qwen3Moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
    ("Qwen2", {"qkv_bias": False}, "qkv_bias=false (supported: true)"),
    ("Llama", {"n_routed_experts": 4}, "n_routed_experts=4 (unknown key)"),
    ("Llama", {"compression_config": {}}, "compression_config={}"),
    ("Llama", {"model_type": "qwen2"}, "model_type 'qwen2' ... Qwen2ForCausalLM"),
    ("Qwen3Moe", {"num_experts": 5}, "num_experts other than num_local_experts"),
    ("Qwen2", {"head_dim": 8}, "head_dim 8 other than hidden_size / num_attention_heads"),
    ("GptOss", {"experts_per_token": 3}, "experts_per_token other than num_experts_per_tok"),
    # One expert of each token, whose normalised weight is 1.
    ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "which are then 1"),
    ("GptOss", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with normalized weights"),
    # Values that no model can have.
    ("Qwen2", {"tie_word_embeddings": "false"}, '"false"; it must be true or false'),
    ("Qwen2", {"rms_norm_eps": "1e-6"}, 'rms_norm_eps is "1e-6"; it must be a number: w'),
    ("Qwen2", {"rope_theta": 0}, "rope_theta is 0.0"),
    ("Qwen2", {"num_hidden_layers": True}, "num_hidden_layers is true; it must be a whole"),
    ("Gemma3", {"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be a whole number"),
    ("Qwen3Moe", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts"),
    ("Glm4Moe", {"n_group": 3, "topk_group": 1}, "topk_group=1 of n_group=3 for 4 experts"),
    ("Qwen2", {"hidden_size": "64"},
     'hidden_size is "64"; it must be a whole number: write 64 without quotes'),
    ("Qwen2", {"hidden_size": [64]}, "hidden_size is [64]; it must be a whole number: correct it"),
    ("Qwen2", {"layer_types": "full"}, 'layer_types is "full"; it must be a list of texts'),
    ("Qwen2", {"architectures": "Qwen2ForCausalLM"},
     'architectures is "Qwen2ForCausalLM"; it must be a list of texts: write ["Qwen2ForCausalLM"]'),
    ("Qwen2", {"architectures": [], "model_type": ["qwen2"]},
     'model_type is ["qwen2"]; it must be a text'),
    ("Qwen2", {"architectures": None, "model_type": "opt"},
     'model_type "opt", without architectures, is not supported; choose from'),
    ("Qwen2Moe", {"norm_topk_prob": "false"}, "true or false: write false without quotes"),
    ("Glm4Moe", {"attention_bias": "false"}, "true or false: write false without quotes"),
    # Rotary embeddings.
    ("Qwen2", {"rope_theta": "abc"}, 'rope_theta is "abc"; it must be a number: correct it'),
    ("Qwen2", {"rope_scaling": {**YARN, "rope_theta": "1e4"}}, "number: write 1e4 without quotes"),
    ("Qwen2", {"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; it must be an object'),
    # R1-0528-Qwen3-8B: 0.87825 * (0.1 ln 4 + 1) = 1.
    ("Qwen3", {"rope_scaling": {**YARN, "factor": 4.0, "attn_factor": 0.8782488562869419}},
     'replace it by "attention_factor": 1;'),
    ("Llama", {"rope_scaling": {"type": "default", "factor": 4}}, "factor=4 of rope type"),
    ("Llama", {"rope_scaling": {**YARN, "factor": "3"}}, "factor is '3'"),
    ("Llama", {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "rope_scaling other than"),
    ("Llama", {"rope_parameters": {**YARN, "rope_theta": 7.0}}, "rope_theta 1234.0 and 7.0"),
    ("Llama", {"rope_scaling": {**YARN, "type": "linear"}}, "'yarn' and type 'linear'"),
    ("DeepseekV3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate=false of rope"),
    ("Gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2}}, "per layer type"),
    # Features.
    ("Qwen2", {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ("Qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic' ... depend on the"),
    ("Qwen2", {"rope_parameters": {"rope_type": "proportional"}}, "'proportional'"),
    ("Qwen2", {"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "'yarn' without factor"),
    ("Qwen2", {"rope_parameters": {FULL: {"rope_type": "default"}}}, "per layer type"),
    ("Qwen2", {"partial_rotary_factor": 0.5}, "partial rotary embeddings"),
    ("Qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
    ("Mistral", {"layer_types": [LOCAL]}, "sliding-window attention in some layers"),
    ("Mistral", {"sliding_window": 0}, "sliding_window is 0; it must be null or a whole"),
    ("Mistral", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
    ("Glm4Moe", {"n_group": 2, "topk_group": 2}, "num_experts_per_tok 2 in 2 of 2 groups"),
    ("Glm4Moe", {"n_shared_experts": 0}, "no shared experts"),
    ("DeepseekV3", {"v_head_dim": 10}, "v_head_dim 10 above the 9 of keys"),
    ("Gemma3", {"sliding_window": None}, "sliding_window null"),
    ("Gemma3", {"layer_types": ["chunked_attention", FULL]}, "layer type 'chunked_attention'"),
    ("Gemma3", {"layer_types": [FULL]}, "1 layer_types for all layers"),
    ("Gemma3", {"rope_parameters": {LOCAL: {"rope_type": "linear", "factor": 2.0}}},
     "rope parameters per layer type"),
    ("GptOss", {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
     "rope parameters other than"),
    ("GptOss", {"layer_types": [FULL, LOCAL]}, "other than a full layer after 1 local"),
    ("GptOss", {"quantization_config": {"quant_method": "mxfp4"}},
     "quantized weights ... , MXFP4 experts (transformers ... Mxfp4Config(dequantize=True)"),
    ("Qwen3_5Moe", {"output_gate_type": "sigmoid"}, "type 'sigmoid' (supported: silu)"),
    ("Qwen3_5Moe", {"layer_types": [DELTA] * 3}, "layer_types with one type only"),
    ("Qwen3_5Moe", {"linear_num_value_heads": 5}, "5, no multiple of linear_num_key_heads 2"),
    ("Qwen3_5Moe", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be a whole"),
]  # fmt: skip

# What differs from a dense model of 8 heads, 2 of keys and values, and 90 feed-forward units; the
# number of processes; settings; words of the error, or none where the settings are accepted.
FOUR = {"num_key_value_heads": 4}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "head_dim": 64,
           "num_experts_per_tok": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5}  # fmt: skip
WHOLE = "parallel.tensor=2 & parallel.expert=2 & parallel.expert_tensor=1"
ADAPTERS = "optimizer.learning_rate=1e-4 & lora.push=adapters & lora.targets=[qkv]"
LAYOUTS = [
    # 4 does not divide the 90 units of a dense layer (the model has none) but the 20 of an expert.
    (EXPERTS, 2, "parallel.tensor=2 & rollout.tensor=1", ""),
    (EXPERTS | FOUR, 4, "parallel.tensor=4 & rollout.tensor=4", ""),
    (EXPERTS, 4, "parallel.expert=4", "parallel.expert=4 ... 6 experts; choose from 1, 2, 3, 6"),
    (EXPERTS, 20, "parallel.tensor=2 & parallel.expert=2 & parallel.expert_tensor=5",
     "parallel.expert_tensor=5 does not divide parallel.tensor=2"),
    (EXPERTS, 20, "parallel.tensor=2 & parallel.expert_tensor=1",
     "parallel.expert_tensor=1 is below parallel.tensor=2, which needs"),
    (EXPERTS, 2, "parallel.tensor=2 & parallel.expert=2", ""),
    (GPT_OSS, 4, "parallel.tensor=2", "expert_tensor=2 does not divide ... 1 expert with"),
    (GPT_OSS, 4, f"{WHOLE} & rollout.tensor=4",
     "rollout.tensor=4: vLLM does not copy the 2 key-value heads of GptOss ... to 4 ranks; at m"),
    (GPT_OSS, 4, f"{WHOLE} & model.transformer_engine=true",
     "attention sinks and experts with a clamped activation, which Transformer Engine's"),
    (GPT_OSS, 4, f"{WHOLE} & rollout.tensor=2", ""),
    (EXPERTS | FOUR, 4, "parallel.tensor=4 & parallel.expert=2 & parallel.expert_tensor=2 & "
     "optimizer.learning_rate=1e-4 & lora.targets=[qkv]", "expert_tensor=2 can"),
    (EXPERTS | FOUR, 4, "parallel.expert=2 & optimizer.learning_rate=1e-4 & lora.targets=[fc1]",
     "lora.targets=['fc1'] are in experts only"),
    (EXPERTS | FOUR, 4,
     "parallel.tensor=2 & parallel.expert=2 & optimizer.learning_rate=1e-4 & lora.rank=8", ""),
    (EXPERTS, 1, ADAPTERS, "lora.push=adapters: the model has experts, which vLLM"),
    ({}, 1, f"{ADAPTERS} & lora.rank=513", "lora.rank=513 is above 512, vLLM's largest with lora."),
    ({}, 1, f"{ADAPTERS} & lora.rank=512", ""),
    ({}, 1, "model.routing_replay=behavior", "model.routing_replay=behavior: ... has no experts"),
    (EXPERTS, 1, "model.routing_replay=behavior", ""),
    ({}, 2, "parallel.pipeline=2 & parallel.stage_layers=[1,2]",
     "parallel.stage_layers=[1, 2] must ... sum of 2, or be"),
    ({"num_hidden_layers": 3}, 2, "parallel.pipeline=2 & parallel.stage_layers=[1,2]", ""),
    ({"num_hidden_layers": 3}, 2, "parallel.pipeline=2", ""),
    ({}, 1, "objective={name: oapl, beta: 0.1}", "set advantage.estimator=optimal_value"),
    ({}, 1, "objective={name: oapl, beta: 0.1} & advantage={estimator: optimal_value, beta: 0.5}",
     ""),
    # Each of the 2 key-value heads is repeated on 4 of 8 engine ranks; 88 = 8 * 11.
    ({"intermediate_size": 88}, 8, "rollout.tensor=8", ""),
    ({}, 3, "rollout.tensor=3", "rollout.tensor=3: ... do not fit"),
    ({}, 3, "rollout.tensor=2", "rollout.tensor=2: ... does not divide the 3 ranks"),
]  # fmt: skip

# Named objectives with options.
OBJECTIVES = [
    ("pnpo", {"constraint": {"low": -0.001}}, "low is -0.001: it must be >= 0"),
    ("pnpo", {"constraint": {"high": math.nan}}, "high is nan: it must be a finite number"),
    ("pnpo", {"constraint": {"high": "wide"}}, "high is 'wide': it must be a number"),
    ("grpo", {"constraint": {"low": 1.5}}, "because ratios never are"),
    ("grpo", {"constraint": {"low": 1.0}}, "use None for no lower bound"),
    ("grpo", {"constraint": {"dual": 0.5}}, "dual is 0.5: it must be > 1"),
    ("pnpo", {"constraint": {"sided": "left"}}, "sided is 'left': choose one of both, adv"),
    ("pnpo", {"constraint": {"power": 0.5}}, "give a power with scale"),
    ("ctpo", {"constraint": {"scale": "constant"}}, "give a power with scale"),
    ("gspo", {"constraint": {"scale": "sqrt(L/t)"}}, "same at every position"),
    ("pnpo", {"constraint": {"low": None, "high": None}}, "does nothing"),
    ("minpro", {"gradient": "through_weight"}, "'prefix_min' cannot be differentiated"),
    ("pnpo", {"constant": 8.0}, "constant 8.0 divides sums"),
    ("pnpo", {"aggregation": "mean"}, "aggregation is 'mean': choose one of response_mean"),
    ("pnpo", {"weight": "prefix"}, "weight is 'prefix': choose one of token, prefix_mean"),
    ("pnpo", {"constraint": {"kind": "hard_gates"}}, "did you mean 'hard_gate'"),
    ("pnpo", {"constraint": {"kind": "hard_gate", "low": 0.001}}, "needs 'high'"),
    ("pnpo", {"kl": {"coefficient": 0.0}}, "kl: coefficient is 0.0: it must be > 0"),
    ("pnpo", {"kl": {"estimator": "k3"}}, "kl needs 'coefficient'"),
    ("pnpo", {"kl": 0.1}, "objective.kl is 0.1: give its keys (coefficient, estimator, weight"),
    ("pnpo", {"entropy_coefficient": -1.0}, "entropy_coefficient is -1.0"),
    ("pnpo", {"rollout_correction": {"low": 3.0}}, "low 3.0 is not below high 2.0"),
    ("vaco", {"constraint": {"treshold": 1.0}}, "did you mean 'threshold'"),
    ("m2po", {"weight": "prefix_mean"}, "second_moment is of the tokens' own ratios"),
    ("m2po", {"constraint": {"threshold": 0.0}}, "threshold is 0.0: it must be > 0"),
    ("cppo", {"constraint": {"floor": 1.5}}, "floor is 1.5: weights fall from 1 to it"),
    ("topr", {"constraint": {"negative_low": 2.0}}, "negative_low 2.0 is above negative_high"),
    ("asymre", {"gradient": "through_weight"}, "weight 'one' has no gradient"),
    *(("damped_negatives", {"constraint": {"kind": kind, **bounds}},
       f"constraint '{kind}' has no effect on weight 'one'")
      for kind, bounds in (("hard_gate", {"low": 0.1, "high": 0.1}), ("taper", {}),
                           ("soft_gate", {}), ("gamma_kernel", {}))),
    ("positive_only", {"off_policy_mask": 0.1}, "of which no term is left"),
    ("oapl", {"weight": "token"}, "objective 'oapl' has no option 'weight'"),
    ("oapl", {"beta": 0.0}, "beta is 0.0: it must be > 0"),
    ("grpo", {"kl": {"coefficient": 1.0, "estimator": "jsd", "weighted": True}},
     "weight 'token' and constraint 'ppo_"),
    ("pnpo_one_sided", {"kl": {"coefficient": 1.0, "estimator": "jsd", "weighted": True}},
     "constraint 'hard_gate'"),
    ("pnpo", {"kl": {"coefficient": 1.0, "estimator": "k3", "weighted": True}},
     "which has a weight already"),
    ("grpo", {"kl": {"coefficient": 1.0, "estimator": "k3", "top_k": 8}},
     "kl.top_k is 8 with estimator 'k3'"),
    ("grpo", {"kl": {"coefficient": 1.0, "estimator": "jsd", "top_k": 0}}, "kl.top_k is 0"),
    ("m2po", {"kl": {"coefficient": 1.0, "estimator": "advantage"}},
     "'advantage' with balanced or second_moment"),
    ("balanced", {"kl": {"coefficient": 1.0, "estimator": "advantage"}},
     "'advantage' with balanced or second_moment"),
    ("grpo", {"advantage_coefficient": 0},
     "nothing would be trained: set kl, with the teacher as"),
]  # fmt: skip

# Files of prompts, whose columns are `question` and `answer`.
FIRST = b'{"question": "a", "answer": 7}\n'
PROMPTS = [
    ("csv", b"question,answer\na,b,7\n",
     "row 1 after the header has 3 fields, and the header 2; qu"),
    ("csv", b"question,answer\na,7\nb\n", "row 2 after the header has fewer fields"),
    ("csv", b'question,answer\n"a"b,7\n', 'line 2 is not CSV: \',\' expected after \'"\''),
    ("csv", b"question,answer\n\xff,7\n", "is not CSV: 'utf-8' codec can't decode byte 0xff"),
    ("csv", b"question;answer\na;7\n",
     "has no commas between columns, its first line is 'question;answer'"),
    ("csv", b"question,answer\n", "holds no prompts"),
    ("jsonl", FIRST + b"{", "set.jsonl, line 2 is not JSON: Expecting property name"),
    ("jsonl", FIRST + b"[1]", "set.jsonl, line 2 is no JSON object: [1]"),
    ("jsonl", FIRST + b"{}",
     "set.jsonl, line 2: question must be a text or a list of chat messages, got None"),
    ("jsonl", FIRST + b'{"question": "a"}',
     "line 2: answer must be a non-empty text or a number, got None"),
    ("jsonl", FIRST + b'{"question": "a", "answer": true}',
     "line 2: answer must be a non-empty text or a num"),
    ("jsonl", FIRST + b'{"question": "\xff", "answer": 1}',
     "set.jsonl, line 2 is not JSON: 'utf-8' codec"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "words"), SETTINGS)
def test_settings_are_refused_in_plain_words(tmp_path, given, words):
    """No type of Python's or pydantic's in a message."""
    (tmp_path / "config.yaml").write_text(MINIMAL)
    with refused(words) as error:
        load_config(tmp_path / "config.yaml", given.split(" & "))
    assert not re.search(r"megatron_rl|Section|pydantic|\.(int|str|bool)=", str(error.value))


@pytest.mark.parametrize(("content", "words"), FILES)
def test_files_are_refused_by_name_and_line(tmp_path, content, words):
    (tmp_path / "run.yaml").write_bytes(content)
    with refused(words):
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(("name", "changes", "words"), MODELS)
def test_models_are_refused_by_the_key_of_config_json(tmp_path, name, changes, words):
    for config in (base(name), base(name) | changes):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if config == base(name):
            assert read_model_shape(tmp_path).architecture == f"{name}ForCausalLM"
    with refused(words):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(("sizes", "processes", "given", "words"), LAYOUTS)
def test_layouts_are_accepted_or_refused(tmp_path, sizes, processes, given, words):
    if not words:
        assert check(tmp_path, sizes, processes, given)
        return
    with refused(words):
        check(tmp_path, sizes, processes, given)


@pytest.mark.parametrize(("name", "options", "words"), OBJECTIVES)
def test_objectives_are_refused(name, options, words):
    with refused(words):
        build_objective(name, **options)


@pytest.mark.parametrize(("ending", "content", "words"), PROMPTS)
def test_prompt_files_are_refused_before_a_tokenizer_is_loaded(tmp_path, ending, content, words):
    (tmp_path / f"set.{ending}").write_bytes(content)
    with refused(words):
        check_prompt_file(
            tmp_path / f"set.{ending}", ColumnsSection(prompt="question", answer="answer")
        )
