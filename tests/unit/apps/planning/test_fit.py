"""The large examples fit on their devices; errors suggest settings that fit."""

import dataclasses
import functools
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

from megatron_rl import cli
from megatron_rl.apps.planning import fit
from megatron_rl.commands import dry_run
from megatron_rl.config import ConfigError, load_config, parse_config
from megatron_rl.preflight.resources import check_memory
from tests.unit.apps.planning.models import DENSE, EXPERTS, save_shape
from tests.unit.test_examples import EXAMPLES, MODELS, save_true_model

DEVICE = 80 * 10**9  # less than any 80 GB device has
SHALLOW_DEVICE = 27 * 2**30
PAPER = "r1_distill_1_5b_epochs4"


def example(tmp_path, name):
    """Load an example's config, with a model folder that contains only a config.json."""
    config = load_config(EXAMPLES / f"{name}.yaml")
    return fit.apply_changes(config, {"model.path": str(save_true_model(tmp_path, name))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the paper's model with two layers."""
    return save_true_model(tmp_path_factory.mktemp("models"), PAPER, num_hidden_layers=2)


@pytest.fixture(autouse=True, scope="module")
def one_dry_run_of_each_actor():
    """Run an actor dry once; further tests with the same one read what that run counted."""
    run, done = fit.dry_run_rank, {}

    def run_once(config, **place):
        key = config.model_dump_json(), *place.items()
        if key not in done:
            done[key] = run(config, **place)
        return done[key]

    with mock.patch.object(fit, "dry_run_rank", run_once):
        yield


def defaults(folder, **sections):
    """Build the default config of a model; that of two layers fits on a device of 27 GiB."""
    return parse_config(
        {"model": {"path": str(folder)}, "data": {"train": "none.jsonl"}, **sections}
    )


# The one-epoch example has the same layout as the four-epoch one, and Mistral's those of Qwen2.5's.
# A dry run of 94 layers takes a minute.
LONG_OR_EQUAL = {"r1_distill_1_5b_epochs1", "mistral_7b", "qwen3_235b_a22b"}


# The others differ from it in their sizes and parts.
FIRST = ["qwen2_5_7b_lora"]
SLOW = sorted(MODELS.keys() - LONG_OR_EQUAL - set(FIRST))


@pytest.mark.parametrize(
    "name", [*FIRST, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_large_example_fits(tmp_path, name):
    dry_runs = fit.check_fit(example(tmp_path, name), processes=MODELS[name], device_bytes=DEVICE)
    assert sum(dry_runs[0].states.values()) > 2**30  # its true shape
    # Besides weights, a sleeping actor keeps only Megatron's buffer for gathered activations.
    assert dry_runs[0].asleep.get("activations", 0) < 0.2 * 2**30


def test_defaults_fit_papers_model_on_one_device(tmp_path):
    config = defaults(save_true_model(tmp_path, PAPER))  # in full depth
    (result,) = fit.check_fit(config, processes=1, device_bytes=DEVICE)
    # bfloat16 weights, float32 gradients, float32 main weights and two moments
    bytes_per_parameter = {"weights": 2, "gradients": 4, "optimizer": 12}
    assert result.parameters == 1_777_088_000
    for name, width in bytes_per_parameter.items():
        assert result.states[name] == pytest.approx(width * result.parameters, rel=1e-3)


def test_error_suggests_settings_that_fit(folder):
    """Also where two moments do not: 27 GiB - 6 of reserve - 1 of the actor are 74%."""
    config = defaults(
        folder,
        rollout={"gpu_memory_utilization": 0.95},
        trainer={"tokens_per_micro_batch": 65536},
    )
    steps = []
    with pytest.raises(fit.DoesNotFitError) as error:
        fit.check_fit(config, processes=1, device_bytes=SHALLOW_DEVICE, progress=steps.append)
    # An engine's share changes nothing about the actor, which is not run again for it.
    tried = [
        before.startswith("trying rollout") for before, now in pairwise(steps) if "rank" in now
    ]
    assert "trying rollout.gpu_memory_utilization=0.7" in steps and tried and not any(tried)
    output = str(error.value)
    assert "training needs" in output  # the larger excess
    assert "the actor's peak, update" in output
    suggestions = output.split("these settings fit: ")[1].split(", or ")
    expected = ["rollout.gpu_memory_utilization=0.7", "trainer.tokens_per_micro_batch=16384"]
    assert sorted(suggestions[0].split()) == expected
    for suggestion in suggestions:
        changes = dict(change.split("=") for change in suggestion.split())
        values = {key: yaml.safe_load(value) for key, value in changes.items()}
        changed = fit.apply_changes(config, values)
        assert fit.check_fit(changed, processes=1, device_bytes=SHALLOW_DEVICE)


def test_error_suggests_engine_share_that_fits(folder):
    # 1 GiB of weights; 2 layers x 2 x 2 heads x 128 x 16,384 tokens x 2 bytes are 0.03.
    config = defaults(folder, rollout={"gpu_memory_utilization": 0.03})
    output = r"the engine's share needs 1.1 of 0.8 GiB .* fit: rollout.gpu_memory_utilization=0.1, "
    with pytest.raises(fit.DoesNotFitError, match=output):
        fit.check_fit(config, processes=1, device_bytes=SHALLOW_DEVICE)


def test_engines_on_ranks_of_their_own_share_no_device(folder):
    """0.76 of 27 GiB and a reserve of 6 fit alone, and not next to the GiB of a sleeping actor."""
    rollout = {"gpu_memory_utilization": 0.76}
    with pytest.raises(fit.DoesNotFitError, match="generating needs"):
        shared = defaults(folder, rollout=rollout)
        fit.check_fit(shared, processes=2, device_bytes=SHALLOW_DEVICE)
    split = {"lag": {"batches": 1}, "parallel": {"engine_ranks": 1}}
    config = defaults(folder, rollout=rollout, **split)
    (run,) = fit.check_fit(config, processes=2, device_bytes=SHALLOW_DEVICE)
    assert run.processes == 1
    found = fit.moments(config, run, SHALLOW_DEVICE, 2**40)
    parts = {moment.name: moment.parts for moment in found}
    assert not {"a sleeping engine", "the actor asleep"} & {
        k for one in parts.values() for k in one
    }
    # bfloat16 weights, float32 gradients, float32 main weights and two moments
    assert parts[fit.SENDING]["the actor"] == pytest.approx(18 * run.parameters, rel=1e-2)
    assert parts[fit.HOST] == {
        "responses of a step": 0,
        "reference policy": 0,
        "weights kept for behavior log-probs": 2 * run.parameters,
    }


def test_engine_with_paused_requests_does_not_sleep_while_the_actor_trains(folder):
    lag = {"partial_rollouts": {"every_tokens": 4096, "cache": "recompute"}}
    whole, paused = defaults(folder), defaults(folder, lag=lag)
    (run,) = fit.check_fit(whole, processes=1, device_bytes=DEVICE)
    needed = [fit.moments(each, run, DEVICE)[0].needed for each in (whole, paused)]
    assert needed[1] - needed[0] == DEVICE // 2 - fit.ENGINE_ASLEEP
    with pytest.raises(fit.DoesNotFitError, match=r"training needs .*paused requests.* these sett"):
        fit.check_fit(paused, processes=1, device_bytes=SHALLOW_DEVICE)


def test_pinned_memory_must_fit_on_host(folder):
    """Optimizer states while the engine generates, 12 bytes a parameter; a reference policy, 2."""
    kl = {"name": "grpo", "kl": {"estimator": "k3", "coefficient": 0.1}}
    plain = defaults(folder)
    with_reference = defaults(folder, objective=kl)
    pinned = []
    for config in (plain, with_reference):
        (run,) = fit.find_lacking(config, processes=1, device_bytes=DEVICE)[1]
        pinned.append(run.asleep_host / run.parameters)
        for host_bytes, missing in ((run.asleep_host, 0), (run.asleep_host - 1, 1)):
            moment = fit.moments(config, run, DEVICE, host_bytes)[-1]
            assert moment.name == fit.HOST and moment.missing == missing
    assert pinned[0] == pytest.approx(12, rel=1 / 16) and pinned[1] == pytest.approx(14, rel=1 / 8)
    with pytest.raises(fit.DoesNotFitError, match=r"a process on the host needs .* use more nodes"):
        fit.check_fit(plain, processes=1, device_bytes=DEVICE, host_bytes=2**30)


def test_responses_of_step_must_fit_on_host(folder):
    """Two replicas: rank 0 has all responses, another rank those of its replica."""
    config = defaults(folder, rollout={"prompts_per_step": 6400})
    received = fit.response_bytes(config, trainers=2)
    assert received.writer > 1.4 * received.rank > 0
    tokens = 6400 * config.rollout.responses_per_prompt * config.rollout.max_response_tokens
    for further, numbers in (({}, 3), ({"critic": {}}, 4), ({"rollout": {"top_k": 20}}, 24)):
        rollout = {"prompts_per_step": 6400} | further.get("rollout", {})
        found = fit.response_bytes(defaults(folder, **further | {"rollout": rollout}), trainers=2)
        assert found.writer == 4 * numbers * tokens, further
    (run,) = fit.find_lacking(config, processes=2, device_bytes=SHALLOW_DEVICE)[1]
    for rank, size in ((0, received.writer), (1, received.rank)):
        run = dataclasses.replace(run, rank=rank)
        host = fit.moments(config, run, SHALLOW_DEVICE, run.asleep_host + size - 1)[-1]
        assert host.parts["responses of a step"] == size
        assert host.name == fit.HOST and host.missing == 1


def test_prepared_packs_must_fit(folder):
    """Those of all minibatches: 80 bytes for each token of the responses, of maximum length."""
    for prompts, fits in ((64, True), (6400, False)):
        config = defaults(folder, rollout={"prompts_per_step": prompts})
        lacking, (run,) = fit.find_lacking(config, processes=1, device_bytes=SHALLOW_DEVICE)
        training = fit.moments(config, run, SHALLOW_DEVICE)[0]
        responses = prompts * config.rollout.responses_per_prompt
        tokens = (responses - run.micro_batches * len(run.sequences)) * run.local_tokens
        assert training.parts["prepared packs"] == 80 * tokens / len(run.sequences)
        assert (not lacking) == fits
        assert fits or lacking[0].name == fit.TRAINING


def test_communicators_are_counted_beyond_those_in_the_reserve(folder):
    config = defaults(folder)
    _, (run,) = fit.find_lacking(config, processes=1, device_bytes=SHALLOW_DEVICE)
    for communicators, gib in ((4, 0), (5, 0.5), (9, 2.5)):
        run = dataclasses.replace(run, communicators=communicators)
        training = fit.moments(config, run, SHALLOW_DEVICE)[0].parts
        further = {name: n for name, n in training.items() if "further communicators" in name}
        assert sum(further.values()) == gib * 2**30


def test_mixture_of_experts_is_first_divided_by_expert(tmp_path):
    """As where the busiest rank's share of the tokens does not fit, though an equal one does."""
    sizes = {"num_hidden_layers": 1, "num_experts": 8, "num_experts_per_tok": 2}
    path = save_shape(tmp_path, EXPERTS | sizes)
    values = {"model": {"path": str(path)}, "data": {"train": "none.jsonl"}}
    config = parse_config(values | {"parallel": {"expert": 2}})
    assert config.run.largest_expert_share == 1.5
    equal = fit.apply_changes(config, {"run.largest_expert_share": 1.0})
    needed = []
    for each in (equal, config):
        (run,) = fit.find_lacking(each, processes=4, device_bytes=DEVICE)[1]
        needed.append(fit.moments(each, run, DEVICE)[0].needed)
    assert needed[0] < needed[1]
    training = fit.MemoryPhase(fit.TRAINING, needed[0], {"the actor's peak": needed[1]})
    assert next(fit.candidates(config, training, processes=4)) == {"parallel.expert": 4}


def test_pack_has_all_sequences_of_a_response(folder):
    """In a context of 2,048 tokens, 2,047 positions predict one; two rewrites give three such."""
    context = {"name": "my_agent:Game", "max_context_tokens": 2048}
    sizes = {"rollout": {"max_response_tokens": 1024}, "trainer": {"tokens_per_micro_batch": 4096}}
    for rewrites, sequences in ((0, 2), (2, 3)):
        environment = context | {"max_rewrites": rewrites}
        config = defaults(folder, environment=environment, **sizes)
        find = functools.partial(fit.find_lacking, config, processes=1, device_bytes=DEVICE)
        (run,) = find()[1]
        assert run.sequences == (2048,) * sequences and run.local_tokens == 2048 * sequences
        responses = config.rollout.prompts_per_step * config.rollout.responses_per_prompt
        of_update = responses // config.trainer.minibatches
        assert run.micro_batches_of_update == (of_update if rewrites else of_update // 2)


@pytest.mark.parametrize(
    ("rollout", "modules"),
    [({}, 0),      ({"engine": {"moe_backend": "flashinfer_trtllm"}}, 4)],
)  # fmt: skip
def test_modules_that_loaders_keep_are_counted(tmp_path, rollout, modules):
    path = save_true_model(tmp_path, "qwen3_235b_a22b")
    config = parse_config({
        "model": {"path": str(path)}, "data": {"train": "none.jsonl"},
        "parallel": {"pipeline": 4}, "rollout": {"tensor": 8, **rollout},
    })  # fmt: skip
    found = fit.loader_bytes(config, SimpleNamespace(processes=32, rank=0))
    # of each stage: gate, up and down of a layer's 128 experts, 1536 wide, in bfloat16
    assert sum(found.values()) == modules * 128 * 3 * 1536 * 4096 * 2
    # 4 x 4.5 GiB; where the settings leave the choice to vLLM, the output has them
    note = fit.uncounted_loaders(config, SimpleNamespace(processes=32, rank=0))
    assert ("not counted: 18.0 GiB in a weight push" in (note or "")) is (rollout == {})


def run_command(tmp_path, capsys, monkeypatch, *arguments):
    """Run `megatron-rl dry-run` on the smallest built-in model; return status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model.path: models/Qwen2.5-0.5B\ndata.train: none.jsonl\n")
    monkeypatch.setattr(dry_run, "leave", lambda status: status)
    options = cli._parse(["dry-run", "c.yaml", "--processes", "8", *arguments])
    status = options.run(options, [])
    return status, *capsys.readouterr()


def test_command_accepts_built_in_name_and_prints_whether_it_fits(tmp_path, capsys, monkeypatch):
    arguments = "--fit", "80", "rollout.gpu_memory_utilization=0.2"
    status, out, progress = run_command(tmp_path, capsys, monkeypatch, *arguments)
    responses, *_, training, push, generating, engine, _, summary = out.splitlines()
    assert responses.startswith("responses of a step, on the host: a rank receives at most ")
    lines = [line.split()[-1] for line in out.splitlines() if "megatron_rl/" in line]
    assert lines and not any("dry_run" in line or "planning" in line for line in lines)
    assert status == 0 and progress == "dry run: rank 0 of 8\n"
    peak = float(next(line for line in out.splitlines() if "update, peak" in line).split()[-1])
    # plus a sleeping engine of 4 GiB, the reserve of 6 GiB and the batch's prepared packs
    prepared = float(training.split("prepared packs ")[1].split(",")[0])
    assert float(summary.split()[2]) == pytest.approx(peak + prepared + 4 + 6, abs=0.12)
    assert summary.startswith("fits: peak ") and " of 80.0 GiB, in training (the actor" in summary
    assert training.split()[:2] == ["training", summary.split()[2]]
    assert training.endswith("a sleeping engine 4.0, reserve 6.0")
    assert "the engine's weights 0.9, buckets 1.0" in push  # 494 million at 2 bytes
    assert "rollout.gpu_memory_utilization=0.2 16.0" in generating and "its weights 0.9" in engine


def test_summary_without_device_has_needed_memory():
    peak = fit.MemoryPhase(fit.TRAINING, None, {"the actor's peak": 3 * 2**30})
    assert fit.summarize_fit([peak]) == (
        "peak 3.0 GiB, in training; --fit GIB compares it with a device"
    )


def test_unknown_model_raises(tmp_path, capsys, monkeypatch):
    with pytest.raises(ValueError, match=r"models/nobodys is neither a folder .* Qwen2.5-0.5B"):
        run_command(tmp_path, capsys, monkeypatch, "model.path=models/nobodys")


def test_preflight_check_raises_from_its_own_process(tmp_path, monkeypatch):
    path = save_shape(tmp_path / "small", DENSE)
    values = {"model": {"path": str(path)}, "data": {"train": "none.jsonl"}}
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=r"does not fit .* run.check_memory=false"):
        check_memory(parse_config(values), world_size=1, device_bytes=2**30)
    assert check_memory(parse_config(values), world_size=1, device_bytes=None) is None
    off = parse_config(values | {"run": {"check_memory": False}})
    assert check_memory(off, world_size=1, device_bytes=2**30) is None


def with_adapters(tmp_path, *, push, lag=None):
    path = save_shape(tmp_path, DENSE)  # 4 layers, hidden size 128, 8 heads of 16, 4 of keys
    return parse_config(
        {
            "model": {"path": str(path)}, "data": {"train": "none.jsonl"}, "behavior": "engine",
            "lora": {"rank": 12, "targets": ["qkv", "fc2"], "push": push},
            "optimizer": {"learning_rate": 1e-4}, "lag": lag or {},
            "rollout": {"tensor": 2, "max_response_tokens": 100}, "trainer": {"dtype": "bfloat16"},
        }
    )  # fmt: skip


def test_slots_are_counted_by_rank_of_the_slot_and_by_version(tmp_path):
    assert fit.slot_bytes(with_adapters(tmp_path, push="merged")) == {}
    assert fit.adapter_host_bytes(with_adapters(tmp_path, push="merged"), engine=7) == {}
    # Slots of rank 16 on one of 2 ranks. qkv: A of q, k and v, 3 x 128; B, (128 + 64 + 64) / 2.
    # fc2: A, 384 / 2; B, 128. In 2 bytes.
    slot = 2 * 4 * 16 * (3 * 128 + 128 + 192 + 128)
    # On the host adapters of rank 12, whole: an A of 128, B of 256; 384 and 128.
    whole = 2 * 4 * 12 * (128 + 256 + 384 + 128)
    for versions, lag in (
        (1, {}),
        (1, {"partial_rollouts": {"every_tokens": 30, "cache": "recompute"}}),
        (4, {"partial_rollouts": 30}),  # 100 tokens in windows of 30
    ):
        config = with_adapters(tmp_path, push="adapters", lag=lag)
        assert fit.slot_bytes(config) == {f"{versions} slots of adapters": versions * slot}
        on_host = {"the sleeping engine's weights": 7, "adapters": versions * whole}
        assert fit.adapter_host_bytes(config, engine=7) == on_host


def of_many_responses(**sections):
    values = {
        "model": {"path": "m"}, "data": {"train": "t"},
        "rollout": {"prompts_per_step": 512, "responses_per_prompt": 16,
                    "max_response_tokens": 32768},
        "parallel": {"tensor": 8, "pipeline": 4},
    }  # fmt: skip
    return parse_config(values | sections)


def test_rank_receives_what_its_replica_trains_and_rank_0_everything():
    # 512 * 16 * 32,768 = 2**28 tokens of 12 bytes; 1,024 / 32 = 32 replicas. 4 bytes of each token
    # come back to the engine that generated it; one with a prompt has its 16 responses.
    found = fit.response_bytes(of_many_responses(), trainers=1024)
    assert found.writer == 12 * 2**28
    assert found.rank == 12 * 2**28 // 32 + 4 * 16 * 32768
    assert "a rank receives at most 98.0 MiB and rank 0, which writes them, 3,072.0 MiB" in str(
        found
    )


def test_sampling_masks_of_the_maximum_are_counted():
    # 7 ids and their number: 32 bytes more of each of 2**28 tokens, also at the owner.
    masked = of_many_responses(rollout={"prompts_per_step": 512, "responses_per_prompt": 16,
                                        "max_response_tokens": 32768, "top_k": 7})  # fmt: skip
    found = fit.response_bytes(masked, trainers=1024)
    assert found.writer == 44 * 2**28
    assert found.rank == 44 * 2**28 // 32 + 36 * 16 * 32768


def test_one_replica_receives_everything_and_one_process_nothing():
    assert fit.response_bytes(of_many_responses(), trainers=32).rank == 12 * 2**28
    alone = fit.response_bytes(of_many_responses(parallel={}), trainers=1)
    assert (alone.rank, alone.writer) == (0, 0)
