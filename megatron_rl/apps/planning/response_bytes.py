"""Bytes of responses that a rank receives in a step, on the host."""

from dataclasses import dataclass

from megatron_rl.config import Config
from megatron_rl.data.token_rows import PIECE_BYTES

COLUMN = 4  # bytes of a token id, and of a log-prob
MIB = 2**20


@dataclass(frozen=True)
class ResponseBytes:
    """Upper limits of one step, if every response has the maximum length; without texts."""

    rank: int  # of any rank but 0: what it trains, and the behavior log-probs of what it owns
    writer: int  # of rank 0, which writes all rollouts
    piece: int  # sent or received in one collective, unless a single response is longer

    def __str__(self) -> str:
        return (
            f"responses of a step, on the host: a rank receives at most {self.rank / MIB:,.1f} MiB "
            f"and rank 0, which writes them, {self.writer / MIB:,.1f} MiB, in pieces of "
            f"{self.piece / MIB:,.0f} MiB"
        )


def response_bytes(config: Config, *, processes: int) -> ResponseBytes:
    """Count the bytes from the settings."""
    rollout, minibatches = config.rollout, config.trainer.minibatches
    responses = rollout.prompts_per_step * rollout.responses_per_prompt
    replicas, engines = processes // config.parallel.model_size, processes // rollout.tensor
    trained = minibatches * -(-responses // (minibatches * replicas))
    prompts = -(-rollout.prompts_per_step // engines)
    owned = -(-prompts * rollout.responses_per_prompt // rollout.tensor)
    # Token ids, log-probs of the engine and, if a group waited or is replayed, of the behavior.
    each = COLUMN * rollout.max_response_tokens
    everything = 3 * each * responses
    partial = config.lag.partial_rollouts is not None  # every rank has all of them
    own = everything if partial else min(everything, 3 * each * trained + each * owned)
    return ResponseBytes(
        0 if processes == 1 else own, 0 if processes == 1 else everything, PIECE_BYTES
    )
