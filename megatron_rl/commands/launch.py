"""`megatron-rl launch`, and the commands `status`, `logs` and `cancel` for launched runs."""

import argparse
import time
from pathlib import Path

from megatron_rl.apps.launch.following import (
    Record,
    cancel,
    describe,
    final_status,
    find_record,
    read_logs,
)
from megatron_rl.commands.ending import warn
from megatron_rl.commands.options import Commands, add_command, count, option, overrides
from megatron_rl.config import ConfigError


def add_parser(commands: Commands) -> None:
    """Add the `launch`, `status`, `logs` and `cancel` subcommands."""
    add_command(
        commands, "launch", _launch,
        option("config", "YAML file of the run.", metavar="CONFIG"),
        option("--cluster", "YAML file of the cluster; see examples/pnpo/clusters.",
               required=True, metavar="FILE"),
        option("--nodes", "Number of nodes. Default: the cluster file's.", type=count, metavar="N"),
        option("--chain", "Number of jobs to submit; each continues the run where the previous job "
               "ended. Default: %(default)s.", type=count, metavar="N", default=1),
        option("--dry-run", "Print scripts, environment, config and source without submitting."),
        option("--offline", "With --dry-run: require neither SLURM nor the cluster's files, for "
               "instance on a laptop, and list what could not be checked."),
        option("--committed", "Reject uncommitted changes of the source instead of packaging "
               "them."),
        option("--simulate-preemption", "Interrupt the run once, after N steps, as a preemption "
               "would.", type=count, metavar="N"),
        option("--wait", "Print the output of the ranks until the run ends; exit with its status."),
        overrides("trainer.steps=5"),
        help="Train on a cluster, or on this machine in the background, with NeMo-Run.",
        description="Check the configuration and inputs, then submit the run with NeMo-Run and "
        "return. Requires the environment that tools/setup_env.sh --launcher creates.",
        sets_environment=False,
    )  # fmt: skip
    name = option("name", "Name or folder of the run.", metavar="NAME")
    add_command(
        commands, "status", _status, name,
        help="Show the progress of a run.",
        description="Show the state, step and newest checkpoint of a run, its jobs if it was "
        "launched, and its error if it failed. Exits with 0 unless the run has failed or "
        "stopped early.",
    )  # fmt: skip
    add_command(
        commands, "logs", _logs, name,
        option("-f --follow", "Keep printing until the run ends."),
        help="Print the output of a run.",
        description="Print the output of a run's processes, or its log.txt if it was started by "
        "megatron-rl train.",
    )  # fmt: skip
    add_command(
        commands, "cancel", _cancel, name,
        help="Stop a run.",
        description="Stop a run. Pending jobs are cancelled immediately; a run on this machine "
        "saves its step first, so that it can be resumed.",
    )  # fmt: skip


def _launch(options: argparse.Namespace, arguments: list[str]) -> int:
    from megatron_rl.apps.launch.cluster import SlurmCluster, load_cluster
    from megatron_rl.apps.launch.launch_plan import check_inputs, plan_launch, require_committed
    from megatron_rl.apps.launch.starting import preview, start_here, start_on_slurm
    from megatron_rl.config import load_config, with_absolute_paths
    from megatron_rl.preflight.hub_names import resolve_hub_names

    if options.offline and not options.dry_run:
        raise ConfigError("--offline: only valid with --dry-run; add it, or remove --offline")
    cluster = load_cluster(options.cluster)
    given = with_absolute_paths(load_config(options.config, options.overrides))
    named, resolved, problems = resolve_hub_names(given, echo=warn)
    if problems and not options.offline:
        raise ConfigError("this launch cannot start:\n  " + "\n  ".join(problems))
    if given.data.epochs is not None and not options.offline:
        from megatron_rl.preflight.start import resolve_epochs

        resolved += resolve_epochs(named, echo=warn)[1]
    launch = plan_launch(
        options.config,
        cluster,
        overrides=[*options.overrides, *resolved],
        name=f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}",
        nodes=options.nodes,
        chain=options.chain,
        preempt_after=options.simulate_preemption,
        offline=options.offline,
    )
    if options.committed:
        require_committed(launch.source)
    if not options.offline and (warning := check_inputs(launch)) is not None:
        warn(warning)
    if options.dry_run:
        print(preview(launch, offline=options.offline), end="")
        return 0
    on_slurm = isinstance(cluster, SlurmCluster)
    record = start_on_slurm(launch) if on_slurm else start_here(launch)
    started = f"job {', '.join(record.jobs)}" if on_slurm else f"process {record.process}"
    name = record.name
    print(f"{name}: {started}; run directory {record.run}")
    if launch.source.uncommitted:
        print(f"  includes uncommitted changes: {record.folder}/uncommitted.diff")
    print(f"  megatron-rl status {name}; megatron-rl logs -f {name}; megatron-rl cancel {name}")
    return _follow(record) if options.wait else 0


def _status(options: argparse.Namespace, arguments: list[str]) -> int:
    text, status = describe(find_record(options.name))
    print(text)
    return status


def _logs(options: argparse.Namespace, arguments: list[str]) -> int:
    record = find_record(options.name)
    if options.follow:
        return _follow(record)
    for text in read_logs(record, follow=False):
        print(text, end="")
    return 0


def _follow(record: Record) -> int:
    try:
        for text in read_logs(record, follow=True):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{record.name} is still running; stop it with megatron-rl cancel {record.name}")
        return 0
    return final_status(record)


def _cancel(options: argparse.Namespace, arguments: list[str]) -> int:
    cancel(find_record(options.name))
    print(f"{options.name}: stop requested; check it with megatron-rl status {options.name}")
    return 0
