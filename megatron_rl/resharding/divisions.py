"""Division of a model over parallel ranks: layers over pipeline stages, sizes over shards."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from megatron_rl.errors import UserError
from megatron_rl.models.shape import ModelShape


def chunk_layers(
    num_layers: int, *, chunks: int, sizes: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Return the global layers of every model chunk, in model order.

    chunks: pipeline stages, times virtual stages. sizes: the number of layers of each chunk; None
    divides evenly where possible. Otherwise chunks differ by one layer, and the smaller ones are at
    both ends, the last one first: they also compute the logits and the embedding.
    Raises ValueError if the sizes do not fit or a chunk would have no layer.
    """
    if sizes is None:
        sizes = _automatic_sizes(num_layers, chunks)
    elif len(sizes) != chunks or sum(sizes) != num_layers or min(sizes) < 1:
        raise UserError(
            f"stage_layers={list(sizes)} must list the layers of {chunks} model chunks (pipeline "
            f"stages times virtual stages), each 1 or more, with a sum of {num_layers}"
        )
    return tuple(range(*span) for span in pairwise(accumulate(sizes, initial=0)))


def _automatic_sizes(num_layers: int, chunks: int) -> list[int]:
    depth, rest = divmod(num_layers, chunks)
    if depth == 0:
        raise UserError(f"{num_layers} layers cannot be divided among {chunks} model chunks")
    sizes = [depth + (rest > 0)] * chunks
    inwards = chain.from_iterable(zip(reversed(range(chunks)), range(chunks), strict=True))
    for chunk in list(dict.fromkeys(inwards))[: -rest % chunks]:
        sizes[chunk] -= 1
    return sizes


def sharded_sizes(shape: ModelShape) -> tuple[tuple[str, int, str], ...]:
    """List what the actor's parallel sizes must divide: (kind of size, number, name)."""
    heads = [("tensor", shape.num_attention_heads, "attention heads")]
    if shape.delta:
        heads.append(("tensor", shape.delta.key_heads, "key heads of gated delta nets"))
    dense = [("tensor", shape.ffn_hidden_size, "feed-forward units")]
    if shape.experts is None:
        return (*heads, *dense)
    shared = shape.experts.shared_ffn_hidden_size
    return (
        *heads,
        *(dense if shape.layers_with("dense") else []),
        *([("tensor", shared, "units of the shared expert")] if shared else []),
        (
            ("expert tensor", 1, "expert with biases, which Megatron keeps whole,")
            if shape.traits.biases
            else ("expert tensor", shape.experts.ffn_hidden_size, "units of an expert")
        ),
        ("expert parallel", shape.experts.num_experts, "experts"),
    )


def shares_key_heads(shape: ModelShape, *, tp_size: int) -> bool:
    """Return whether tensor parallelism divides the key-value heads, or divides among them.

    With fewer heads than ranks, several ranks use the same head: vLLM copies its weights, Megatron
    gathers the activations that its shards compute.
    """
    groups = shape.num_query_groups
    return groups % tp_size == 0 or tp_size % groups == 0


def require_divisible(size: int, what: str, *, by: int, of: str) -> None:
    """Raise ValueError unless `by` divides `size`."""
    if size % by:
        raise UserError(f"{size} {what} cannot be divided by {of} {by}")


def require_fit(shape: ModelShape, *, tp_size: int, ep_size: int, expert_tp_size: int) -> None:
    """Raise ValueError unless the actor's sizes divide what they shard."""
    sizes = {"tensor": tp_size, "expert tensor": expert_tp_size, "expert parallel": ep_size}
    for kind, whole, name in sharded_sizes(shape):
        require_divisible(whole, name, by=sizes[kind], of=f"{kind} size")
    if not shares_key_heads(shape, tp_size=tp_size):
        raise UserError(
            f"{shape.num_query_groups} key-value heads neither are a multiple of nor divide "
            f"tensor size {tp_size}"
        )
