"""vLLM in the trainer's processes: one worker per process, engines of `tensor` adjacent ranks.

The external launcher backend (vllm/v1/executor/uniproc_executor.py) runs one engine core in every
process; the ranks of one engine take the same requests, so they schedule identically
without communicating.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.sections import ReshardingSection, RolloutSection
from megatron_rl.data.token_rows import share_responses
from megatron_rl.distributed.agreement import StragglerBarrier
from megatron_rl.distributed.link import Link
from megatron_rl.distributed.topology import Topology
from megatron_rl.engine.adapters import AdapterSettings, EngineAdapters
from megatron_rl.engine.conversations import Conversations
from megatron_rl.engine.engine import (
    ConversationSettings,
    EngineFeature,
    EngineHooks,
    OnFinished,
    ProgressCallback,
    RolloutWindow,
)
from megatron_rl.engine.incoming import (
    load_tensors,
    parameters_as_expected,
    prepare_tensors,
)
from megatron_rl.engine.partial_requests import (
    PartialRequests,
    as_response,
    fetch_started,
    find_owners,
    merge_outputs,
)
from megatron_rl.engine.requests import (
    CLEAN_UP_SECONDS,
    FinishedResponses,
    SequenceRequest,
    check_prompts,
    gather_seconds,
    read_scores,
    run_on_every_rank,
    run_requests,
    sampling_per_prompt,
    sampling_requests,
    scoring_requests,
)
from megatron_rl.engine.routes import EngineRoutes
from megatron_rl.engine.sampling_masks import (
    EngineSamplingMasks,
    bound_sampling,
)
from megatron_rl.engine.starting import (
    check_expert_parallel,
    fixed_arguments,
    given_variables,
    layer_arguments,
    preserved_generators,
    sleeping_bytes,
    start_vllm,
    unknown_variables,
)
from megatron_rl.engine.stopping import find_stop_rule
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import Resharder, SyncStats, WeightSource
from megatron_rl.types import Prompt, Response, SamplingSettings


@dataclass(frozen=True)
class EngineUse:
    """Abilities that callers of an engine use besides whole responses.

    partial_rollouts: `continue_generation` will be called. routes: responses have their routes.
    adapters: set if vLLM applies LoRA itself; None if merged weights are pushed.
    """

    partial_rollouts: bool = False
    routes: bool = False
    adapters: AdapterSettings | None = None


@dataclass(frozen=True)
class SyncSettings:
    """Settings of weight syncs (see `Resharder`).

    link: joins the trainers, if this rank only generates; None: the actor is in this process.
    """

    resharding: ReshardingSection = field(default_factory=ReshardingSection)
    ranks_per_node: int | None = None
    link: Link | None = None


class VllmEngine:
    """vLLM in the actor's processes, with weights received directly from the actor.

    model_folder: its config.json is read, its weights are not.
    settings: sizes, limits and stops; `tensor` must divide the world size and the model's heads.
    tokenizer: decodes responses, and finds stop strings in them; None leaves their texts empty.
    topology: the actor's rank, world size and device. Process groups must exist.
    max_model_len: maximum prompt plus response length in tokens.
    hooks: callbacks to the run.
    """

    shares_devices = True

    def __init__(
        self,
        model_folder: str | Path,
        settings: RolloutSection,
        *,
        tokenizer: Any = None,
        topology: Topology,
        dtype: torch.dtype,
        max_model_len: int,
        seed: int = 0,
        use: EngineUse | None = None,
        sync: SyncSettings | None = None,
        hooks: EngineHooks | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("start torch.distributed (and Megatron) before the vLLM engine")
        self.shape: ModelShape = read_model_shape(model_folder)
        use, sync = use or EngineUse(), sync or SyncSettings()
        first = 0 if sync.link is None else sync.link.trainers
        tensor = settings.tensor
        self.layout = EngineLayout(tensor, topology.world_size, settings.expert_parallel, first)
        self._layout_rank = first + topology.rank
        self.layout.check(self.shape)
        on_cuda = topology.device.type == "cuda"
        self.dtype, self.topology, self.max_model_len = dtype, topology, max_model_len
        self.settings = settings
        self._hooks = hooks or EngineHooks()
        self._version, self._asleep, self._tokenizer = -1, False, tokenizer
        self._engine_seconds = [0.0] * topology.world_size  # by rank
        self.environment_costs: Mapping[str, float] = {}
        patience = settings.stall_seconds + 2 * CLEAN_UP_SECONDS
        self._work = StragglerBarrier("generating", patience=patience)
        self._resharder = Resharder(self, sync.resharding, sync.ranks_per_node, sync.link)
        self._stop = find_stop_rule(
            model_folder, self._tokenizer, vocab_size=self.shape.vocab_size,
            token_ids=settings.stop_token_ids, texts=settings.stop,
        )  # fmt: skip
        self._routes = EngineRoutes(self.shape, on_cuda=on_cuda) if use.routes else None
        self._masks = EngineSamplingMasks(on_cuda=on_cuda) if settings.removes_tokens else None
        self._adapters = None
        if use.adapters is not None:
            self._adapters = EngineAdapters(self, use.adapters, self._resharder)
        features: list[EngineFeature] = [
            each for each in (self._routes, self._masks, self._adapters) if each is not None
        ]
        arguments = fixed_arguments(max_model_len, on_cuda=on_cuda, partial=use.partial_rollouts)
        arguments |= {"model": str(model_folder), "seed": seed}
        arguments |= self._size_arguments(on_cuda=on_cuda)
        arguments |= layer_arguments(self.shape, on_cuda=on_cuda)
        for feature in features:
            arguments |= feature.arguments()
        reads_text, given = tokenizer if settings.stop else None, given_variables()
        self._llm = start_vllm(topology, arguments | settings.engine, tokenizer=reads_text)
        self.without_effect = unknown_variables(given)
        for feature in features:
            feature.start(self._llm)
        limit = settings.max_num_seqs if on_cuda else None
        self._partial = PartialRequests(
            self._llm.llm_engine, self._stop, self._masks, max_num_seqs=limit
        )

    def _size_arguments(self, *, on_cuda: bool) -> dict[str, Any]:
        settings = self.settings
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": settings.tensor, "max_num_seqs": settings.max_num_seqs,
            "kv_cache_memory_bytes": None if on_cuda else settings.kv_cache_mib * 2**20,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "enable_expert_parallel": check_expert_parallel(
                settings.expert_parallel, on_cuda=on_cuda
            ),
        }  # fmt: skip

    def describe_stop(self) -> str:
        """Describe in one line what ends a response."""
        return self._stop.describe(self._tokenizer)

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def engine_seconds(self) -> Sequence[float]:
        return self._engine_seconds[:: self.layout.tensor]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings | Sequence[SamplingSettings],
        on_progress: ProgressCallback | None = None,
        on_response: OnFinished | None = None,
        on_all_ranks: bool = True,
        conversations: ConversationSettings | None = None,
    ) -> list[Response]:
        """Implement `RolloutEngine.generate`. Collective.

        Each sample's seed is derived from (sampling.seed, prompt, sample): responses do not depend
        on the layout or on other requests in the batch. Raises ValueError if a prompt does not fit.
        If an engine fails or times out, its ranks raise that error, and the ranks of other engines
        raise RuntimeError.
        """
        settings = sampling_per_prompt(sampling, count=len(prompts))
        masks = None
        if self._masks is not None:
            masks = self._masks.begin(settings)
            settings = [bound_sampling(x, vocab_size=self.shape.vocab_size) for x in settings]
        longest = 1 if conversations else max(item.max_tokens for item in settings)
        self._check_prompts(prompts, tokens=longest)
        engines, tensor = self.topology.world_size // self.layout.tensor, self.layout.tensor
        numbered = list(zip(range(len(prompts)), prompts, settings, strict=True))
        own = numbered[self.topology.rank // tensor :: engines]
        finished = FinishedResponses(
            prompts, samples, expected=len(own) * samples, longest=0 if conversations else longest,
            core=self._llm.llm_engine,
            share=(self.topology.rank % tensor, tensor),
            tokenizer=self._tokenizer, weight_version=self._version, on_response=on_response,
            # Of conversations the turns are counted, so that a slow one is not taken for a hang.
            on_progress=on_progress if conversations else self._work.with_progress(on_progress),
            routes=self._routes, masks=masks,
        )  # fmt: skip
        further = None if conversations is None else Conversations(
            own, conversations, finished, stop=self._stop, max_model_len=self.max_model_len,
            on_advance=self._work.advance,
        )  # fmt: skip

        def run() -> dict[int, Response]:
            # Prefixes cached by an earlier call would change rounding. Results must depend only on
            # the arguments and the weights, or a resumed run would differ in the last bits.
            if not self._partial.paused:
                self._llm.reset_prefix_cache()
            if further is not None:
                return further.run(partial(self._run, on_running=finished.show))
            requests = sampling_requests(own, samples=samples, stop=self._stop)
            self._run(requests, on_finished=finished.add, on_running=finished.show)
            return finished.own

        responses = self._gather(run, on_all_ranks=on_all_ranks)
        self.environment_costs = further.sum_costs() if further is not None else {}
        assert list(responses) == list(range(len(prompts) * samples))
        return list(responses.values())

    def continue_generation(
        self, parts: Sequence[RolloutWindow], *, keep_cache: bool
    ) -> list[list[Response]]:
        """Continue the responses of each window up to its token limit with the current weights.

        keep_cache: unfinished requests keep their KV cache across weight syncs; otherwise it is
        recomputed. Collective; raises like `generate`, after which no request is in flight.
        """
        for part in parts:
            self._check_prompts(part.prompts, tokens=part.sampling.max_tokens)
        engines = self.topology.world_size // self.layout.tensor
        engine, rank = divmod(self.topology.rank, self.layout.tensor)
        assigned = fetch_started(parts, self._partial.paused, engine=engine, engines=engines)

        def run() -> dict[int, Response]:
            own, limit = [item[1:] for item in assigned], self.settings.stall_seconds
            self._partial.version, self._partial.lora_request = self._version, self._lora_request
            requests = self._partial.run(
                own,
                stall_limit=limit,
                on_step=self._hooks.on_step,
                should_stop=self._hooks.should_stop,
            )
            if not keep_cache:
                self.drop_caches()
            return {
                position: as_response(key, prompt, requests[key], self._tokenizer)
                for position, key, prompt, *_ in assigned
                if position % self.layout.tensor == rank
            }

        return merge_outputs(
            parts, self._gather(run, on_all_ranks=False, owners=find_owners(parts))
        )

    def _gather(self, run: Callable[[], dict[int, Response]], **where: Any) -> dict[int, Response]:
        """Return all ranks' results of `run`; an error of one rank is raised on every rank."""

        def run_with_weights() -> dict[int, Response]:
            self._require_weights()
            return run()

        own, seconds = run_on_every_rank(
            run_with_weights, work=self._work, on_step=self._hooks.on_step,
            doing=f"generating with {self.layout}",
        )  # fmt: skip
        self._engine_seconds = gather_seconds(seconds, device=self.topology.device)
        return share_responses(own, **where)

    def drop_caches(self) -> None:
        self._partial.drop_caches()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the log-probs of each sequence's tokens from the second on, [length - 1] float32.

        Computed before temperature and top-p. Every engine scores all sequences.
        """
        self._require_weights()
        outputs: dict[int, Any] = {}
        self._run(scoring_requests(sequences), on_finished=outputs.__setitem__)
        return read_scores(outputs, sequences)

    def sync_weights(self, actor: WeightSource, *, version: int) -> SyncStats:
        resharder = self._resharder if self._adapters is None else self._adapters.resharder
        return resharder.push(actor, version=version)

    def check_idle(self) -> None:
        """Raise RuntimeError while requests run; paused requests continue with the new weights."""
        if self._partial.is_running:
            raise RuntimeError("the engine is generating; sync weights between calls")

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Replace every parameter on this rank from full Hugging Face tensors, as `overwrite` does.

        Reads only this rank's slice. Raises ValueError naming parameters that are missing, extra or
        of a wrong shape.
        """
        tensors = prepare_tensors(weights, self.shape)
        expected = self.layout.parameter_shapes(self.shape, rank=self._layout_rank)
        tied = self.shape.tied_embeddings
        load = partial(load_tensors, self._llm, tensors, expected=expected, tied_embeddings=tied)
        return self.overwrite(load, version=version)

    def overwrite(self, write: Callable[[], object], *, version: int) -> float:
        """Call `write` to replace every parameter; returns the seconds spent resetting the cache.

        After any error the engine refuses to generate until a weight sync succeeds.
        """
        # The order matters: no request may run, unless paused for a weight sync; wake up only the
        # memory of the weights, so that the KV cache does not compete with the update; write; wake
        # up the KV cache; drop prefixes cached under the old weights; then set the version.
        self.check_idle()
        self._version = -1
        with preserved_generators(), torch.no_grad():
            if self._asleep:
                self._hooks.on_memory_released(0)
                self._llm.wake_up(tags=["weights"])
            write()
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._asleep = False
            start = time.perf_counter()
            if not self._partial.paused and self._llm.reset_prefix_cache() is not True:
                raise RuntimeError("vLLM did not reset its prefix cache after a weight update")
        self._version = version
        return time.perf_counter() - start

    def live_parameters(self) -> Mapping[str, Tensor] | None:
        """Return vLLM's own parameters; None if it computes with copies (CPU, latent attention)."""
        if self.topology.device.type != "cuda" or self.shape.latent:
            return None
        expected = self.layout.parameter_shapes(self.shape, rank=self._layout_rank)
        return parameters_as_expected(self._llm, expected, shape=self.shape, dtype=self.dtype)

    def invalidate(self) -> None:
        self._version = -1

    def sleep(self) -> None:
        """Release the memory of weights and KV cache, unless paused requests use the cache.

        With adapters (level 1) a copy of the base weights stays on the host.
        """
        if self.topology.device.type == "cuda" and not (self._asleep or self._partial.paused):
            self._llm.sleep(level=2 if self._adapters is None else 1)
            self._hooks.on_memory_released(sleeping_bytes())
            self._asleep = True
            self._version = -1

    def _check_prompts(self, prompts: Sequence[Prompt], *, tokens: int) -> None:  # generated
        check_prompts(
            prompts, vocab_size=self.shape.vocab_size, longest=self.max_model_len - tokens
        )

    def _require_weights(self) -> None:
        if self._version < 0:
            raise RuntimeError("the engine has no valid weights; sync weights before generating")
        if self._adapters is not None:
            self._adapters.require(self._version)

    @property
    def _lora_request(self) -> Any:
        return self._adapters and self._adapters.request(self._version)

    def _run(self, requests: Sequence[SequenceRequest], **calls: Any) -> None:
        run_requests(
            self._llm.llm_engine, requests,
            stall_limit=self.settings.stall_seconds, on_step=self._hooks.on_step,
            should_stop=self._hooks.should_stop, lora_request=self._lora_request, **calls,
        )  # fmt: skip
