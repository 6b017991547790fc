"""Rehearsals make process groups of their own."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def no_process_groups():
    """Other tests leave theirs in this process."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
