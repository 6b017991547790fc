"""Plan of a launch: checked, with absolute paths, before anything is written.

A job runs a copy of the package; its digest and uncommitted changes are kept with it.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import megatron_rl
from megatron_rl.apps.launch.cluster import Cluster, Container, SlurmCluster, plain_path
from megatron_rl.config import (
    Config,
    ConfigError,
    dump_config,
    load_config,
    parse_config,
    with_absolute_paths,
)
from megatron_rl.runs.files import last_step

PACKAGE = Path(megatron_rl.__file__).parent


@dataclass(frozen=True)
class Source:
    """Files to package, by their path in the package, and their state in git."""

    files: dict[str, Path]
    commit: str | None  # None: not in a git checkout
    uncommitted: str  # a diff that includes new files; "" if everything is committed

    @property
    def digest(self) -> str:
        """SHA-256 of names and contents; independent of the location of the files."""
        total = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{content}  {name}\n".encode())
        return total.hexdigest()

    def copy_to(self, folder: Path) -> None:
        """Copy all files into a folder."""
        for name, file in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)


def read_source(code: Iterable[str], folder: Path) -> Source:
    """Collect the package, and modules of the user's code that are in `folder`."""
    files = {f"{PACKAGE.name}/{name}": file for name, file in _files_of(PACKAGE).items()}
    for name in code:
        files |= _module_files(name.partition(":")[0].split(".")[0], folder)
    commit = _git("rev-parse", "HEAD")
    if commit is None or _git("ls-files", "--error-unmatch", f"{PACKAGE.name}/__init__.py") is None:
        return Source(files, None, "")
    diff = _git("diff", "HEAD", "--", PACKAGE.name) or ""
    others = _git("ls-files", "--others", "--exclude-standard", "--", PACKAGE.name) or ""
    for name in others.splitlines():
        # git exits with status 1 if the files differ
        diff += _git("diff", "--no-index", "--", "/dev/null", name, good=(0, 1)) or ""
    return Source(files, commit.strip(), diff)


def require_committed(source: Source) -> None:
    """Raise ConfigError that lists uncommitted files."""
    if source.commit is None:
        raise ConfigError(f"--committed: {PACKAGE} is not in a git checkout; leave the option out")
    if source.uncommitted:
        changed = re.findall(r"^diff --git a/.* b/(.*)$", source.uncommitted, re.MULTILINE)
        raise ConfigError(
            "--committed: these files have uncommitted changes; commit them, or leave the option "
            "out to package them:\n  " + "\n  ".join(changed)
        )


def _files_of(folder: Path) -> dict[str, Path]:
    return {
        str(file.relative_to(folder)): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def _module_files(package: str, folder: Path) -> dict[str, Path]:
    if package == PACKAGE.name:
        return {}
    spec = PathFinder.find_spec(package, [str(folder)])
    if spec is None or spec.origin is None:
        return {}  # installed in the environment; the job's preflight checks that
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return {origin.name: origin}
    return {f"{package}/{name}": file for name, file in _files_of(origin.parent).items()}


def _git(*arguments: str, good: tuple[int, ...] = (0,)) -> str | None:
    """Run git next to the package; returns its output, or None if it fails or is missing."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=PACKAGE.parent,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode in good else None


ON_HUB = "hf:"  # prefix of data sets on the hub, which are not files
# docker://ubuntu, nvcr.io#nvidia/pytorch:25.08-py3, nvcr.io/nvidia/pytorch:25.08-py3
ADDRESS = re.compile(r"\w+://|[\w.-]+(:\d+)?#|[\w.-]+(/[\w.-]+)*:[\w.-]+\Z")


@dataclass(frozen=True)
class Launch:
    """Launch of a run."""

    config: Config  # with a name, run.resume=auto and absolute paths
    cluster: Cluster
    source: Source
    folder: Path  # scripts, source, config and logs of this launch
    nodes: int
    chain: int = 1  # number of consecutive jobs
    preempt_after: int | None = None  # steps before a simulated preemption

    @property
    def name(self) -> str:
        """Name of the run and of the launch."""
        assert self.config.run.name is not None, "plan_launch names the run"
        return self.config.run.name

    @property
    def run_folder(self) -> Path:
        """Run directory."""
        return Path(self.config.run.dir) / self.name

    @property
    def apptainer(self) -> Container | None:
        """Container that each rank starts by apptainer; None without one and with pyxis."""
        container = self.cluster.container if isinstance(self.cluster, SlurmCluster) else None
        return container if container and container.runtime == "apptainer" else None

    @property
    def python(self) -> str:
        """Python interpreter of the job."""
        inside = isinstance(self.cluster, SlurmCluster) and self.cluster.container
        return self.cluster.python or ("python" if inside else default_python())


def default_python() -> str:
    """Return the Python interpreter of the environment that tools/setup_env.sh creates."""
    venv = os.environ.get("MEGATRON_RL_VENV", str(PACKAGE.parent / ".venv"))
    return str(Path(venv) / "bin" / "python")


def plan_launch(
    config_file: str,
    cluster: Cluster,
    *,
    overrides: list[str],
    name: str,
    nodes: int | None = None,
    chain: int = 1,
    preempt_after: int | None = None,
    offline: bool = False,
) -> Launch:
    """Plan a launch; ConfigError lists all its problems.

    offline: skip checks of files of the cluster, which `LaunchPlan.unchecked` then lists.
    """
    given = load_config(config_file, overrides)
    config = _complete(given, name=given.run.name or name)
    run_folder = plain_path(Path(config.run.dir) / str(config.run.name))
    launch = Launch(
        config=config,
        cluster=cluster,
        source=read_source(config.code.values(), Path.cwd()),
        folder=_next_folder(run_folder / "launch"),
        nodes=nodes or (cluster.nodes if isinstance(cluster, SlurmCluster) else 1),
        chain=chain,
        preempt_after=preempt_after,
    )
    problems = _run_problems(launch, resumes=given.run.resume == "auto")
    problems += _option_problems(launch)
    if isinstance(cluster, SlurmCluster):
        per_node = cluster.processes_per_node
        problems += [
            f"nodes={launch.nodes} x processes_per_node={per_node}: {problem}"
            for problem in config.process_problems(launch.nodes * per_node)
        ]
        problems += [] if offline else _container_problems(cluster)
    problems += _file_problems(launch, offline=offline)
    if problems:
        raise ConfigError("this launch cannot start:\n  " + "\n  ".join(problems))
    return launch


def _complete(config: Config, *, name: str) -> Config:
    """Return the config of the job: named, resumable, and independent of the working directory."""
    values = with_absolute_paths(config).model_dump()
    values["run"] |= {"name": name, "resume": "auto"}
    return parse_config(values)


def _further_paths(config: Config) -> dict[str, str]:
    """Return the paths that a run reads besides model and prompts, by config key."""
    named = {}
    if config.lora is not None and config.lora.path is not None:
        named["lora.path"] = config.lora.path
    if config.offline.rollouts is not None:
        named["offline.rollouts"] = config.offline.rollouts
        if config.offline.behavior != "file":
            named["offline.behavior"] = config.offline.behavior
    return named


def _next_folder(parent: Path) -> Path:
    numbers = [int(each.name) for each in parent.glob("[0-9]*") if each.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:03d}"


def _run_problems(launch: Launch, *, resumes: bool) -> list[str]:
    if last_step(launch.run_folder) is not None and not resumes:
        return [
            f"{launch.run_folder} already contains a run; set run.resume=auto to continue it, or "
            "choose another run.name"
        ]
    return []


def _option_problems(launch: Launch) -> list[str]:
    cluster, problems = launch.cluster, []
    if not isinstance(cluster, SlurmCluster):
        if launch.nodes > 1:
            problems.append(f"nodes={launch.nodes}: the local executor has one; leave it out")
        if launch.chain > 1:
            problems.append(f"--chain {launch.chain}: jobs are chained on SLURM; leave it out")
    elif launch.preempt_after and not cluster.requeue and launch.chain == 1:
        problems.append(
            "--simulate-preemption: nothing would continue the run; set requeue in the cluster "
            "file to 1 or more, or give --chain 2"
        )
    if launch.preempt_after and launch.preempt_after >= launch.config.trainer.steps:
        problems.append(
            f"--simulate-preemption {launch.preempt_after}: the run has "
            f"{launch.config.trainer.steps} steps; choose fewer"
        )
    return problems


def _container_problems(cluster: SlurmCluster) -> list[str]:
    if cluster.container is None:
        return []
    image, problems = cluster.container.image, []
    if not ADDRESS.match(image) and not Path(image).exists():
        problems.append(
            f"container.image: {image} does not exist; give a file, or an address such as "
            "nvcr.io#nvidia/pytorch:25.08-py3"
        )
    problems += [
        f"container.mounts: {mount.split(':')[0]} does not exist; correct or remove it"
        for mount in cluster.container.mounts
        if not Path(mount.split(":")[0]).exists()
    ]
    return problems


def unchecked(launch: Launch) -> list[str]:
    """Return the checks that an offline launch skipped, one line each."""
    cluster = launch.cluster
    files = [f"{key}: {path}" for key, path in _named_files(launch).items()]
    if (epochs := launch.config.data.epochs) is not None:
        files.append(
            f"data.epochs: {epochs:g}, whose number of steps the start of the run computes"
        )
    if not isinstance(cluster, SlurmCluster):
        return [*files, f"python: {launch.python}"]
    if cluster.container is None:
        files.append(f"python: {launch.python}")
    else:
        files.append(f"container.image: {cluster.container.image}")
        files += [f"container.mounts: {mount}" for mount in cluster.container.mounts]
        pyxis = cluster.container.runtime == "pyxis"
        what = "srun has the plugin pyxis" if pyxis else "the nodes have the program apptainer"
        files.append(f"container: whether {what}")
    return [
        *files,
        f"partition: {cluster.partition}"
        + (f", account: {cluster.account}" * bool(cluster.account)),
        "SLURM: whether it is reachable and accepts the job (`sbatch --test-only`)",
    ]


def _named_files(launch: Launch) -> dict[str, str]:
    """Return the files and folders that a run reads, by config key."""
    config = launch.config
    models = {"model.path": config.model.path} | config.given_models
    return (
        models
        | _further_paths(config)
        | {
            key: path
            for key, (path, _) in config.prompt_files.items()
            if not path.startswith(ON_HUB)
        }
    )


def _file_problems(launch: Launch, *, offline: bool) -> list[str]:
    cluster, named = launch.cluster, _named_files(launch)
    container = cluster.container if isinstance(cluster, SlurmCluster) else None
    problems = []
    if container is None and offline:
        return []
    if container is None:
        named["python"] = launch.python
        problems = [
            f"{key}: {path} does not exist" + _cure(key)
            for key, path in named.items()
            if not Path(path).exists()
        ]
        if Path(launch.python).exists() and (
            Path(launch.python).is_dir() or not os.access(launch.python, os.X_OK)
        ):
            problems.append(f"python: {launch.python} is no program{_cure('python')}")
        return problems
    for key, path in named.items():
        outside = _on_the_host(path, container.mounts)
        if outside is None:
            problems.append(f"{key}: {path} is in none of container.mounts; mount its folder")
        elif not (offline or outside.exists()):
            problems.append(f"{key}: {outside} does not exist" + _cure(key))
    return problems


def _cure(key: str) -> str:
    if key == "python":
        return "; run tools/setup_env.sh, or set python in the cluster file"
    return "; correct it (relative paths start at the present folder)"


def _on_the_host(path: str, mounts: list[str]) -> Path | None:
    """Return the host path of a container path, by its innermost mount; None if not mounted."""
    pairs = sorted((mount.split(":")[:2] for mount in mounts), key=lambda pair: -len(pair[1]))
    for host, inside in pairs:
        if Path(path).is_relative_to(inside):
            return Path(host) / Path(path).relative_to(inside)
    return None


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
