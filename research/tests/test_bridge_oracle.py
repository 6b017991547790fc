"""Our tables of weights against Megatron-Bridge's mappings, where its releases are unpacked."""

import pytest

from research.tools.bridge_oracle import RELEASES, ROOT, run

MISSING = [f"{name}-{version}" for name, version in RELEASES
           if not (ROOT / f"{name}-{version}").is_dir()]  # fmt: skip


@pytest.mark.skipif(
    bool(MISSING),
    reason=f"{MISSING} not in .cache/releases; run research/tools/bridge_oracle.py once",
)
def test_every_element_is_where_megatron_bridge_loads_it(tmp_path):
    for rank in run(tmp_path):
        assert len(rank) >= 6
        for name, found in rank.items():
            assert not found["differ"], (name, found)
            # DeepSeek's first projections are one product here and two there.
            apart = [*found["only_here"], *found["only_there"]]
            assert all(key.endswith("_down_proj.weight") for key in apart), (name, found)
            assert found["elements"] > 10_000, name
