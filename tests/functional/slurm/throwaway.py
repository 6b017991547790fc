"""A real SLURM for the time of a test: munge, a controller, two nodes on this host, one folder.

The nodes are two slurmd of one machine, distinguished by name and port. Partition `high` preempts
`low`, which gives its jobs minutes to save. Ranks meet at a port made of the job's id, which
therefore begins elsewhere in every test.
"""

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
PACKAGES = ("slurm-wlm", "munge")
DEADLINE = 180.0


class ThrowawaySlurm:
    """Starts on entering; on leaving all its processes have ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ThrowawaySlurm":
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _begin(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)  # munge wants a socket that everyone can reach
        self._write_config()
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._start("munged", "--foreground", *(["--force"] if os.geteuid() == 0 else []),
                    f"--key-file={self._key()}", *(
            f"--{name}={self.folder}/munge.{end}" for name, end in
            (("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))
        ))  # fmt: skip
        self._until("munge's socket", (self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in ("n1", "n2"):
            self.start_node(node)
        self._until("two idle nodes", lambda: self.ask("sinfo -hN -p low -o %T") == "idle\nidle")

    def __exit__(self, *exception: object) -> None:
        self.ask(f"scancel --full --signal=KILL --user={getpass.getuser()}")
        for node in list(self.nodes):
            self.kill_node(node)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        os.environ.pop("SLURM_CONF", None)

    def start_node(self, node: str) -> None:
        """Start a node, or start it again."""
        self.nodes[node] = self._run("slurmd", "-D", "-N", node, log=node)

    def kill_node(self, node: str) -> None:
        """End a node as a lost power supply does: its daemon and every process of its jobs."""
        self.nodes[node].kill()
        self.nodes.pop(node).wait()
        while processes := self.processes(node):  # what one of them has just started, too
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)

    def clear(self) -> None:
        """Both nodes are up, and no job is left, whatever a test has left behind."""
        for node in {"n1", "n2"} - set(self.nodes):
            self.start_node(node)
        self.ask(f"scancel --user={getpass.getuser()}")
        self._until("empty queue", lambda: not self.ask("squeue -h"))

    def processes(self, node: str, *, of: str = "") -> list[int]:
        """Processes of jobs on a node; of: a part of their command."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                environment = (process / "environ").read_bytes().split(b"\0")
                is_ours = f"SLURM_CONF={self.folder}/slurm.conf".encode() in environment
                is_there = f"SLURMD_NODENAME={node}".encode() in environment
                if is_ours and is_there and of.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
        return found

    def ask(self, command: str) -> str:
        """Output of one of SLURM's commands."""
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def _key(self) -> Path:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        return key

    def _write_config(self) -> None:
        host, user = socket.gethostname(), getpass.getuser()
        ports = _free_ports(3)
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=4"
            for i in (1, 2)
        )
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={10000 + os.getpid() % 2500}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.folder}/munge.socket,cred_expire=5
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MailProg=/bin/true
JobRequeue=1
KillWait=20
SlurmdTimeout=20
ReturnToService=2
PropagateResourceLimits=NONE
SchedulerParameters=sched_interval=5,bf_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=300 MaxTime=INFINITE State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
""")

    def _start(self, *command: str) -> None:
        self._daemons.append(self._run(*command, log=command[0]))

    def _run(self, *command: str, log: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{log}.out").open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def _until(self, what: str, is_so) -> None:
        deadline = time.monotonic() + DEADLINE
        while not is_so():
            if time.monotonic() > deadline:
                printed = "\n".join(
                    f"{file.name}: {file.read_text()[-1500:]}"
                    for file in [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
                )
                raise TimeoutError(f"no {what} within {DEADLINE} s\n{printed}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
