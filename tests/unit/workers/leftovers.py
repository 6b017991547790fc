"""An environment and a verifier that leave what their constructors and calls have made."""

import os
import socket
import tempfile
import time
from pathlib import Path

import numpy as np

from megatron_rl.environments import Answer

# The server ends with its shell unless those whose parent has ended are spared.
SERVER = f"""
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind({tempfile.gettempdir()!r} + "/server")
server.listen()
while True:
    server.accept()[0].sendall(b"here")
"""
if "PYTEST_CURRENT_TEST" not in os.environ:  # not in the process of the tests, which imports this
    (Path(tempfile.gettempdir()) / "server.py").write_text(SERVER)
    os.system(f"python {tempfile.gettempdir()}/server.py &")


class Leaver:
    """Leaves a temporary folder; a row with `hangs` exceeds the time limit, too."""

    def __init__(self, row, seed):
        self.row, self.folder = row, tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "file").write_text("left")

    def step(self, message):
        if self.row.get("hangs"):
            time.sleep(1000)
        if self.row.get("floods"):
            print("a line\n" * 3000)
            raise ValueError("the reason")
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(os.path.dirname(os.environ["TMPDIR"]) + "/server")
                    text = client.recv(4).decode()
                return Answer(reward=np.float32(1), done=np.bool_(True), reason=text)
            except OSError:  # it is starting
                time.sleep(0.01)


def verify(text, ground_truth, data_source):
    Path(tempfile.mkdtemp(), "file").write_text("left")
    return {"a": float(text), "b": float(text)}
