"""Checks of a run that `megatron-rl launch` makes in the job's environment.

    python -m megatron_rl.preflight CONFIG [--processes N]

Prints the problems as a JSON list. Without --processes the run uses this machine's devices.
"""

import argparse
import json
import sys

from megatron_rl.config import load_config
from megatron_rl.runtime.processes import prepare_environment


def main() -> None:
    """Check the run that a config file describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--processes", type=int)
    options = parser.parse_args()
    prepare_environment()
    from megatron_rl.preflight.layout import default_world_size
    from megatron_rl.preflight.start import run_problems

    config = load_config(options.config)
    processes = options.processes or default_world_size(config)
    problems = run_problems(config, world_size=processes, is_local=options.processes is None)
    sys.stdout.write(json.dumps(problems) + "\n")


if __name__ == "__main__":
    main()
