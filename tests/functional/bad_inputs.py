"""Invalid inputs that a first user may give, and the parts of the expected error message.

Each case starts from its own folder with a valid model, prompts and reward; `prepare` breaks one of
them. `output`: the value, the rule and the fix, as parts of the single message.
"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TRAIN = ["train", "--config", "run.yaml"]
REWARD = "def score(text, ground_truth, data_source):\n    return float(text == ground_truth)\n"
VALID_REWARD = "fair_reward:score"
QUESTION = "Work out 4 + 2 modulo 10."


@dataclass(frozen=True)
class Case:
    """One invalid input."""

    name: str
    output: tuple[str, ...]
    arguments: tuple[str, ...] = ()  # settings of `train`, or a whole command line
    prepare: Callable[[Path], object] = lambda folder: None
    status: int = 1

    @property
    def command(self) -> list[str]:
        """The command line after `megatron-rl`."""
        if self.arguments and "=" not in self.arguments[0]:
            return list(self.arguments)
        return [*TRAIN, *self.arguments]


def write(name: str, text: str) -> Callable[[Path], object]:
    """Write a file in the folder."""
    return lambda folder: (folder / name).write_text(text)


def rows(*made: object) -> Callable[[Path], object]:
    """Write prompts from rows, given as objects or as lines."""
    lines = [one if isinstance(one, str) else json.dumps(one) for one in made]
    return write("train.jsonl", "".join(f"{line}\n" for line in lines))


def row(prompt: object = QUESTION, answer: object = "6", **more: object) -> dict[str, object]:
    """Return a valid row with changes."""
    return {"prompt": prompt, "answer": answer} | more


def good_rows(count: int) -> list[dict[str, object]]:
    """Return different valid rows."""
    return [row(f"Work out {n} + {m} modulo 10.") for n in range(10) for m in range(10)][:count]


def reward(body: str, *, name: str = "my_rewards.py") -> Callable[[Path], object]:
    """Write a user's reward."""
    return write(name, body)


def append(line: str) -> Callable[[Path], object]:
    """Add a line to the config."""

    def add(folder: Path) -> None:
        (folder / "run.yaml").write_text((folder / "run.yaml").read_text() + line + "\n")

    return add


def parquet(name: str, columns: dict[str, list]) -> Callable[[Path], object]:
    """Write a parquet file."""

    def make(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), folder / name)

    return make


def edit_json(name: str, **changes: object) -> Callable[[Path], object]:
    """Change keys of a JSON file; None removes one."""

    def edit(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        kept = {key: value for key, value in values.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))

    return edit


def remove(*names: str) -> Callable[[Path], object]:
    """Remove files."""

    def unlink(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return unlink


def copy(source: str, target: str) -> Callable[[Path], object]:
    """Copy a folder."""
    return lambda folder: shutil.copytree(folder / source, folder / target)


def cut(name: str, size: int) -> Callable[[Path], object]:
    """Truncate a file to `size` bytes; negative: remove that many from its end."""

    def truncate(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:size])

    return truncate


def both(*steps: Callable[[Path], object]) -> Callable[[Path], object]:
    """Run several steps in order."""

    def prepare(folder: Path) -> None:
        for step in steps:
            step(folder)

    return prepare


def saved_run(*models: str) -> Callable[[Path], object]:
    """Write a run with a checkpoint of these models."""

    def save(folder: Path) -> None:
        run = folder / "runs" / "a"
        for model in models:
            (run / "checkpoints" / "step_000001" / model).mkdir(parents=True)
        manifest = {"step": 1, "files": {}, "digests": []}
        file = run / "checkpoints" / "step_000001" / "trainer.json"
        file.write_text(json.dumps(manifest))
        shutil.copy(folder / "run.yaml", run / "config.yaml")
        (run / "metrics.jsonl").write_text('{"step": 1}\n')

    return save


def change_weights(change: Callable[[dict], dict]) -> Callable[[Path], object]:
    """Rewrite the model's tensors."""

    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model" / "model.safetensors"
        tensors = {key: value.clone() for key, value in load_file(file).items()}
        save_file(change(tensors), file)

    return rewrite


OUR_SCORE = "reward.verifier=my_rewards:score"

REWARDS = [
    Case("no such function", ("my_rewards:score", "no function score", "grade"), (OUR_SCORE,),
         reward("score = 3\ndef grade(text, ground_truth, data_source):\n    return 1.0\n")),
    Case("a path with .py", ("my_rewards.py:score", "without .py", "my_rewards:score"),
         ("reward.verifier=my_rewards.py:score",), reward(REWARD)),
    Case("no colon", ("reward.verifier=my_rewards:", "module:function"),
         ("reward.verifier=my_rewards",), reward(REWARD)),
    Case("no such module", ("no module nowhere", "start in the folder of its file, or install it"),
         ("reward.verifier=nowhere:score",)),
    Case("a missing import", ("No module named 'sympyy'", "my_rewards.py, line 1", "install what"),
         (OUR_SCORE,), reward(f"import sympyy\n{REWARD}")),
    Case("it exits while it is imported", ("SystemExit: no licence here", "correct it"),
         (OUR_SCORE,), reward(f"import sys\nsys.exit('no licence here')\n{REWARD}")),
    Case("the signature of TRL", ("my_rewards:score", "docs/rewards.md"), (OUR_SCORE,),
         reward("def score(completions, **kwargs):\n    return [0.0 for _ in completions]\n")),
    Case("it raises",
         ("failed when it was tried: IndexError", "my_rewards.py, line 2", "an empty response"),
         (OUR_SCORE,),
         reward("def score(text, truth, source):\n    return float(text.split()[0] == truth)\n")),
    Case("it returns None", ("my_rewards:score: returned None", "a finite number"), (OUR_SCORE,),
         reward("def score(text, truth, source):\n    text == truth\n")),
    Case("lists of another length", ("returned [0.0, 0.0, 0.0] for 1 responses", "return a list"),
         (OUR_SCORE,),
         reward("def score(texts, ground_truths, data_sources):\n    return [0.0] * 3\n")),
    Case("it exits", ("its process died twice", "return a reward instead"), (OUR_SCORE,),
         reward("import os\n\ndef score(text, truth, source):\n    os._exit(3)\n")),
    Case("it hangs", ("did not grade a response within reward.time_limit_seconds=0.5", "raise it"),
         (OUR_SCORE, "reward.time_limit_seconds=0.5"),
         reward("def score(text, truth, source):\n    while True:\n        pass\n")),
    Case("a key that is not exported", ("workers.variables names JUDGE_KEY", "export it"),
         ("workers.variables=[JUDGE_KEY]",)),
]  # fmt: skip

DATA = [
    Case("no file", ("data.train: /", "/nothing.jsonl does not exist", "give a .parquet, .jsonl",
         "(relative paths start at the folder of the command)"),
         ("data.train=nothing.jsonl",)),
    Case("another ending", ("prompts.txt", ".parquet, .jsonl", "rename or convert"),
         ("data.train=prompts.txt",), write("prompts.txt", "1 + 1\n")),
    Case("bad UTF-8", ("train.jsonl, line 1 is not JSON", "utf-8"), (),
         lambda folder: (folder / "train.jsonl").write_bytes(b'{"prompt": "\xff"}\n')),
    Case("a JSON array", ("train.jsonl is one JSON array", "json.load(open('train.jsonl'))"), (),
         write("train.jsonl", '[\n  {"prompt": "1 + 1", "answer": "2"}\n]')),
    Case("columns of eval.sets in sft", ("eval.sets.held: ", "train.jsonl has no column ",
         "set, as an example, eval.sets.held.columns={prompt: prompt, answer: solution}"),
         ("sft={}", "rollout.responses_per_prompt=1", "data.train=sft.jsonl",
          "eval.sets={held: train.jsonl}", "data.columns.prompt=prompt"),
         both(write("sft.jsonl", json.dumps({"messages": [
              {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "6"}]})),
          rows({"prompt": QUESTION, "solution": "6"}))),
    Case("blank lines", ("train.jsonl holds no prompts",), (), write("train.jsonl", "\n \n")),
    Case("other columns",
         ("has no column prompt, answer; it has question, solution",
          "data.columns={prompt: question"), (), rows({"question": "1 + 1", "solution": "2"})),
    Case("no column of answers", ("has no column answer; it has prompt, solution",
         "data.columns={prompt: prompt, "), (), rows({"prompt": "1 + 1", "solution": "2"})),
    Case("no answer in a row", ("line 2: answer must be a non-empty text or a number", "None"), (),
         rows(row(), row(answer=None))),
    Case("a blank question", ("line 1: prompt must be a text or a list of chat messages",), (),
         rows(row("  "))),
    Case("a message without a role",
         ("line 1: prompt, message 1: a chat message must have a role of system",), (),
         rows(row([{"content": "1 + 1"}]))),
    Case("a solution in the prompt",
         ("line 2: prompt ends with a message of the assistant", "data.columns.prompt"), (),
         rows(row(), row([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
              )),
    Case("a file that is no parquet", ("train.parquet cannot be read as parquet",),
         ("data.train=train.parquet",), write("train.parquet", "no parquet")),
    Case("a prompt that is too long",
         ("train.jsonl, line 7: the prompt has", "tokens, more than data.max_prompt_tokens=48",
          "data.too_long=skip"), (), rows(*good_rows(6), row("4 + " * 5000))),
    Case("fewer prompts than a step needs",
         ("a step of 4 prompts cannot be drawn from a set of 3",
          "use fewer rollout.prompts_per_step or a larger set"), (), rows(*good_rows(3))),
    Case("the same prompt again and again",
         ("cannot be drawn from a set of 1", "19 of 20 rows repeat an earlier row",
          "a column that numbers the rows keeps them apart"), (),
         rows(*[row()] * 20)),
    Case("a mix that starves a set",
         ("data.mix: weights 1, 0.001 give a set none of", "raise its weight"),
         ('data.train=""',
          "data.mix={a: {path: train.jsonl}, b: {path: train.jsonl, weight: 0.001}}")),
    Case("a template that refuses a row",
         ("train.jsonl, line 2: the chat template refuses these messages: no tools here",
          "repair the row"), (),
         both(rows(row(), row([{"role": "tool", "content": "1"}])),
          write("model/chat_template.jinja", "{% for m in messages %}{% if m.role == 'tool' %}"
          "{{ raise_exception('no tools here') }}{% endif %}{{ m.content }}{% endfor %}"))),
    Case("a template that is no template", ("the chat template refuses", "repair"), (),
         write("model/chat_template.jinja", "{% for m in messages %}{{ m.content }}")),
    Case("a template without text", ("the chat template leaves out message 1, of role user",), (),
         write("model/chat_template.jinja", "{# nothing #}")),
    Case("an evaluation set that is missing", ("eval.sets.held: /", "/held.jsonl does not exist",),
         ("eval.sets={held: held.jsonl}",)),
    Case("an evaluation set with a long prompt", ("eval.sets.held: ", "data.max_prompt_tokens=48"),
         ("eval.sets={held: held.jsonl}",), write("held.jsonl", json.dumps(row("4 + " * 99)))),
    Case("a data set of the hub without an owner", ("hf:gsm8k", "hf:OWNER/NAME"),
         ("data.train=hf:gsm8k",)),
    Case("a folder that is no data set", ("empty", "Dataset.save_to_disk"), ("data.train=empty",),
         lambda folder: (folder / "empty").mkdir()),
    Case("arguments of a template that is not used",
         ("no effect with data.template=raw", "uses no chat template", "unset one"),
         ("data.template=raw", "data.template_arguments={enable_thinking: false}")),
]  # fmt: skip

CONFIG = "model/config.json"
WEIGHTS = "model/model.safetensors"
LATENT = edit_json(
    CONFIG,
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    n_group=1,
    topk_group=1,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
)

MODELS = [
    Case("a folder that was not downloaded", ("models/Tiny is not a folder", "if it has this name",
          "hf download OWNER/Tiny --local-dir models/Tiny"), ("model.path=models/Tiny",)),
    Case("a name of the hub", ("Qwen/Qwen3-8B is not a folder", "hf download Qwen/Qwen3-8B"),
         ("model.path=Qwen/Qwen3-8B",)),
    Case("no config.json", ("model/config.json does not exist",), (), remove(CONFIG)),
    Case("a config.json that is no JSON",
         ("model/config.json is not valid JSON", "download it again"), (),
         write(CONFIG, "{hidden_size: 64}")),
    Case("no hidden_size",
         ("model/config.json has no 'hidden_size'", "use the model's complete file"), (),
         edit_json(CONFIG, hidden_size=None)),
    Case("a text as a size", ("model/config.json", "must be a whole number"), (),
         edit_json(CONFIG, num_hidden_layers="2")),
    Case("no layers", ("num_hidden_layers is 0", "1 or more"), (),
         edit_json(CONFIG, num_hidden_layers=0)),
    Case("key-value heads that do not divide",
         ("num_key_value_heads=3 does not divide num_attention_heads=4", "correct it"), (),
         edit_json(CONFIG, num_attention_heads=4, num_key_value_heads=3)),
    Case("another architecture", ("architecture GPT2LMHeadModel is not supported", "Qwen2"), (),
         edit_json(CONFIG, architectures=["GPT2LMHeadModel"])),
    Case("quantized", ("quantized weights", "is not supported"), (),
         edit_json(CONFIG, quantization_config={"bits": 4})),
    Case("head_dim that the CPU engine lacks",
         ("head_dim is 16", "on a CPU vLLM supports only 32, 64", "use another model"), (),
         edit_json(CONFIG, num_attention_heads=4, num_key_value_heads=4)),
    Case("latents that the CPU engine lacks",
         ("kv_lora_rank + qk_rope_head_dim is 24", "on a CPU vLLM supports only 576"), (), LATENT),
    Case("adapters on linears that latent attention lacks",
         ("lora.targets=", "latent attention has no linear for queries", "set it to"),
         ("lora.rank=8", "optimizer.learning_rate=1e-4"), LATENT),
    Case("the engine's routes of a sigmoid router",
         ("model.routing_replay=engine", "untested", "set it to behavior"),
         ("model.routing_replay=engine",), LATENT),
    Case("experts in parallel on a CPU", ("rollout.expert_parallel=true: needs CUDA", "false"),
         ("rollout.expert_parallel=true",)),
    Case("no tokenizer", ("model has no tokenizer", "copy the tokenizer's files"), (),
         remove("model/tokenizer.json", "model/tokenizer_config.json")),
    Case("a tokenizer.json that is cut", ("holds no tokenizer that can be loaded", "copy the"), (),
         cut("model/tokenizer.json", 100)),
    Case("a tokenizer that is code of the folder",
         ("its tokenizer is code of its own (code.Kind", "set model.trust_remote_code=true"), (),
         both(remove("model/tokenizer.json"),
              edit_json("model/tokenizer_config.json", auto_map={"AutoTokenizer": "code.Kind"}))),
    Case("settings that change the tokens of tokenizer.json",
         ("TokenizersBackend encodes '<|im_end|> a", "but tokenizer.json to [2, 9",
          "correct what changes them in tokenizer_config.json"), (),
         edit_json("model/tokenizer_config.json", split_special_tokens=True)),
    Case("a sentencepiece model alone",
         ("no tokenizer.json, and tokenizer.model alone does not determine", "add tokenizer.json"),
         (), both(remove("model/tokenizer.json"), write("model/tokenizer.model", ""))),
    Case("no chat template", ("no chat template", "data.template=raw"), (),
         remove("model/chat_template.jinja")),
    Case("a tokenizer of another model",
         ("model.path: ", "its tokenizer has 25 tokens, but vocab_size in config.json is 20",
          "copy the tokenizer's files"), (),
         both(edit_json(CONFIG, vocab_size=20), change_weights(lambda found: {key:
          (value[:20].clone() if len(value) == 25 else value) for key, value in found.items()}))),
    Case("an end of text outside the vocabulary",
         ("stop token 99 is outside the vocabulary 0..24", "eos_token_id"), (),
         edit_json("model/generation_config.json", eos_token_id=99)),
    Case("no weights", ("contains neither model.safetensors nor", "download it again"), (),
         remove(WEIGHTS)),
    Case("weights of another format", ("no weights to load", "convert pytorch_model.bin"), (),
         both(remove(WEIGHTS), write("model/pytorch_model.bin", "x"))),
    Case("weights that are cut",
         ("model.safetensors is not a complete safetensors file", "bytes", "download it again"), (),
         cut(WEIGHTS, -100)),
    Case("a pointer of Git LFS", ("is a Git LFS pointer", "git lfs pull"), (),
         write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")),
    Case("a tensor is missing", ("model.norm.weight is missing", "download it again"), (),
         change_weights(lambda found: {key: value for key,
          value in found.items() if key != "model.norm.weight"})),
    Case("a tensor of another shape",
         ("has shape (25, 64), but config.json requires (26, 64)", "must be of one model"), (),
         edit_json(CONFIG, vocab_size=26)),
    Case("quantized tensors", ("has dtype I8", "not quantized"), (),
         change_weights(lambda found: {key: value.char() for key, value in found.items()})),
    Case("an index that names a file that is not there",
         ("model-00001-of-00002.safetensors", "does not exist", "download it again"), (),
         both(remove("model/model.safetensors"), write("model/model.safetensors.index.json",
          '{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}'))),
    Case("adapters to start from that are not there",
         ("lora.path: /nowhere has no adapter_config.json", "give a folder"),
         ("lora={path: /nowhere}", "optimizer.learning_rate=1e-4")),
    Case("adapters of a rank that vLLM lacks",
         ("lora.rank=600 is above 512", "lora.push=adapters", "lower it"),
         ("lora={rank: 600, push: adapters}", "optimizer.learning_rate=1e-4")),
    Case("a reference that is not there", ("model.reference: /nowhere/config.json does not exist",),
         ("model.reference=/nowhere", "objective.kl={coefficient: 0.1}")),
    Case("a teacher with another vocabulary",
         ("model.reference: ", "teacher has a vocabulary of 40 tokens", "the same vocab_size"),
         ("model.reference=teacher", "objective.kl={coefficient: 0.1}"),
         both(copy("model", "teacher"), edit_json("teacher/config.json", vocab_size=40))),
    Case("a critic with another vocabulary",
         ("critic.path: ", "critic_model has a vocabulary of 40 tokens", "a critic must have"),
         ("critic.path=critic_model",),
         both(copy("model", "critic_model"), edit_json("critic_model/config.json", vocab_size=40))),
    Case("a critic that is not there", ("critic.path: /nowhere/config.json does not exist",),
         ("critic.path=/nowhere",)),
    Case("a critic together with a baseline of the group",
         ("advantage: no effect with critic", "unset one"),
         ("critic={}", "advantage.estimator=leave_one_out")),
    Case("a critic for an objective of whole responses",
         ("critic: objective.name=oapl does not use advantages of tokens", "another objective"),
         ("critic={}", "objective=oapl")),
    Case("a lambda of tokens for turns",
         ("critic.length_alpha: its lambda follows from the number of tokens", "unset one"),
         ("critic={length_alpha: 0.05, discount: turn}",
          "environment={name: 'a:b', max_context_tokens: 99}")),
    Case("turns without an environment",
         ("critic.discount=turn: without environment a response is one turn", "unset it"),
         ("critic={discount: turn, gae_lambda: 0.5}",)),
    Case("a warm-up of the critic that never ends",
         ("critic.warmup_steps=9 of trainer.steps=2 leaves no step that trains the policy",
          "lower it"),
         ("critic={warmup_steps: 9}", "trainer.steps=2")),
    Case("adapters of a critic at the rate for all weights",
         ("critic.lora needs a learning rate of its own", "critic.learning_rate=1e-05", "set it"),
         ("critic={lora: {rank: 4}}",)),
    Case("two baselines that exclude each other",
         ("critic: objective.name=asymre needs a baseline below the mean reward of a group",
          "choose another objective"),
         ("critic={}", "objective=asymre")),
    Case("an argument of a loss with the name of a value of ours",
         ("objective.function=own_loss:loss takes values, the name of a value that megatron_rl",
          "another name"),
         ("objective.function=own_loss:loss",),
         write("own_loss.py", "def loss(p, b, a, m, s, values):\n    return values\n")),
    Case("adapters of a critic for the engine",
         ("critic.lora: path and push have no effect", "unset them"),
         ("critic={lora: {rank: 4, push: adapters}}",)),
    Case("resampling of groups of one response with a critic",
         ("dynamic_sampling.rounds=2 replaces groups whose rewards are all equal", "unset"),
         ("critic={}", "rollout.responses_per_prompt=1", "dynamic_sampling.rounds=2")),
    Case("a teacher of the same shape with other tokens",
         ("teacher has other tokens than", "differ in added tokens", "the same tokenizer"),
         ("model.reference=teacher", "objective.kl={coefficient: 0.1}"),
         both(copy("model", "teacher"), edit_json("teacher/tokenizer.json", added_tokens=[]))),
    Case("a teacher with fewer positions than the policy",
         ("teacher: data.max_prompt_tokens=48", "exceed the model's 20 positions"),
         ("model.reference=teacher", "objective.kl={coefficient: 0.1}"),
         both(copy("model", "teacher"),
              edit_json("teacher/config.json", max_position_embeddings=20))),
    Case("a data source without a teacher",
         ("data_source 'train' has no teacher in model.reference, which has math", "add one"),
         ("model.reference={math: model}", "objective.kl={coefficient: 0.1}")),
    Case("a teacher of no data source",
         ("model.reference.math: no training prompt has this data_source; they have train",),
         ("model.reference={train: model, math: model}", "objective.kl={coefficient: 0.1}")),
    Case("sampling from as many tokens as there are",
         ("rollout.top_k=25", "a vocabulary of 25 tokens", "give less, or unset it"),
         ("rollout.top_k=25",)),
    Case("as many likeliest tokens as there are",
         ("objective.kl.top_k=25", "a vocabulary of 25 tokens", "give less, or unset it"),
         ("objective.kl={coefficient: 0.1, estimator: forward_kl, top_k: 25}",)),
    Case("a response longer than the model's positions",
         ("exceed the model's 128 positions", "lower one"), ("rollout.max_response_tokens=200",)),
    Case("more pipeline stages than layers",
         ("parallel.pipeline=3 is more than the model's 2 layers", "needs a layer"),
         ("parallel.pipeline=3",)),
]  # fmt: skip

SETTINGS = [
    Case("a typo", ("trainer.stepz: unknown key", "did you mean trainer.steps?"),
         ("trainer.stepz=3",)),
    Case("a text as a number", ("trainer.steps='ten'",), ("trainer.steps=ten",)),
    Case("a negative number", ("trainer.steps=-1",), ("trainer.steps=-1",)),
    Case("minibatches that do not divide",
         ("trainer.minibatches=3", "multiple of the number of minibatches"),
         ("trainer.minibatches=3",)),
    Case("no equals sign", ("override 'trainer.steps' is not of the form key=value",),
         ("train", "--config", "run.yaml", "trainer.steps", "5")),
    Case("a setting as an option", ("--steps", "trainer.steps="),
         ("train", "--config", "run.yaml", "--steps=5"), status=2),
    Case("no config file", ("nowhere.yaml does not exist", "give the path of a YAML file"),
         ("train", "--config", "nowhere.yaml")),
    Case("a key given twice", ("'model' is given twice, in lines 1 and 2", "keep one"), (),
         write("run.yaml", "model: {path: model}\nmodel: {path: other}\n")),
    Case("a section that is a number", ("trainer=3: must be a mapping of steps, ", "as {steps: "),
         ("trainer=3",)),
    Case("a folder as config", ("/runs is a folder; give the path of a YAML file",),
         ("train", "runs"), lambda folder: (folder / "runs").mkdir()),
    Case("a run directory as config", ("/a is a folder; the run's is /", "/a/config.yaml"),
         ("train", "runs/a"), both(lambda folder: (folder / "runs" / "a").mkdir(parents=True),
                                   write("runs/a/config.yaml", ""))),
    Case("an option twice", ("--config: given twice, as run.yaml and as other.yaml; give it once",),
         ("train", "--config", "run.yaml", "--config", "other.yaml"), status=2),
    Case("keys of verl in the file", ("algorithm.adv_estimator: unknown key; for verl's",
         "set advantage.estimator (docs/coming-from.md) (run.yaml, line 7)"), (),
         append("algorithm: {adv_estimator: grpo}")),
    Case("an option of TRL", ("'--beta=0.1'; ", "for TRL's beta set objective.kl.coefficient"),
         ("train", "run.yaml", "--beta=0.1"), status=2),
    Case("a GGUF file that is none", ("model.path: ", "m.gguf does not start as a GGUF file does",
         "download it again"), ("model.path=m.gguf",), write("m.gguf", "Not found")),
    Case("a folder with two GGUF files", ("model.path: ", "has 2 GGUF files and no config.json: ",
         "give the path of one"), ("model.path=.",),
         lambda folder: [(folder / name).write_text("GGUF") for name in ("a.gguf", "b.gguf")]),
    Case("a variable that is not set", ("model.path='${NOWHERE_SET}/m': the environment variable "
         "NOWHERE_SET is not set or empty; export it",), ("model.path=${NOWHERE_SET}/m",)),
    Case("rollouts as texts without a chat template", ("model.path: ", "no chat template",
         "data.template=raw"), ("offline.rollouts=mine.parquet",),
         both(remove("model/chat_template.jinja"), parquet("mine.parquet", {
             "prompt": ["1 + 1"], "response": ["2"], "reward": [1.0]}))),
    Case("a list as config", ("run.yaml must contain a mapping of settings",), (),
         write("run.yaml", "- model\n")),
    Case("an empty config", ("model.path: missing", "data.train: missing"),
         ("train", "--config", "empty.yaml"), write("empty.yaml", "")),
    Case("wandb that is not installed",
         ("logging.wandb is set but wandb is not installed", "pip install wandb"),
         ("logging.wandb=p",)),
    Case("a run directory that is a file", ("run.dir: ", "is not a writable folder"),
         ("run.dir=run.yaml",)),
    Case("engines of their own without lag",
         ("parallel.engine_ranks=1 with lag.batches=0", "a step would wait for its own rollouts",
          "set lag.batches to 1 or more"),
         ("parallel.engine_ranks=1",)),
    Case("engines larger than their ranks",
         ("rollout.tensor=2: vLLM's tensor parallel size 2 does not divide the 1 ranks",),
         ("parallel.engine_ranks=1", "lag.batches=1", "rollout.tensor=2")),
    Case("an objective that needs the engine's log-probs",
         ("sao needs ratios to the engine's log-probs",), ("objective={name: sao}",)),
    Case("a reference that nothing reads",
         ("no effect with objective.name=pnpo without objective.kl",),
         ("model.reference=/nowhere",)),
    Case("Transformer Engine on a CPU",
         ("model.transformer_engine=true: needs a CUDA device",),
         ("model.transformer_engine=true",)),
    Case("shared prompts by another word", ("trainer.share_prompts",),
         ("trainer.share_prompts=always",)),
    Case("fp8 without Transformer Engine",
         ("model.fp8=tensorwise: needs Transformer Engine, which is not",),
         ("model.fp8=tensorwise",)),
    Case("fp8 on local layers",
         ("model.fp8=blockwise: needs Transformer Engine, but model.transformer_engine is false",),
         ("model.fp8=blockwise", "model.transformer_engine=false", "trainer.dtype=float32")),
    Case("virtual stages of no pipeline", ("but parallel.pipeline is 1",),
         ("parallel.virtual_stages=2",)),
    Case("more chunks than layers", ("the model's 2 layers; every chunk",),
         ("parallel.virtual_stages=2", "parallel.pipeline=2")),
    Case("experts of a dense model", ("the model has no experts",), ("parallel.expert=2",)),
    Case("an argument of vLLM that is ours", ("rollout.engine.seed: set seed", "remove it"),
         ("rollout.engine={seed: 3}",)),
    Case("a list as a path", ("data.train=['a']: must be a text",), ("data.train=[a]",)),
    Case("a path as sets", ("eval.sets='held.jsonl': must be a mapping, such as {name: value}",),
         ("eval.sets=held.jsonl",)),
    Case("a record of lags that is not there",
         ("lag.policy=research.lag_policies:TraceLag", "nowhere.json is no record of lags"),
         ("lag.policy=research.lag_policies:TraceLag", "lag.settings={file: nowhere.json}")),
    Case("rollouts that are not there", ("nowhere has no parquet file", "name a run directory"),
         ("offline.rollouts=nowhere",)),
    Case("rollouts without rewards", ("has no column response, reward", "it needs prompt"),
         ("offline.rollouts=mine.parquet",), parquet("mine.parquet", {"prompt": ["1 + 1"]})),
    Case("a file and a mix",
         ("data.train and data.mix are both set", "move data.train into data.mix"),
         ("data.mix={a: {path: train.jsonl}}",)),
    Case("a value that is no YAML", ("'trainer.steps={'", "not valid YAML"), ("trainer.steps={",)),
    Case("no config", ("--config",), ("train",), status=2),
]  # fmt: skip

CLUSTER = write("cluster.yaml", f"executor: local\npython: {sys.executable}\n")
RAISES = "def score(text, truth, source):\n    return float(text.split()[0] == truth)\n"
OTHER_COMMANDS = [
    Case("eval of no model without data", ("--model: /", "/runs/nothing is not a folder",
         "--data: missing"), ("eval", "--model", "runs/nothing")),
    Case("a dry run of 3 processes", ("3 processes do not fit tensor 2",),
         ("dry-run", "run.yaml", "--processes", "3", "parallel.tensor=2", "rollout.tensor=2")),
    Case("eval without data", ("--data: missing", "name one or more files"),
         ("eval", "--model", "model")),
    Case("eval into a folder that exists", ("--output: /", "/model exists", "name a new folder"),
         ("eval", "--model", "model", "--data", "train.jsonl", "--output", "model")),
    Case("eval of a model that is cut", ("is not a complete", "download it again"),
         ("eval", "--model", "model", "--data", "train.jsonl",
          "data.columns={prompt: prompt, answer: answer}", "rollout.max_response_tokens=8",
          "data.max_prompt_tokens=48", f"reward.verifier={VALID_REWARD}"), cut(WEIGHTS, -9)),
    Case("two sets of one name", ("two sets are called train", "NAME=FILE"),
         ("eval", "--model", "model", "--data", "train.jsonl", "--data", "train.jsonl")),
    Case("a plan for no devices", ("--devices: '0' must be a whole number, 1 or more",),
         ("plan", "Qwen2.5-0.5B", "--devices", "0"), status=2),
    Case("a plan for another device", ("z900",),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "--device", "z900")),
    Case("a plan of engines alone",
         ("parallel.engine_ranks=8 of 8 devices leaves none that trains", "lower it"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "parallel.engine_ranks=8", "lag.batches=1")),
    Case("a plan of answers to a single turn", ("--answer-seconds: a single turn", "--turns"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "--answer-seconds", "60")),
    Case("a dry run of nothing", ("nowhere is neither a folder", "Qwen2.5-0.5B"),
         ("dry-run", "run.yaml", "--processes", "1", "model.path=nowhere")),
    Case("a launch without a cluster file", ("nowhere.yaml does not exist",),
         ("launch", "run.yaml", "--cluster", "nowhere.yaml")),
    Case("a launch of another executor", ("executor",),
         ("launch", "run.yaml", "--cluster", "cluster.yaml"),
         write("cluster.yaml", "executor: kubernetes\n")),
    Case("a launch of a reward that raises", ("this launch cannot start", "IndexError",
         "my_rewards.py, line 2"), ("launch", "run.yaml", "--cluster", "cluster.yaml", OUR_SCORE),
         both(CLUSTER, reward(RAISES))),
    Case("a report of a model", ("model contains no run", "give run directories"),
         ("report", "model")),
    Case("doctor of a model", ("model is not a run directory",), ("doctor", "model")),
    Case("a plan that would overwrite", ("--write run.yaml", "name another one"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "--write", "run.yaml")),
    Case("an evaluation into a file", ("--output: ", "train.jsonl is not a writable folder"),
         ("eval", "--model", "model", "--data", "train.jsonl", "--output", "train.jsonl/x")),
    Case("a set with other columns", ("eval.sets.train.columns={prompt: prompt, ",),
         ("eval", "--model", "model", "--data", "train.jsonl",
          "data.columns={prompt: q, answer: a}")),
    Case("a plan in no folder", ("--write none/new.yaml: ", "none is not a writable folder"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "--write", "none/new.yaml")),
    Case("a plan with a size that it decides",
         ("parallel.data: not planned, because it follows from --devices", "leave it out"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "parallel={data: 2}")),
    Case("prompts longer than their limit", ("--mean-prompt 99 is above data.max_prompt_tokens",),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "--mean-prompt", "99",
          "data.max_prompt_tokens=32")),
    Case("a plan with sizes that do not divide",
         ("no layout divides the model on 8 x", "(parallel.*, rollout.tensor)", "change one of"),
         ("plan", "Qwen2.5-0.5B", "--devices", "8", "parallel={tensor: 3}")),
    Case("no memory to fit into", ("argument --fit: 'nan' must be a number above 0",),
         ("dry-run", "run.yaml", "--processes", "1", "--fit", "nan"), status=2),
    Case("memory of a host alone", ("--host: no effect without --fit",),
         ("dry-run", "run.yaml", "--processes", "1", "--host", "8")),
    Case("cancelling nothing", ("nothing was launched as 'nowhere'",), ("cancel", "nowhere")),
    Case("offline without a dry run", ("--offline: only valid with --dry-run", "add it"),
         ("launch", "run.yaml", "--cluster", "cluster.yaml", "--offline"), CLUSTER),
    Case("a command that does not exist", ("invalid choice: 'trian'", "choose from"), ("trian",),
         status=2),
]  # fmt: skip

AGENT = "environment={name: my_agent:Game, max_context_tokens: 96, time_limit_seconds: 5}"


def agent(body: str, *, make: str = "self, row, seed") -> Callable[[Path], object]:
    """Write a user's environment whose `step` has this body, in line 7."""
    head = "import os\nfrom megatron_rl.environments import Answer\nclass Game:\n"
    start = f"    def __init__({make}):\n        self.row = row\n"
    return write(
        "my_agent.py", f"{head}{start}    async def step(self, message):\n        {body}\n"
    )


def game(members: str, base: str = "") -> Callable[[Path], object]:
    """Write a user's environment with these members."""
    imports = "from megatron_rl.environments import AgentEnvironment, ToolEnvironment\n"
    return write("my_agent.py", f"{imports}class Game{base}:\n    {members}\n")


ENVIRONMENTS = [
    Case("a constructor without a seed", ("it is called as my_agent:Game(row, seed), but its "
         "signature has: too many positional arguments",), (AGENT,),
         agent("return Answer()", make="self, row")),
    Case("a step of two messages", ("my_agent:Game.step(message)", "missing a required argument"),
         (AGENT,), game("def step(self, message, history): ...", "(ToolEnvironment)")),
    Case("no step", ("my_agent:Game has no method step; define `async def step(self, message)`",),
         (AGENT,), game("def __init__(self, row, seed): ...")),
    Case("a row without its column", ("failed in turn 1: KeyError: 'level'",
         "my_agent.py, line 7"), (AGENT,), agent("return Answer(str(self.row['level']))")),
    Case("an empty turn that raises", ("tried with an empty turn, it failed in turn 1: Value",
         "my_agent.py, line 7", "so it needs an Answer too",
         "or set environment.on_error=zero"), (AGENT,),
         agent("return Answer(str(int(message)))")),
    Case("a call that ends the process", ("its process died twice, exit status 3",), (AGENT,),
         agent("os._exit(3)")),
    Case("a reward of nan", ("returned the reward nan; return a finite number",), (AGENT,),
         agent("return Answer('go on', reward=float('nan'))")),
    Case("10 MB of text", ("returned an observation of 10,000,000 characters; shorten it",),
         (AGENT,), agent("return Answer('x' * 10**7)")),
    Case("an agent for another column", ("the row has no column 'messages' (its columns: prompt, ",
         "set Game.prompt"), (AGENT,), game("prompt = 'messages'", "(AgentEnvironment)")),
    Case("a replaced history", ("returned restarts=True, which environment.max_rewrites=0 refuses;",
         "raise it"), (AGENT,), agent("return Answer('go on', restarts=True)")),
    Case("a replaced history without a text", ("returned restarts=True without an observation",),
         (AGENT.replace("5}", "5, max_rewrites: 1}"),), agent("return Answer([], restarts=True)")),
    Case("credit by turn of values", ("advantage.credit=turn: advantage.estimator=optimal_value",
         "choose another estimator"), (AGENT, "advantage={credit: turn, estimator: optimal_value}"),
         agent("return Answer()")),
    Case("an answer that is missing", ("train.jsonl, line 1: prompt has no answer of the"
         " assistant at its end", "data.columns.completion"),
         ("sft={}", "objective={name: sft}", "rollout.responses_per_prompt=1"),
         rows(*({"prompt": "1+1?"} for _ in range(2)))),
    Case("RL settings with sft", ("objective.name=grpo: has no meaning with sft", "unset",
         "rollout.responses_per_prompt=8", "sft cannot be combined with lag.batches=1"),
         ("sft={}", "objective.name=grpo", "rollout.responses_per_prompt=8", "lag.batches=1")),
    Case("a temperature with sft", ("sft cannot be combined with rollout.temperature=0.5",
         "at a temperature of 1; unset one"),
         ("sft={}", "objective={name: sft}", "rollout.responses_per_prompt=1",
          "rollout.temperature=0.5")),
    Case("a critic for a run that began without one", ("step_000001 was saved without a critic, but"
         " critic is set", "set critic to null", "run.name"),
         ("critic={}", "objective=ppo", "run.resume=auto"), saved_run("actor")),
    Case("no critic for a run that began with one", ("step_000001 was saved with a critic, but "
         "critic is null", "restore the section critic"), ("run.resume=auto",),
         saved_run("actor", "critic")),
    Case("an advantage over one response", ("rollout.responses_per_prompt=1: must be at least 2",
         "raise it", "set critic"), ("rollout.responses_per_prompt=1",)),
    Case("the objective of sft alone", ("objective.name=sft trains every answer alike",
         "choose another"), ("objective.name=sft",)),
]  # fmt: skip

AREAS = {"rewards": REWARDS, "data": DATA, "models": MODELS, "settings": SETTINGS,
         "environments": ENVIRONMENTS, "commands": OTHER_COMMANDS}  # fmt: skip
CASES = {f"{area}: {case.name}": case for area, cases in AREAS.items() for case in cases}


def make_folder(folder: Path, model: Path) -> None:
    """Write a valid model, prompts, reward and config."""
    shutil.copytree(model, folder / "model")
    rows(*good_rows(8))(folder)
    (folder / "fair_reward.py").write_text(REWARD)
    (folder / "run.yaml").write_text(
        "run: {dir: runs, name: a}\nmodel: {path: model}\n"
        "data: {train: train.jsonl, max_prompt_tokens: 48, "
        "columns: {prompt: prompt, answer: answer}}\n"
        "rollout: {prompts_per_step: 4, responses_per_prompt: 2, max_response_tokens: 8}\n"
        "trainer: {minibatches: 1, steps: 1}\n"
        f"reward: {{verifier: {VALID_REWARD}}}\n"
    )
