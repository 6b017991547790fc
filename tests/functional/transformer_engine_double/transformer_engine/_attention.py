"""Attention inside each sequence of a THD pack, whole or sharded over context parallelism.

As in Transformer Engine's pytorch/attention/dot_product_attention/.
"""

import itertools

import torch

from transformer_engine._modules import Module


def _places(ends, *, cp_size, cp_rank):
    """Places in the pack of a rank's tokens, in their order on the rank.

    `thd_partition_src_index` of common/fused_attn/context_parallel.cu, token by token.
    """
    for start, end in itertools.pairwise(end // cp_size for end in ends):
        length = end - start
        for index in range(length):
            offset = cp_rank if index < length // 2 else (cp_size - 1) * 2 - cp_rank
            yield index + start * cp_size + length // 2 * offset


class DotProductAttention(Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        *,
        num_gqa_groups,
        attention_dropout,
        attn_mask_type,
        sequence_parallel,
        tp_size,
        get_rng_state_tracker,
        tp_group,
        layer_number,
        attention_type,
        softmax_scale=None,
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
    ):
        super().__init__()
        assert attention_type == "self" and attention_dropout == 0 and cp_comm_type == "p2p"
        self.heads, self.groups = num_attention_heads // tp_size, num_gqa_groups // tp_size
        self.scale = softmax_scale or kv_channels**-0.5
        self.cp_group = cp_group

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        *,
        qkv_format,
        cu_seqlens_q,
        cu_seqlens_kv,
        cu_seqlens_q_padded,
        cu_seqlens_kv_padded,
        max_seqlen_q,
        max_seqlen_kv,
        attn_mask_type,
        pad_between_seqs=None,
    ):
        """[t, H, d], [t, K, d], [t, K, d] -> [t, H * d]; boundaries are those of the whole pack."""
        # Padding between sequences is told by identity; only without it do all kernels qualify.
        assert cu_seqlens_q_padded is cu_seqlens_q and cu_seqlens_kv_padded is cu_seqlens_kv
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal")
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert query.shape[1] == self.heads and key.shape[1] == self.groups
        ends = cu_seqlens_q.tolist()
        longest = max(end - start for start, end in itertools.pairwise(ends))
        assert max_seqlen_q == max_seqlen_kv == longest
        place = mine = torch.arange(ends[-1])
        if self.cp_group is not None:
            mine, key, value = self._gather(ends, key, value)
        sequence = torch.bucketize(place, torch.tensor(ends[1:]), right=True)
        seen = (sequence == sequence[mine, None]) & (place <= mine[:, None])  # [t, T]
        repeats = self.heads // self.groups
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)

    def _gather(self, ends, *shards):
        """This rank's places, and the other ranks' rows too, in the order of the pack."""
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        size = self.cp_group.size()
        assert all(end % (2 * size) == 0 for end in ends)
        order = [
            torch.tensor(list(_places(ends, cp_size=size, cp_rank=rank))) for rank in range(size)
        ]
        back = torch.cat(order).argsort()
        whole = [gather_from_sequence_parallel_region(x, group=self.cp_group) for x in shards]
        return order[self.cp_group.rank()], *(x[back] for x in whole)
