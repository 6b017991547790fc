"""Fixtures for dry runs, which create their own process groups."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def no_process_groups():
    """Destroy the process groups that other tests left in this process."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
