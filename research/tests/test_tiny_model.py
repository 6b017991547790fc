"""Fine-tuning of the tiny task's model: it ends in time or says so, and rounds identically."""

import os
import subprocess
import sys

import pytest

from megatron_rl.apps.tasks.tiny_task import build_model, build_tokenizer
from research.tasks import tiny_model as tiny
from tools.fine_tuning import PORTABLE


def test_fine_tuning_that_does_not_learn_raises():
    settings = tiny.FineTuningSettings(longest_warm_up=2, batch=4)
    tokenizer = build_tokenizer(128)
    with pytest.raises(ValueError, match="not learned after 2 updates"):
        tiny.train_model(build_model(settings, tokenizer, 128), tokenizer, settings)


TRAIN_A_LITTLE = """
import random
import torch
from megatron_rl.apps.tasks.tiny_task import build_model, build_tokenizer
from research.tasks import tiny_model as tiny
from tools.fine_tuning import update
torch.set_num_threads(1)
torch.manual_seed(1)
settings = tiny.FineTuningSettings(batch=8)
tokenizer = build_tokenizer(128)
model = build_model(settings, tokenizer, 128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = random.Random(1)
for _ in range(2):
    batch = tiny.draw_batch(generator, settings, tokenizer, 0.0)
    print(update(model, optimizer, *batch).hex())
print(float(sum(p.double().abs().sum() for p in model.parameters())).hex())
"""


def test_fine_tuning_rounds_identically_on_older_processors():
    """MKL and ATen can emulate a processor without AVX."""

    def train(**environment):
        return subprocess.run(
            [sys.executable, "-c", TRAIN_A_LITTLE],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    older = {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    portable = train(**PORTABLE)
    assert train(**PORTABLE, **older) == portable
    # The comparison would notice: without the setting for MKL the processor decides.
    without = {name: value for name, value in PORTABLE.items() if name != "MKL_CBWR"}
    assert train(**without, **older) != portable
