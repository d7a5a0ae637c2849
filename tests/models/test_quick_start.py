"""The twelve lines that a user starts with, word for word: under torchrun, and as a single process without the
`init_process_group` line."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from core import parallel_state
from tests import warm

ROOT = Path(__file__).parents[2]
JOIN = "torch.distributed.init_process_group(world_size=world_size, rank=rank)\n"
SNIPPET = f"""\
import torch
from core import parallel_state
from core.transformer.transformer_config import TransformerConfig
from core.models.gpt.gpt_model import GPTModel
from core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

{JOIN}\
parallel_state.initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size)
config = TransformerConfig(num_layers=2, hidden_size=12, num_attention_heads=4,
                           use_cpu_initialization=True, pipeline_dtype=torch.float32)
model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=64)
loss = model(tokens, position_ids, attention_mask, labels=labels)   # [b, s] per-token loss; logits [b, s, v_padded/tp] without labels
"""  # noqa: E501
BEFORE = """\
import os, torch
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
tensor_model_parallel_size, pipeline_model_parallel_size = world_size, 1
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
torch.manual_seed(0)
tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
labels, position_ids, attention_mask = tokens.roll(-1, 1), torch.arange(16, device=device).expand(2, 16), None
"""
AFTER = """
import warnings
warnings.simplefilter("ignore")  # the logits below are a part, which is told
model.eval()  # dropout is drawn differently over tensor ranks
loss = model(tokens, position_ids, attention_mask, labels=labels)
model(tokens, position_ids, attention_mask, labels=labels).mean().backward()
norm = sum(p.grad.norm() for p in model.parameters())
found = [*loss.shape], str(loss.dtype), loss.mean().item(), [*model(tokens).shape], bool(norm > 0)
"""
LEAVE = """
print(f"rank {rank}: {found}\\n", end="", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def alone():
    """What the lines give in one process, and that they made no process group there."""
    names: dict = {}
    try:
        exec(BEFORE + SNIPPET.replace(JOIN, "") + AFTER, names)
        assert not torch.distributed.is_initialized()
    finally:
        parallel_state.destroy_model_parallel()
    return names["found"]


def test_the_lines_as_a_single_process(alone):
    shape, dtype, loss, logits, has_gradients = alone
    assert (shape, dtype, logits, has_gradients) == ([2, 16], "torch.float32", [2, 16, 100], True)
    assert loss == pytest.approx(4.605, abs=0.1), "a new model knows nothing: log(100)"


def test_the_lines_under_torchrun(alone, tmp_path):
    script = tmp_path / "quick_start.py"
    script.write_text(BEFORE + SNIPPET + AFTER + LEAVE)
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    # no accelerator: the machine may have fewer of them than the two ranks
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        name, _, found = line.partition(": ")
        shape, dtype, loss, logits, has_gradients = eval(found)
        assert name == f"rank {rank}" and loss == pytest.approx(alone[2], abs=1e-5)
        assert (shape, dtype, logits, has_gradients) == ([2, 16], "torch.float32", [2, 16, 64], True)
