"""docs/several_nodes.md: two agents of torchrun, as on two machines, with a pipeline across them."""

import json
import os
import re
import socket
import subprocess

import pytest

from tests import warm
from tests.examples.test_pretrain import ROOT, TINY, once
from tests.training.tiny import prepared


@pytest.mark.full
def test_a_pipeline_across_two_agents(tmp_path):
    made = prepared(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    flags = [*TINY, f"--data.train={made.train}", f"--data.valid={made.valid}", "--parallel.pipeline=2"]
    command = [warm.python(), "-m", "torch.distributed.run", *agent, "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["-m", "core.pretrain", *once([*flags, "--training.output=out"])]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        said = [node.communicate(timeout=600) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    first = said[0][0] or said[1][0]
    assert "2 processes on CPU: 2-stage pipeline (1f1b)" in first
    last = re.search(r"first step here and in one process: .* max \|difference\| (\S+)", first)
    assert last and float(last[1]) < 1e-5
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5]
