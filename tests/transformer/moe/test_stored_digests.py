"""Checkpoints of models whose layers are of one kind: the bytes of before there were layers of two kinds.

WRITTEN was printed by `save_small_model` and `digest` in commit 7979c3d, the last one before them. Since then
arrays of experts say that their cut dim is over expert ranks (attribute `axis`); nothing else may differ.
"""

import hashlib

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, llama_spec, moe_spec
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.transformer import TransformerConfig

WRITTEN = {
    "dense": "a7191cceb7c618929ad5bf28580cbff39eb8cc4adc3da2f73ce4fc227fd5a6b9",
    "experts in every layer": "f3f9abe32b629291dd078f5e8a6d5866193258888d1e49a3899d5314e3d720c1",
}
AXIS = b'"axis":"ep",'
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}


def numbers(shape, start):
    """Small numbers that are exact in float32, so that no machine rounds them otherwise."""
    count = torch.Size(shape).numel()
    return ((torch.arange(start, start + count) * 7919) % 2003 - 1001).view(shape).float() / 1024


def save_small_model(folder, **more):
    """Two layers with AdamW's states."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=20,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        params_dtype=torch.float32,
        **more,
    )
    ps = ParallelState.single("cpu")
    model = GPTModel(config, moe_spec() if more else llama_spec(), 53, 8, parallel=ps)
    shard = DataParallel(model, ps, zero_stage=1)
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    start = 0
    for _, kinds in sorted(optimizer.states().items()):
        for _, part in sorted(kinds.items()):
            part.tensor.copy_(numbers(part.tensor.shape, start))
            start += part.tensor.numel()
    for buffer in shard.buffers:
        buffer.weights.copy_(numbers(buffer.weights.shape, start))
        start += buffer.weights.numel()
    shard.publish()
    shard.wait()
    state = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict(), "step": 7}
    dist_checkpointing.save(state, folder, ps=ps)


def digest(files):
    """Of names and bytes."""
    found = hashlib.sha256()
    for name, data in sorted(files.items()):
        found.update(name.encode() + b"\0" + data)
    return found.hexdigest()


def written(folder):
    """name -> bytes of every file but the manifest (times, a name of the run) and receipts (what files weigh)."""
    files = [path for path in folder.rglob("*") if path.is_file() and "receipts" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "manifest.json"}


@pytest.mark.parametrize("kind", WRITTEN)
def test_models_of_one_kind_of_layers_keep_their_bytes(tmp_path, kind):
    save_small_model(tmp_path / "now", **EXPERTS if kind != "dense" else {})
    files = written(tmp_path / "now")
    later = {name for name, data in files.items() if AXIS in data}
    about_experts = {name for name in files if name.endswith("zarr.json") and ".experts." in name}
    assert later == (about_experts | {"zarr.json"} if about_experts else set())
    assert digest({name: data.replace(AXIS, b"") for name, data in files.items()}) == WRITTEN[kind]
