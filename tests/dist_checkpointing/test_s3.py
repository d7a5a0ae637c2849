"""An S3-compatible store that is none of Amazon's: a real server on this machine, found as other clients find it."""

import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch

from core.dist_checkpointing import CheckpointManager, load, save
from core.dist_checkpointing.__main__ import main
from core.dist_checkpointing.root import Root
from core.parallel_state import ParallelState

pytest.importorskip("moto.server")
pytestmark = pytest.mark.full
single = ParallelState.single("cpu")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """moto's, with one bucket; what it was asked."""

    def __init__(self, log):
        self.port, self.log = free_port(), log
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with log.open("w") as told:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=told)
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.url}/bucket", method="PUT")).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def requests(self):
        return len(re.findall(r'"(GET|HEAD|PUT|POST|DELETE) /', self.log.read_text()))


@pytest.fixture
def server(tmp_path, monkeypatch):
    found = Server(tmp_path / "moto.log")
    try:
        found.wait()
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", found.url)):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield found
    finally:
        found.process.terminate()
        found.process.wait(30)


def state(value):
    return {"model": {f"w{i}": torch.full((5, 3), float(value + i)) for i in range(40)}, "step": value}


def test_a_run(server, capsys):
    manager = CheckpointManager("s3://bucket/run", ps=single, keep_last=2, keep_best="loss")
    for step in (1, 2, 3, 4):
        manager.save_async(step, state(step), {"loss": 5.0 if step > 1 else 1.0}).wait()
    assert manager.steps() == [1, 3, 4]
    step, found = manager.load_latest(state(0))
    assert step == 4 and torch.equal(found["model"]["w7"], state(4)["model"]["w7"])
    assert manager.url(4).startswith("s3://bucket/run/step-00000004/")
    manager.close()
    assert main(["verify", "s3://bucket/run"]) == 0 and "every byte is right" in capsys.readouterr().out


def test_requests_of_a_load(server):
    save(state(1), "s3://bucket/one", ps=single)
    files = len(Root("s3://bucket").files.below("one").names())
    before = server.requests()
    load(state(0), "s3://bucket/one", ps=single)
    assert 40 < server.requests() - before <= 1.1 * files + 20
