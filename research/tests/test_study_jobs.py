"""A study whose runs are jobs of a real SLURM."""

import json

from tests.functional.slurm.test_slurm import launcher, slurm, started, steps_of

__all__ = ["launcher", "slurm", "started"]  # fixtures


def test_runs_of_study_are_jobs(slurm, launcher):
    """Side by side, each on one node; the login node tables them, and starts none again."""
    base = json.loads((launcher.folder / "tiny.yaml").read_text())
    base["parallel"], base["trainer"]["steps"] = {}, 2
    del base["run"]
    objectives = {name: {"objective": {"name": name}} for name in ("pnpo", "gspo")}
    (launcher.folder / "study.yaml").write_text(json.dumps({
        "name": "jobs", "base": base, "axes": {"objective": objectives}, "seeds": [1],
        "side_by_side": 2,
    }))  # fmt: skip
    values = json.loads((launcher.folder / "slurm.yaml").read_text())
    launcher.write_cluster("one_node", values | {"nodes": 1})
    for _ in range(2):
        output = launcher("study.yaml", "--cluster", "one_node.yaml", module="research.study")
        assert "jobs: 2 of 2 done" in output and "failed" not in output, output
    for name in objectives:
        run = launcher.run_folder(f"jobs/runs/{name}-seed1")
        assert steps_of(run) == 2 and (run / "launch" / "001" / "exits").exists()
        assert not (run / "launch" / "002").exists()
    assert (launcher.run_folder("jobs") / "results.parquet").exists()
