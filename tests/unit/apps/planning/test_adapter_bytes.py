"""Memory of engines that compute with adapters themselves."""

from megatron_rl.apps.planning.adapter_bytes import host_bytes, slot_bytes
from megatron_rl.apps.planning.devices import DEVICES
from megatron_rl.apps.planning.footprint import engine_bytes
from megatron_rl.apps.planning.parts import Parts
from megatron_rl.apps.planning.push_time import push_seconds

from megatron_rl.config import parse_config
from megatron_rl.models.shape import read_model_shape
from tests.unit.apps.planning.models import DENSE, save_shape


def config_of(tmp_path, *, push, lag=None):
    path = save_shape(tmp_path, DENSE)  # 4 layers, hidden size 128, 8 heads of 16, 4 of keys
    return parse_config(
        {
            "model": {"path": str(path)}, "data": {"train": "none.jsonl"}, "behavior": "engine",
            "lora": {"rank": 12, "targets": ["qkv", "fc2"], "push": push},
            "optimizer": {"learning_rate": 1e-4}, "lag": lag or {},
            "rollout": {"tensor": 2, "max_response_tokens": 100}, "trainer": {"dtype": "bfloat16"},
        }
    )  # fmt: skip


def test_slots_are_counted_by_rank_of_the_slot_and_by_version(tmp_path):
    assert slot_bytes(config_of(tmp_path, push="merged")) == {}
    assert host_bytes(config_of(tmp_path, push="merged"), engine=7) == {}
    # Slots of rank 16 on one of 2 ranks. qkv: A of q, k and v, 3 x 128; B, (128 + 64 + 64) / 2.
    # fc2: A, 384 / 2; B, 128. In 2 bytes.
    slot = 2 * 4 * 16 * (3 * 128 + 128 + 192 + 128)
    # On the host adapters of rank 12, whole: an A of 128, B of 256; 384 and 128.
    whole = 2 * 4 * 12 * (128 + 256 + 384 + 128)
    for versions, lag in (
        (1, {}),
        (1, {"partial_rollouts": {"every_tokens": 30, "cache": "recompute"}}),
        (4, {"partial_rollouts": 30}),  # 100 tokens in windows of 30
    ):
        config = config_of(tmp_path, push="adapters", lag=lag)
        assert slot_bytes(config) == {f"{versions} slots of adapters": versions * slot}
        on_host = {"the sleeping engine's weights": 7, "adapters": versions * whole}
        assert host_bytes(config, engine=7) == on_host


def test_plans_count_one_slot_and_push_adapters_alone(tmp_path):
    shape = read_model_shape(save_shape(tmp_path, DENSE))
    lora = {"lora_rank": 12, "lora_targets": ("qkv", "fc2"), "rollout_tensor": 2, "data": 2}
    merged, sent = Parts(**lora), Parts(**lora, lora_versions=1)
    slot = 2 * 4 * 16 * (3 * 128 + 128 + 192 + 128)
    assert engine_bytes(shape, sent) - engine_bytes(shape, merged) == slot
    device = next(iter(DEVICES.values()))
    assert push_seconds(shape, sent, device) < push_seconds(shape, merged, device)
