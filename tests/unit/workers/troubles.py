"""Environments and verifiers that do what goes wrong in a month of agents; no torch here."""

import asyncio
import builtins
import contextlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from multiprocessing import shared_memory
from pathlib import Path

from megatron_rl.environments import AgentEnvironment, Answer

PER_CONVERSATION = 8  # turns


def start_everything(folder):
    """Leave processes of all kinds, descriptors, shared memory and a thread behind."""
    children = [
        subprocess.Popen(["sleep", "1234"]),
        subprocess.Popen(["bash", "-c", "sleep 1234; true"]),
        subprocess.Popen(["setsid", "sleep", "1234"]),
        # a daemon, which has left its session and its parent
        subprocess.Popen(["bash", "-c", "(setsid bash -c 'sleep 1234; true' &) ; sleep 1234"]),
    ]
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1234,))
    forked.start()
    block = shared_memory.SharedMemory(create=True, size=1000)
    threading.Thread(target=time.sleep, args=(1234,), daemon=True).start()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    Path(folder, str(os.getpid())).write_text(block.name)
    return children, forked, block, opened


def limits_of_signals():
    """Return how processes ended that were sent a signal; without it they end with other codes."""
    command = ["timeout", "--kill-after=50", "0.2", "sleep", "100"]  # 137 if it had to be killed
    status = subprocess.run(command, check=False).returncode
    popen, other = subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sleep", "100"])
    popen.terminate()
    other.send_signal(signal.SIGQUIT)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    forked.start()
    forked.terminate()
    forked.join()
    return [status, popen.wait(), other.wait(), forked.exitcode]


def look_for_secrets():
    """All variables of all processes that can be read from here, and who can be signalled."""
    seen = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            seen.append(file.read_bytes())
        except OSError:
            continue
    can_signal = False
    for pid in (int(os.environ["TRAINER"]), os.getppid()):  # and that of all conversations
        with contextlib.suppress(PermissionError):
            os.kill(pid, 0)
            can_signal = True
    return {"secret": any(b"=top-secret" in text for text in seen), "can_signal": can_signal}


class NamelessError(Exception):
    """An error without a description."""

    def __str__(self):
        raise LookupError("no text")


def write_to_sockets():
    """Write what is no answer to all sockets of this process, the last without an end of line."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "socket:" in os.readlink(file):
                os.write(int(file.name), b'garbage\n5\n[]\n{}\n{"number": null}\n' + b"[" * 10_000)
                os.write(int(file.name), b"\nhalf a line")


class Trouble:
    """Answers with a count of turns and CPU-heavy state; a row with `trouble` gets into it."""

    def __init__(self, row, seed):
        self.row, self.seed, self.turns = row, seed, 0

    async def step(self, message):
        self.turns += 1
        if self.turns == self.row.get("turn", 2) and "trouble" in self.row:
            value = getattr(self, self.row["trouble"])(message)
            if asyncio.iscoroutine(value):
                value = await value
            if value is not None:
                return value
        text = f"{self.row['name']} {self.seed} {self.turns} {message}"
        return Answer(text, reward=len(text) / 7, done=self.turns == PER_CONVERSATION)

    def close(self):
        if self.row.get("trouble") == "hang_in_close":
            time.sleep(1000)

    def raises(self, message):
        raise LookupError("a mistake")

    def exits(self, message):
        sys.exit("bad usage")

    def exits_at_once(self, message):
        os._exit(7)

    def interrupts(self, message):
        raise KeyboardInterrupt

    async def cancels(self, message):
        raise asyncio.CancelledError

    async def generator_exits(self, message):
        raise GeneratorExit

    async def exits_in_a_task(self, message):
        async def later():
            sys.exit("in a task")

        await asyncio.create_task(later())

    def blocks(self, message):
        time.sleep(1000)

    async def hangs(self, message):
        await asyncio.sleep(1000)

    def spins(self, message):
        sum(range(10**12))

    async def hangs_in_threads(self, message):
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 1000) for _ in range(40)))

    def stops(self, message):
        os.kill(os.getpid(), signal.SIGSTOP)

    def crashes(self, message):
        os.kill(os.getpid(), signal.SIGSEGV)

    def kills_its_group(self, message):
        os.killpg(0, signal.SIGKILL)

    def fills_memory(self, message):
        return Answer(str(len(bytes(64 * 2**30))))

    def writes_50_mb(self, message):
        return Answer("x" * 50_000_000)

    def prints_50_mb(self, message):
        print("x" * 50_000_000)

    def leaves_everything(self, message):
        self.left = start_everything(self.row["folder"])

    def leaves_everything_and_blocks(self, message):
        self.left = start_everything(self.row["folder"])
        time.sleep(1000)

    def leaves_everything_and_exits(self, message):
        self.left = start_everything(self.row["folder"])
        os._exit(3)

    async def blocks_later(self, message):
        async def later():
            time.sleep(1000)

        self.task = asyncio.create_task(later())

    def returns_nonsense(self, message):
        return {"reward": object()}

    def hang_in_close(self, message):
        return None

    def closes_descriptors(self, message):
        os.closerange(3, 100)

    def raises_without_text(self, message):
        raise NamelessError

    def raises_100_mb(self, message):
        raise ValueError("x" * 100_000_000)

    def returns_10_gb_number(self, message):
        return Answer(reward=10**5000)

    def keeps_memory_full(self, message):
        self.kept = []
        for size in (2**28, 2**20, 2**12, 2**6):
            with contextlib.suppress(MemoryError):
                while True:
                    self.kept.append(bytes(size))
        raise MemoryError

    def writes_to_its_socket(self, message):
        write_to_sockets()

    def forks_and_returns(self, message):
        os.fork()

    def forks_and_exits(self, message):
        if os.fork() == 0:
            sys.exit(3)
        _, status = os.wait()
        if os.waitstatus_to_exitcode(status) != 3:
            raise LookupError(f"exit status {status}")

    def starts_programs(self, message):
        """With all descriptors that programs inherit: none of them answers for a conversation."""
        command = ["ls", "-l", "/proc/self/fd"]
        files = subprocess.run(command, close_fds=False, capture_output=True, check=True).stdout
        if b"socket:" in files:
            raise LookupError(files)

    def breaks_what_replies_need(self, message):
        builtins.len = None
        json.dumps = None

    def changes_its_process(self, message):
        os.chdir("/")
        os.umask(0o777)
        os.environ.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        for request in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(request, signal.SIG_IGN)
        sys.stdout.close()
        os.closerange(0, 3)


TROUBLES = [name for name in vars(Trouble) if name[0] != "_" and name not in ("step", "close")]


class Reports(Trouble):
    """Answers with what the conversation can do."""

    async def step(self, message):
        report = look_for_secrets() if message == "secrets" else limits_of_signals()
        return Answer(json.dumps(report), done=True)


class Works:
    """Uses the processor and the network, a tenth of a second each, four times."""

    def __init__(self, row, seed): ...

    async def step(self, message):
        for _ in range(4):
            await asyncio.sleep(0.05)
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
        return Answer(reward=1.0, done=True)


class Threads:
    """Uses the processor in many threads of a program that needs no interpreter."""

    def __init__(self, row, seed): ...

    async def step(self, message):
        program = "while :; do :; done"
        subprocess.run(
            ["bash", "-c", f"for k in $(seq 20); do ({program}) & done; wait"], check=True
        )


class Deaf(Trouble):
    """Reads nothing after its first answer until there is a file; then answers with a length."""

    async def step(self, message):
        self.turns += 1
        if self.turns == 1:
            self.task = asyncio.create_task(self.block())
        return Answer(str(len(message)), done=self.turns == 2)

    async def block(self):
        folder = Path(self.row["folder"])
        (folder / f"{self.row['name']} is deaf").touch()
        while not (folder / "listen").exists():
            time.sleep(0.01)


class Counts(Trouble):
    """Counts all calls in a file; they are not called again to restore the state."""

    async def step(self, message):
        with Path(self.row["folder"], "calls").open("a") as file:
            file.write("x")
        return await super().step(message)

    def replay(self, turns):
        self.turns = len(turns)


class ClosesAsync(Trouble):
    async def close(self):
        await asyncio.sleep(0.01)
        Path(self.row["folder"], "closed").touch()


class PlainAgent(AgentEnvironment):
    """A plain function that blocks: more of them than an executor has threads."""

    def run(self, url):
        messages = list(self.row["prompt"])
        if self.row.get("hangs"):
            time.sleep(1000)
        for _ in range(2):
            body = json.dumps({"messages": messages}).encode()
            with urllib.request.urlopen(f"{url}/chat/completions", body) as reply:
                message = json.load(reply)["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "more"}]
        return 1.0


def verify(text, ground_truth, data_source):
    """Do what the response asks for."""
    match text:
        case "signals":
            return 1.0, json.dumps(limits_of_signals()), None
        case "secrets":
            return 1.0, json.dumps(look_for_secrets()), None
        case "leave":
            verify.left = start_everything(data_source)
            time.sleep(1000)
        case "keep":  # descriptors, processes and memory
            verify.kept.append(os.open("/dev/null", os.O_RDONLY))
            verify.kept.append(subprocess.Popen(["sleep", "1234"]))
            verify.kept.append(bytes(int(ground_truth)))
        case "socket":
            write_to_sockets()
        case "fork":
            os.fork()
        case "nameless":
            raise NamelessError
        case "thread":  # which takes the interpreter for seconds, after the call
            hold = threading.Thread(target=lambda: (time.sleep(0.2), 7 ** (10**8)), daemon=True)
            hold.start()
    return float(len(text) % 10)


verify.kept = []
