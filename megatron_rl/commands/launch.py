"""`megatron-rl launch`, and `status`, `logs` and `cancel` of what was launched."""

import argparse
import time
from pathlib import Path

from megatron_rl.launch.following import cancel, describe, final_status, read_logs
from megatron_rl.launch.record import Record, find_record


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The options of all four."""
    launch = commands.add_parser(
        "launch",
        help="train on a cluster, or here in the background, by NeMo-Run",
        description="Check everything, then submit a run by NeMo-Run and leave it running. Needs "
        "the environment that tools/setup_env.sh --launcher makes.",
    )
    options: list[tuple[str, str, dict]] = [
        ("config", "YAML file of the run", {"metavar": "CONFIG"}),
        ("--cluster", "YAML file of the cluster, as in examples/pnpo/clusters",
         {"required": True, "metavar": "FILE"}),
        ("--nodes", "instead of the cluster file's", {"type": _count, "metavar": "N"}),
        ("--chain", "submit N jobs, each going on where the one before ended",
         {"type": _count, "metavar": "N", "default": 1}),
        ("--dry-run", "print scripts, environment, config and source; submit nothing", {}),
        ("--committed", "refuse uncommitted changes of the source instead of packaging them", {}),
        ("--rehearse-preemption", "ask the run to end after N steps, once, as a preemption does",
         {"type": _count, "metavar": "N"}),
        ("--wait", "print what the ranks say until the end; exit with the run's status", {}),
    ]  # fmt: skip
    for name, what, more in options:
        launch.add_argument(name, help=what, **(more or {"action": "store_true"}))
    launch.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. trainer.steps=5")
    launch.set_defaults(run=_launch, sets_environment=False)
    status = commands.add_parser("status", help="of a launch: its jobs and its run directory")
    status.set_defaults(run=_status)
    logs = commands.add_parser("logs", help="of a launch: what its ranks said")
    logs.add_argument("-f", "--follow", action="store_true", help="until it ends")
    logs.set_defaults(run=_logs)
    ending = commands.add_parser("cancel", help="end a launch")
    ending.set_defaults(run=_cancel)
    for one in (status, logs, ending):
        one.add_argument("name", metavar="NAME", help="the run's name")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _launch(options: argparse.Namespace, arguments: list[str]) -> int:
    from megatron_rl.launch.cluster import SlurmCluster, load_cluster
    from megatron_rl.launch.plan import plan_launch
    from megatron_rl.launch.source import require_committed
    from megatron_rl.launch.starting import preview, start_here, start_on_slurm

    cluster = load_cluster(options.cluster)
    launch = plan_launch(
        options.config,
        cluster,
        overrides=options.overrides,
        name=f"{Path(options.config).stem}-{time.strftime('%Y%m%d-%H%M%S')}",
        nodes=options.nodes,
        chain=options.chain,
        rehearse_after=options.rehearse_preemption,
    )
    if options.committed:
        require_committed(launch.source)
    if options.dry_run:
        print(preview(launch), end="")
        return 0
    on_slurm = isinstance(cluster, SlurmCluster)
    record = start_on_slurm(launch) if on_slurm else start_here(launch)
    what = f"job {', '.join(record.jobs)}" if on_slurm else f"process {record.process}"
    name = record.name
    print(f"{name}: {what}; run directory {record.run}")
    if launch.source.uncommitted:
        print(f"  with changes that are not committed: {record.folder}/uncommitted.diff")
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
        print(f"\n{record.name} goes on; megatron-rl cancel {record.name} ends it")
        return 0
    return final_status(record)


def _cancel(options: argparse.Namespace, arguments: list[str]) -> int:
    cancel(find_record(options.name))
    print(f"{options.name}: asked to end; megatron-rl status {options.name} says when it has")
    return 0
