"""`megatron-rl export`: write a checkpoint as a Hugging Face folder, and upload it."""

import argparse
import os
import sys
from pathlib import Path

from megatron_rl.commands.ending import fail, leave
from megatron_rl.commands.options import Commands, add_command, option
from megatron_rl.commands.train import check_devices
from megatron_rl.config import ConfigError
from megatron_rl.config.sections import HUB_NAME
from megatron_rl.runtime.joining import join_processes
from megatron_rl.runtime.launcher import start_processes
from megatron_rl.runtime.processes import LAUNCHER, quiet_libraries


def add_parser(commands: Commands) -> None:
    add_command(
        commands, "export", run,
        option("checkpoint", "Run directory (its newest checkpoint is used) or checkpoint.",
               metavar="CHECKPOINT"),
        option("folder", "Hugging Face folder to write; it must not exist.", metavar="FOLDER"),
        option("--like", "Hugging Face folder from which config and tokenizer are copied. Default: "
               "the model from which the checkpoint's run was trained.", metavar="PATH"),
        option("--critic", "Write the critic instead of the policy, with its value head as "
               "score.weight: a folder for critic.path."),
        option("--push", "Also upload the folder to the Hugging Face hub; a new model there is "
               "private.", metavar="OWNER/NAME"),
        option("overrides", "Parallel layout, for example parallel.tensor=2.",
               nargs="*", metavar="parallel.KEY=value"),
        help="Write a checkpoint as a Hugging Face folder.",
        description="Write the weights of a checkpoint as a Hugging Face folder. Starts as many "
        "processes as the layout needs, or runs as one of them when started by torchrun or srun.",
    )  # fmt: skip


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    place = None
    try:
        place = join_processes()
        quiet_libraries()
        from megatron_rl.checkpoint_export import plan_export, run_export

        plan = plan_export(
            options.checkpoint,
            options.folder,
            like=options.like,
            overrides=options.overrides,
            critic=options.critic,
        )
        if place is not None:
            if options.push is not None and LAUNCHER not in os.environ:
                raise ConfigError("--push: run export without torchrun or srun, or upload later")
            run_export(plan)
            return leave(0)
        if options.push is not None:
            check_push(options.push, plan.folder)
        check_devices(plan.layout.world_size)
        modules = ("megatron_rl.checkpoint_export",)  # imported here already
        size = plan.layout.world_size
        status = start_processes(arguments, world_size=size, modules=modules)
        if status == 0:
            _describe(plan.folder)
            if options.push is not None:
                print(f"uploaded to {push(options.push, plan.folder)}")
    except Exception as error:  # noqa: BLE001 - reported; the process exits
        return fail(error, place)
    return leave(status)


def _describe(folder: Path) -> None:
    from megatron_rl.data.tokenizer import describe_other_reader

    if (note := describe_other_reader(folder)) is not None:
        print(f"megatron-rl: {note}", file=sys.stderr)


def check_push(name: str, folder: Path) -> None:
    """Raise ConfigError, before the export, if the hub would refuse to upload to this name."""
    later = f"or leave --push out and later run: hf upload {name} {folder}"
    if (match := HUB_NAME.fullmatch(name)) is None or match[2] is not None:
        raise ConfigError(f"--push {name}: give a name on the hub as OWNER/NAME")
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, {later}")
    try:
        login = HfApi().whoami()
    except Exception as error:  # the client raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        is_login = isinstance(error, LocalTokenNotFoundError) or (
            isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        )
        problem, cure = (
            ("no login at", "run hf auth login")
            if is_login
            else ("no answer of", f"check that this machine reaches {constants.ENDPOINT}")
        )
        raise ConfigError(
            f"--push {name}: {problem} the hub ({reason}); {cure}, {later}"
        ) from error
    owners = [login["name"], *(one["name"] for one in login.get("orgs") or [])]
    if (owner := name.partition("/")[0]) not in owners:
        raise ConfigError(
            f"--push {name}: {login['name']} is logged in, who may write for "
            f"{', '.join(owners)} and not for {owner}; correct the name, {later}"
        )


def push(name: str, folder: Path) -> str:
    """Upload a model's folder to the hub; returns its address. A new model there is private."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a model that megatron_rl wrote"
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"--push {name}: {reason}; {folder} is complete: run hf upload {name} {folder}"
        ) from error
    return f"{api.endpoint}/{name}"
