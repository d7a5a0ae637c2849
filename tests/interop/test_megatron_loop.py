"""A script in Megatron's words gives one curve on every layout, and a checkpoint that the others open."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing import load
from core.models.gpt import GPTModel, gpt2_spec
from core.parallel_state import ParallelState
from core.transformer import TransformerConfig
from tests import warm
from tests.interop.megatron_loop import S, train
from tests.parity.whole import assert_same

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(_pool, tmp_path_factory):
    (found,) = _pool(train, 1, 1, tmp_path_factory.mktemp("alone") / "c", world=1)
    return found


@pytest.mark.parametrize(
    "tp, pp, cp, world",
    [
        (2, 1, 1, 2),
        (1, 2, 1, 2),
        (1, 1, 1, 2),
        (2, 1, 1, 4),
        pytest.param(1, 2, 1, 4, marks=pytest.mark.full),
        (1, 1, 2, 2),
        (2, 1, 2, 4),
    ],
)
def test_one_curve_on_every_layout(ranks, alone, tmp_path, tp, pp, cp, world):
    losses, weights = alone
    assert losses[-1][0] < losses[0][0]
    found = [theirs for theirs, _ in ranks(train, tp, pp, tmp_path / "c", cp, world=world)]
    replicas = world // (tp * pp)
    told = [each for each in found if each[0]]  # of last stages
    assert len(told) == world // pp
    for step, want in enumerate(losses):
        for m, loss in enumerate(want):  # a replica's report is the mean of its own rows
            mean = sum(each[step][m] for each in told) / len(told)
            assert mean == pytest.approx(loss, rel=1e-9), (step, m, replicas)
    facts = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}
    whole = GPTModel(TransformerConfig(**facts), gpt2_spec(), 64, S, parallel=ParallelState.single("cpu"))
    whole.load_state_dict(load(whole.sharded_state_dict(), str(tmp_path / "c")))
    mine = {name: p.detach()[: weights[name].shape[0]] for name, p in whole.named_parameters()}
    assert_same(mine, weights)


@pytest.mark.full
def test_the_page_is_followed_word_by_word_on_cpus(tmp_path):
    """Their script for CUDA, the page's line for CPUs, two processes."""
    page = (ROOT / "docs" / "from_megatron.md").read_text()
    block = next(b for b in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) if "gloo" in b)
    change, start = block.splitlines()
    shutil.copyfile(ROOT / "tests" / "interop" / "megatron_script.py", tmp_path / "train.py")
    subprocess.run(["bash", "-c", change], cwd=tmp_path, check=True, timeout=300)
    assert start.startswith("torchrun ")
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", *start.split()[1:]]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"tensor\((\d\.\d+)", done.stdout)]
    assert len(losses) == 10 and max(losses[-2:]) < min(losses[:2])
    assert done.stdout.count("Successfully loaded the model") == 2
