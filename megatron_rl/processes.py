"""Starting the processes of one node, or joining those that torchrun or SLURM started.

The environment variables that torch, vLLM and the tokenizers read at import are set here, once,
before any of them is imported: nobody has to set one by hand.
"""

import logging
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessPlace:
    """Where this process stands among all."""

    rank: int
    world_size: int
    local_rank: int


def has_cuda() -> bool:
    """Whether an NVIDIA device is present, asked without importing torch."""
    return shutil.which("nvidia-smi") is not None and os.path.exists("/dev/nvidiactl")


def prepare_environment() -> None:
    """Settings that only work before the imports; a value that is already set is kept."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders on disk; nothing is looked up
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's overlap of communication needs it
        "OMP_NUM_THREADS": "1",
    }
    if not has_cuda():
        defaults |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def quiet_libraries() -> None:
    """Hide warnings of libraries about themselves; those of our own code stay."""
    for module in ("torch", "megatron", "vllm", "transformers"):
        warnings.filterwarnings("ignore", module=rf"{module}\.", append=False)
        warnings.filterwarnings("ignore", module=module, append=False)
    # On a CPU it says that Triton lacks a CPU backend, before vLLM's own log level applies.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    # Megatron reads `.grad` of tensors whose gradient it keeps elsewhere.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def join_processes() -> ProcessPlace | None:
    """This process's place if torchrun or srun started it, else None.

    For srun the variables of torch's `env://` rendezvous are derived from SLURM's.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _place()
    world_size = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "SLURM_STEP_ID" not in os.environ or world_size == 1:  # no step, or an interactive shell
        return None
    nodes = os.environ["SLURM_STEP_NODELIST"]
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"srun started this process, but the hosts of {nodes} cannot be listed ({error}); put "
            "scontrol on the PATH, or start by torchrun"
        ) from error
    job = int(os.environ["SLURM_JOB_ID"])
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(max(world_size // len(hosts), 1)),
    )
    os.environ.setdefault("MASTER_ADDR", hosts[0])
    os.environ.setdefault("MASTER_PORT", str(20000 + job % 20000))
    return _place()


def _place() -> ProcessPlace:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    return ProcessPlace(*(int(os.environ.get(name, "0")) for name in names))


def start_processes(arguments: list[str], *, world_size: int) -> int:
    """Run `megatron-rl ARGUMENTS` in `world_size` processes of this node; returns the exit code.

    When one process fails the others are ended. torchrun's own report of the failure is left out:
    the failing process has already said what was wrong.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: no need to resolve its name
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    command = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={world_size}",
               "-m", "megatron_rl.cli", *arguments]  # fmt: skip
    try:
        run.main(command)
    except ChildFailedError as failure:
        code = failure.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as interruption:  # Ctrl-C too; the processes have been ended
        print(f"megatron-rl: ended by signal {interruption.sigval.name}", file=sys.stderr)
        return 128 + interruption.sigval
    return 0
