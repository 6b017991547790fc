"""Faults inside a rank. Each is called before the run, and strikes in the middle of it.

A fault that hangs first takes most of its phase's budget away from its rank, so that a test need
not wait for minutes, and no busy machine makes another rank late.
"""

import ctypes
import errno
import os
import signal
import time

import torch

from megatron_rl.runtime.watchdog import Heartbeat
from megatron_rl.trainer import build
from megatron_rl.trainer import checkpointing as saving

BUDGET = 2.0  # seconds that are left to whoever hangs
_progress: list[Heartbeat] = []


def _remember_progress() -> None:
    watch = build.watch

    def remember(*arguments, **settings):
        heartbeat, warning = watch(*arguments, **settings)
        _progress.append(heartbeat)
        return heartbeat, warning

    build.watch = remember


def _hurry() -> None:
    progress = _progress[0]
    progress._now = progress._now[0], BUDGET
    progress.count()


def _before(owner, name, action, *, call) -> None:
    """Do something before a function's n-th call in this process; from 1."""
    function, calls = getattr(owner, name), []

    def wrapped(*arguments, **settings):
        calls.append(1)
        if len(calls) == call:
            action(*arguments)
        return function(*arguments, **settings)

    setattr(owner, name, wrapped)


def stop_in_an_update(*, is_mine):
    """SIGSTOP, in the second step."""
    from megatron_rl.actor.actor import MegatronActor

    def stop(*_):
        _hurry()
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:  # the kernel may stop this thread a few calls later than the one that asked
            signal.pause()

    if is_mine:
        _remember_progress()
        _before(MegatronActor, "update", stop, call=6)


def slow_down_training(*, is_mine):
    """A rank that needs five seconds more for the passes of each update, and for nothing else."""
    from megatron_rl.actor.training import TrainedModel

    if is_mine:
        run = TrainedModel._run

        def slow(self, *packs, forward_only, **settings):
            def late(*given):
                self._late = self._late or time.sleep(5) or True
                return compute(*given)

            compute, self._late = packs[1], forward_only
            return run(self, packs[0], late, forward_only=forward_only, **settings)

        TrainedModel._run = slow


def hold_the_lock(*, is_mine):
    """A busy loop in C code that never lets go of the interpreter's lock, in the second scoring."""
    from megatron_rl.actor.actor import MegatronActor

    def spin_for_ever(*_):
        _hurry()
        sum(range(10**12))

    if is_mine:
        _remember_progress()
        _before(MegatronActor, "_score", spin_for_ever, call=2)


def kill_the_engine(*, is_mine):
    """An engine that never comes back from a step, as when its device has died."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from megatron_rl.distributed.agreement import StragglerBarrier

    begun = []

    def wait_for_a_dead_device(*_):
        (work,) = {one for one in begun if one.name == "generating"}
        while work._store.get("rank 0").decode() != f"{work._rounds} done":
            time.sleep(0.01)  # until the other rank waits for this one
        _hurry()
        while True:  # a signal ends a sleep
            ctypes.CDLL(None).sleep(3600)

    if is_mine:
        _remember_progress()
        begin = StragglerBarrier.begin
        StragglerBarrier.begin = lambda work: (begun.append(work), begin(work))[1]
        _before(LLMEngine, "step", wait_for_a_dead_device, call=24)


def hang_in_a_save(*, is_mine):
    """A disk that does not answer: here a pipe that nobody reads."""

    def write_for_ever(*_):
        _hurry()
        _, write = os.pipe()
        os.write(write, bytes(1 << 20))

    if is_mine:
        _remember_progress()
        _before(saving, "sum_files", write_for_ever, call=2)


def stop_in_a_save(*, is_mine):
    """SIGSTOP, in the second checkpoint."""

    def stop(*_):
        os.kill(os.getpid(), signal.SIGSTOP)
        while True:  # as above
            signal.pause()

    if is_mine:
        _before(saving, "sum_files", stop, call=2)


def fill_the_disk(*, is_mine):
    """ENOSPC: elsewhere in the first checkpoint, while Megatron writes; here in the second."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from megatron_rl.actor.actor import MegatronActor

    save, write, calls = MegatronActor.save, filesystem_async._write_item, []

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def broken_save(self, folder):
        calls.append(1)
        filesystem_async._write_item = fail if len(calls) == 1 else write
        save(self, folder)

    if is_mine:
        _before(saving, "sum_files", fail, call=1)  # the first one to come so far
    else:
        MegatronActor.save = broken_save


def _after(owner, name, action) -> None:
    """Do something after each of a function's calls in this process: action(self, number, ...)."""
    function, calls = getattr(owner, name), []

    def wrapped(self, *arguments, **settings):
        result = function(self, *arguments, **settings)
        calls.append(1)
        action(self, len(calls), *arguments, **settings)
        return result

    setattr(owner, name, wrapped)


def break_first_ratio(*, is_mine):
    """From step 2 on behavior log-probs are not those of the weights that generated."""
    from megatron_rl.rollouts.behavior import ModelLogprobs

    score, calls = ModelLogprobs.score, []

    def shifted(self, batch):
        batch = score(self, batch)
        calls.append(1)
        if len(calls) >= 2:
            for pack in batch.packs:
                pack.behavior_logprobs[pack.response_mask] -= 1e-3
        return batch

    if is_mine:
        ModelLogprobs.score = shifted


def break_zero_rate_weights(*, is_mine):
    """An optimizer that moves one weight in its last bit at learning rate 0."""
    from megatron_rl.actor.actor import MegatronActor

    def move(actor, *_, **__):
        if actor.settings.optimizer.learning_rate == 0.0:
            weight = next(iter(actor.named_parameters_local().values())).data.view(-1)[:1]
            weight.copy_(torch.nextafter(weight, weight + 1))

    if is_mine:
        _after(MegatronActor, "update", move)


def break_zero_rate_ratios(*, is_mine):
    """Something that the weights do not show changes in each update at learning rate 0."""
    from megatron_rl.actor.actor import MegatronActor

    def drift(actor, _, minibatch, *__, **___):
        if actor.settings.optimizer.learning_rate == 0.0:
            minibatch.micro_batches[0].behavior_logprobs *= 1.01

    if is_mine:
        _after(MegatronActor, "update", drift)


def break_engine_weights(*, is_mine):
    """After the push of step 2 this rank's engine has another last norm."""
    from megatron_rl.engine.vllm_engine import VllmEngine

    def scale(engine, *_, version):
        if version == 2:
            engine._llm.apply_model(lambda model: model.model.norm.weight.data.mul_(1.5))

    if is_mine:
        _after(VllmEngine, "sync_weights", scale)


def compute_nonsense(*, is_mine):
    """NaN in update 2, an infinite gradient in update 4, NaN in a weight after step 2."""
    from megatron_rl.actor import training
    from megatron_rl.actor.actor import MegatronActor

    update, step, calls = MegatronActor.update, training.take_step, []

    def broken_step(optimizer, wrapped, *arguments, **options):
        if len(calls) == 4:
            for chunk in wrapped:
                for buffer in chunk.buffers:
                    buffer.grad_data.fill_(float("inf"))
        return step(optimizer, wrapped, *arguments, **options)

    def broken_update(self, minibatch, *arguments, **options):
        calls.append(1)
        weight = next(iter(self.named_parameters_local().values()))
        kept = weight.detach().clone()
        if len(calls) == 2:
            with torch.no_grad():
                weight.view(-1)[:] = float("nan")
        result = update(self, minibatch, *arguments, **options)
        with torch.no_grad():
            if len(calls) == 2:
                weight.copy_(kept)
            if len(calls) == 8:
                weight.view(-1)[0] = float("nan")
        return result

    if is_mine:
        MegatronActor.update, training.take_step = broken_update, broken_step


def compute_nonsense_and_stop(*, is_mine):
    """The nonsense of the first step, then SIGSTOP in the second one."""
    compute_nonsense(is_mine=is_mine)
    stop_in_an_update(is_mine=is_mine)


def damage_a_push(*, is_mine):
    """One bit changes on its way to engines on ranks of their own, in the second weight sync."""
    from megatron_rl.distributed.link import WeightMessages
    from megatron_rl.resharding.push import Resharder

    start, push, calls = WeightMessages.start, Resharder.push, [0]

    def counted_push(self, *arguments, **settings):
        calls[0] += 1
        return push(self, *arguments, **settings)

    def damaged_start(self, *, sends, receives):
        if calls[0] == 2 and sends:
            wire, _ = sends[0]
            wire[len(wire) // 2] ^= 1
        return start(self, sends=sends, receives=receives)

    if is_mine:
        Resharder.push, WeightMessages.start = counted_push, damaged_start


def run_out_of_memory(*, is_mine, call=100):
    """An engine whose device has no memory left, in this call of its `step`.

    The hundredth is in the second rollout batch or later.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    if is_mine:
        _before(LLMEngine, "step", fail, call=call)
