"""Check of a run's input files before submission, in the environment of its job."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from megatron_rl.apps.launch.cluster import SlurmCluster
from megatron_rl.apps.launch.launch_plan import Launch
from megatron_rl.apps.launch.source import PACKAGE
from megatron_rl.config import ConfigError, dump_config

LONGEST = 300.0  # seconds; importing a verifier may take two minutes


def check_inputs(launch: Launch) -> str | None:
    """Return why the files could not be checked, or None; ConfigError if the run cannot start.

    The checks run in the training environment, because the launcher's lacks the tokenizers and the
    imports of a verifier. For containers only the paths are checked (`plan_launch`).
    """
    cluster, processes = launch.cluster, []
    if isinstance(cluster, SlurmCluster):
        if cluster.container is not None:
            return None
        processes = ["--processes", str(launch.nodes * cluster.processes_per_node)]
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(launch.config), encoding="utf-8")
        command = [launch.python, "-m", "megatron_rl.preflight", str(file), *processes]
        try:
            done = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False,
                timeout=LONGEST, env=os.environ | {"PYTHONPATH": path},
            )  # fmt: skip
            problems = json.loads(done.stdout.strip().splitlines()[-1])
        except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
            output = "" if isinstance(error, OSError | subprocess.TimeoutExpired) else done.stderr
            last = output.strip().splitlines()[-1:] or [str(error)]
            return (
                f"prompts, reward and weights were not checked: {launch.python} failed: {last[0]}"
            )
    if problems:
        raise ConfigError("this launch cannot start:\n  " + "\n  ".join(problems))
    return None
