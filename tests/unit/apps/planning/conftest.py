"""Fixtures for dry runs, which create their own process groups."""

import gc

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def no_process_groups():
    """Destroy the process groups that other tests left in this process."""
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def no_garbage():
    """Collect other tests' garbage, and leave out of further collections what is there now.

    A file left open there is reported as an error where it is collected; if that is inside a dry
    run, the error's traceback keeps the dry run's tensors.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_garbage_of_this_module(no_garbage):
    """Collect the garbage of the tests before, which is little."""
    gc.collect()
