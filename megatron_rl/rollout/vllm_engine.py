"""vLLM in the trainer's processes: one worker per process, engines of `tensor` adjacent ranks.

The external launcher backend (vllm/v1/executor/uniproc_executor.py) runs one engine core in every
process; the ranks of one engine take the same requests, so they schedule alike without talking.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed.agreement import raise_together, sum_over_ranks
from megatron_rl.distributed.topology import Topology
from megatron_rl.distributed.unequal_work import UnequalWork
from megatron_rl.models.shape import ModelShape, read_model_shape
from megatron_rl.resharding.layouts import EngineLayout
from megatron_rl.resharding.push import Resharder, ReshardSettings, SyncStats, WeightHolder
from megatron_rl.rollout.engine import Ended, GenerationStopped, Part, Progress
from megatron_rl.rollout.finished import FinishedResponses, load_tokenizer
from megatron_rl.rollout.in_flight import InFlight, as_generated, asked_of_engine, extended
from megatron_rl.rollout.incoming import Mismatch, check_tensors, round_tensors
from megatron_rl.rollout.process_state import preserved_generators, sleeping_bytes
from megatron_rl.rollout.requests import (
    SequenceRequest,
    check_prompts,
    sampling_requests,
    scoring_requests,
)
from megatron_rl.rollout.response_gather import Generated, gather_responses, gather_seconds
from megatron_rl.rollout.running import GRACE, run_requests
from megatron_rl.rollout.starting import check_expert_parallel, fixed_arguments, start_vllm
from megatron_rl.rollout.stopping import find_stop_rule
from megatron_rl.types import Prompt, Response, SamplingSettings


class VllmEngine:
    """The RolloutEngine that ships: real vLLM, weights pushed from the actor in the same process.

    model_folder: config.json and tokenizer; its weights are not read.
    tensor: ranks per engine; must divide the world and the model's heads.
    expert_parallel: each rank of an engine holds whole experts instead of a slice of every one.
    topology: of the actor, for rank, world size and device. Process groups exist already.
    max_model_len: longest prompt plus response, in tokens.
    kv_cache_bytes: memory for cached keys and values (None on CUDA: by `memory_fraction`).
    max_sequences: requests that run at once on one engine.
    time_limit: seconds for one call of `generate` or `score` on this engine, before it is an error
        on every rank.
    stall_limit: seconds in which it finishes no response, likewise.
    stop_token_ids, stop: tokens and texts that end a response, besides those of the model's files.
    mismatch: how weights are rounded on their way in, to study what a gap to the actor does.
    in_flight: whether `extend` will be called.
    resharding: how weights are moved and verified.
    further_arguments: of vLLM's LLM, those that `engine_argument_problems` has no word against.
    """

    def __init__(
        self,
        model_folder: str | Path,
        *,
        tensor: int,
        topology: Topology,
        dtype: torch.dtype,
        max_model_len: int,
        expert_parallel: bool = False,
        seed: int = 0,
        kv_cache_bytes: int | None = None,
        memory_fraction: float = 0.5,
        max_sequences: int = 256,
        time_limit: float = 7200.0,
        stall_limit: float = 1800.0,
        stop_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        mismatch: Mismatch = "none",
        in_flight: bool = False,
        resharding: ReshardSettings | None = None,
        further_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("start torch.distributed (and Megatron) before the vLLM engine")
        self.shape: ModelShape = read_model_shape(model_folder)
        self.layout = EngineLayout(tensor, topology.world_size, expert_parallel)
        self.layout.check(self.shape)
        on_cuda = topology.device.type == "cuda"
        check_expert_parallel(expert_parallel, on_cuda=on_cuda)
        self.dtype, self.topology, self.max_model_len = dtype, topology, max_model_len
        self.time_limit, self.stall_limit, self.mismatch = time_limit, stall_limit, mismatch
        self.should_stop: Callable[[], bool] = lambda: False  # the run is to end
        self._version, self._asleep = -1, False
        self._engine_seconds = [0.0] * topology.world_size  # by rank
        self.on_step: Callable[[], object] = lambda: None  # and while waiting for other engines
        self.on_given_back: Callable[[int], object] = lambda _: None  # bytes, while it sleeps
        self._work = UnequalWork("generating", patience=stall_limit + 2 * GRACE)
        self._resharder = Resharder(self, resharding or ReshardSettings())
        self._tokenizer = load_tokenizer(model_folder)
        self._stop = find_stop_rule(
            model_folder, self._tokenizer, vocab_size=self.shape.vocab_size,
            token_ids=stop_token_ids, texts=stop,
        )  # fmt: skip
        arguments: dict[str, Any] = {
            "model": str(model_folder),
            "skip_tokenizer_init": not stop,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            "tensor_parallel_size": tensor,
            "enable_expert_parallel": expert_parallel,
            "max_model_len": max_model_len,
            "max_num_seqs": max_sequences,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "gpu_memory_utilization": memory_fraction,
            **fixed_arguments(max_model_len, on_cuda=on_cuda, in_flight=in_flight),
        }
        self._llm = start_vllm(topology, arguments | dict(further_arguments or {}))
        most = max_sequences if on_cuda else None
        self._in_flight = InFlight(self._llm.llm_engine, self._stop, most=most)

    def describe_stop(self) -> str:
        """What ends a response, for the person who starts the run."""
        return self._stop.describe(self._tokenizer)

    @property
    def weight_version(self) -> int:
        """The version of the weights that were received last; -1 before the first."""
        return self._version

    @property
    def engine_seconds(self) -> Sequence[float]:
        """What each engine took for its part of the last `generate`; the same on every rank."""
        return self._engine_seconds[:: self.layout.tensor]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: SamplingSettings,
        on_progress: Progress | None = None,
        on_response: Ended | None = None,
    ) -> list[Response]:
        """`samples` responses to each prompt, ordered by prompt, then sample; all on every rank.

        `on_response` is called as responses end, for each of them on one rank of its engine.
        Every sample has a seed of its own, derived from (sampling.seed, prompt, sample): responses
        do not depend on the layout or on what else runs in the batch. Collective.
        Raises ValueError when a prompt does not fit the engine. When an engine fails or its time is
        up (TimeoutError): the error itself on its ranks, RuntimeError on the others;
        RankTimeoutError when a rank hangs or dies.
        """
        self._check_prompts(prompts, sampling)
        engines, tensor = self.topology.world_size // self.layout.tensor, self.layout.tensor
        mine = list(enumerate(prompts))[self.topology.rank // tensor :: engines]
        kept = FinishedResponses(
            prompts,
            samples,
            expected=len(mine) * samples,
            share=(self.topology.rank % tensor, tensor),
            tokenizer=self._tokenizer,
            weight_version=self._version,
            on_progress=self._work.telling(on_progress),
            on_response=on_response,
        )

        def run() -> list[Generated]:
            # What an earlier call left cached would change roundings: a call depends on its
            # arguments and the weights alone, or a resumed run would differ in the last bits.
            if not self._in_flight.paused:
                self._llm.reset_prefix_cache()
            requests = sampling_requests(mine, samples=samples, sampling=sampling, stop=self._stop)
            self._run(requests, on_finished=kept.take)
            return kept.own

        everything = self._on_all_ranks(run)
        assert [each.place for each in everything] == list(range(len(prompts) * samples))
        return [kept.response(each) for each in everything]

    def extend(self, parts: Sequence[Part], *, keep_cache: bool) -> list[list[Response]]:
        """Bring the responses of each part to its number of tokens by the present weights.

        All on every rank, in their parts' order. `keep_cache`: what goes on next time keeps its
        keys and values, also over a push; otherwise they are computed anew. Collective; raises as
        `generate` does, and then nothing is under way any more.
        """
        for part in parts:
            self._check_prompts(part.prompts, part.sampling)
        engines = self.topology.world_size // self.layout.tensor
        engine, rank = divmod(self.topology.rank, self.layout.tensor)
        asked = asked_of_engine(parts, engine=engine, engines=engines)

        def run() -> list[Generated]:
            own, limit = [each[1:] for each in asked], self.time_limit
            live = self._in_flight.run(own, time_limit=limit, on_step=self.on_step)
            if not keep_cache:
                self._in_flight.forget()
            return [
                as_generated(place, live[key], self._tokenizer)
                for place, key, *_ in asked
                if place % self.layout.tensor == rank
            ]

        return extended(parts, self._on_all_ranks(run), version=self._version)

    def _on_all_ranks(self, run: Callable[[], list[Generated]]) -> list[Generated]:
        """What `run` generates on each rank, on all; an error of one is raised on every one."""
        own: list[Generated] = []
        self._work.begin()
        error: Exception | None = None
        start = time.perf_counter()
        try:
            self._require_weights()
            own = run()
        except Exception as found:  # noqa: BLE001 - the others must not wait, whatever it is
            error = found
        seconds = time.perf_counter() - start
        self._work.finish(while_waiting=self.on_step)
        stopped, doing = isinstance(error, GenerationStopped), f"generating with {self.layout}"
        raise_together(None if stopped else error, doing=doing)
        if sum_over_ranks(int(stopped), doing=doing):
            raise GenerationStopped
        self._engine_seconds = gather_seconds(seconds, device=self.topology.device)
        return gather_responses(own, device=self.topology.device)

    def forget(self) -> None:
        """Let go of the keys and values of all that is under way; it can still go on."""
        self._in_flight.forget()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs of each sequence's tokens from the second on, [length - 1] float32.

        Before temperature and top-p. Every engine scores all sequences itself.
        """
        self._require_weights()
        outputs: dict[int, Any] = {}
        self._run(scoring_requests(sequences), on_finished=outputs.__setitem__)
        scores = []
        for place, sequence in enumerate(sequences):
            positions = outputs[place].prompt_logprobs[1:]
            pairs = zip(positions, sequence[1:], strict=True)
            scores.append(torch.tensor([position[token].logprob for position, token in pairs]))
        return scores

    def push_weights(self, actor: WeightHolder, *, version: int) -> SyncStats:
        """Bring the actor's present weights into this engine; raises unless all of them arrive."""
        return self._resharder.push(actor, version=version)

    def check_idle(self) -> None:
        """RuntimeError while requests run; paused ones go on with other weights."""
        if self._in_flight.is_running:
            raise RuntimeError("the engine is generating; push weights between calls")

    def receive(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> float:
        """Replace every parameter by HF tensors of full shape, on each rank of each engine.

        Only the slice that this rank computes with is read. Returns the seconds that resetting the
        cache took. ValueError naming the parameters when one is missing, extra or of a wrong shape.
        After any error the engine refuses to generate until a push succeeds.
        """
        request = {
            "weights": round_tensors(check_tensors(weights, self.shape), self.mismatch),
            "expected": self.layout.parameter_shapes(self.shape, rank=self.topology.rank),
            "tied_embeddings": self.shape.tied_embeddings,
        }

        def load() -> None:
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": request})
            self._llm.finish_weight_update()

        return self.overwrite(load, version=version)

    def overwrite(self, write: Callable[[], object], *, version: int) -> float:
        """Let `write` replace every parameter; returns the seconds that resetting the cache took.

        After any error the engine refuses to generate until a push succeeds.
        """
        # The order matters:
        #   1. no request may be running, unless it was paused for other weights to go on with it;
        #   2. wake the weights' memory only, so that cached keys do not compete with the update;
        #   3. write: vLLM's own loaders cut, merge and repack, or slices go straight in;
        #   4. wake the memory for keys and values;
        #   5. forget cached prefixes: they were computed with the old weights;
        #   6. only then is the version the new one.
        self.check_idle()
        self._version = -1
        with preserved_generators(), torch.no_grad():
            if self._asleep:
                self.on_given_back(0)
                self._llm.wake_up(tags=["weights"])
            write()
            if self._asleep:
                self._llm.wake_up(tags=["kv_cache"])
                self._asleep = False
            start = time.perf_counter()
            if not self._in_flight.paused and self._llm.reset_prefix_cache() is not True:
                raise RuntimeError("vLLM did not reset its prefix cache after a weight update")
        self._version = version
        return time.perf_counter() - start

    def live_parameters(self) -> Mapping[str, Tensor] | None:
        """vLLM's own parameters where they are laid out exactly as the table says, else None.

        On CPU vLLM repacks them. Experts are left to vLLM's loaders, whose kernels may reorder
        them.
        """
        rounded = self.mismatch != "none"  # whole tensors, on the way to the loaders
        if self.topology.device.type != "cuda" or self.shape.experts is not None or rounded:
            return None
        found: Mapping[str, Tensor] = self._llm.apply_model(
            lambda model: dict(model.named_parameters())
        )[0]
        expected = self.layout.parameter_shapes(self.shape, rank=self.topology.rank)
        if self.shape.tied_embeddings:
            expected.pop("lm_head.weight")  # the same parameter, listed once
        as_expected = found.keys() == expected.keys() and all(
            tuple(found[name].shape) == size and found[name].dtype == self.dtype
            for name, size in expected.items()
        )
        return found if as_expected else None

    def invalidate(self) -> None:
        """Refuse to generate until other weights are received."""
        self._version = -1

    def sleep(self) -> None:
        """Free the device memory of weights and cache; the next push brings the weights back."""
        # What is paused has its keys and values in that memory.
        if self.topology.device.type == "cuda" and not (self._asleep or self._in_flight.paused):
            self._llm.sleep(level=2)
            self.on_given_back(sleeping_bytes())
            self._asleep = True
            self._version = -1

    def _check_prompts(self, prompts: Sequence[Prompt], sampling: SamplingSettings) -> None:
        most = self.max_model_len - sampling.max_tokens
        check_prompts(prompts, vocab_size=self.shape.vocab_size, longest=most)

    def _require_weights(self) -> None:
        if self._version < 0:
            raise RuntimeError("the engine has no valid weights; push them before generating")

    def _run(
        self, requests: Sequence[SequenceRequest], *, on_finished: Callable[[int, Any], None]
    ) -> None:
        run_requests(
            self._llm.llm_engine, requests, time_limit=self.time_limit,
            stall_limit=self.stall_limit, on_finished=on_finished, on_step=self.on_step,
            should_stop=self.should_stop,
        )  # fmt: skip
