"""The bytes of responses that the dry run names, by hand."""

from megatron_rl.apps.planning.response_bytes import response_bytes

from megatron_rl.config import parse_config


def config(**sections):
    values = {
        "model": {"path": "m"}, "data": {"train": "t"},
        "rollout": {"prompts_per_step": 512, "responses_per_prompt": 16,
                    "max_response_tokens": 32768},
        "parallel": {"tensor": 8, "pipeline": 4},
    }  # fmt: skip
    return parse_config(values | sections)


def test_rank_receives_what_its_replica_trains_and_rank_0_everything():
    # 512 * 16 * 32,768 = 2**28 tokens of 12 bytes; 1,024 / 32 = 32 replicas. 4 bytes of each token
    # come back to the engine that generated it; one with a prompt has its 16 responses.
    found = response_bytes(config(), processes=1024)
    assert found.writer == 12 * 2**28
    assert found.rank == 12 * 2**28 // 32 + 4 * 16 * 32768
    assert "a rank receives at most 98.0 MiB and rank 0, which writes them, 3,072.0 MiB" in str(
        found
    )


def test_one_replica_receives_everything_and_one_process_nothing():
    assert response_bytes(config(), processes=32).rank == 12 * 2**28
    alone = response_bytes(config(parallel={}), processes=1)
    assert (alone.rank, alone.writer) == (0, 0)
