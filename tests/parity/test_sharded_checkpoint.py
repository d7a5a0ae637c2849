"""Every ZeRO stage on every layout writes the plain optimizer's bytes, and each reads them back bit for bit."""

from dataclasses import dataclass

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.dist_checkpointing.state.mapping import sharded_state_dict as module_state_dict
from core.models.gpt import gpt_stages, llama_spec
from core.optimizer import OptimizerConfig, ShardedAdamW, sharded_state_dict
from core.parallel_state import layout_of
from core.transformer import TransformerConfig
from tests.marks import FULL, thinned
from tests.parity import test_checkpoint as plain
from tests.states import state


@dataclass(frozen=True)
class On:
    """A stage of ZeRO on a layout: layers per pipeline stage, tensor ranks, the rest of the world data ranks."""

    zero: int
    world: int
    tp: int = 1
    placement: tuple[int, ...] = (0,)
    layers: tuple[int, ...] = (4,)

    def __str__(self):
        return f"z{self.zero}-w{self.world}-tp{self.tp}-{'+'.join(map(str, self.layers))}"


QUICK = [
    On(0, 2),
    On(1, 3),
    On(3, 2),
    On(3, 4, tp=2),
    On(2, 4, placement=(0, 1, 1, 0), layers=(1, 1, 1, 1)),
]
ALL = [
    On(zero, *rest)
    for zero in range(4)
    for rest in [(1,), (2,), (3,), (4,), (2, 2), (4, 2), (4, 1, (0, 1), (3, 1)), (4, 2, (0, 1), (1, 3))]
]


def build(on, dtype):
    ps = state(tp=on.tp, pp=max(on.placement) + 1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=48,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=160,
        normalization="RMSNorm",
        activation_func="silu",
        gated_linear_unit=True,
        params_dtype=dtype,
    )
    starts = [sum(on.layers[:i]) for i in range(len(on.layers))]
    cut = [range(start, start + n) for start, n in zip(starts, on.layers, strict=True)]
    stages = gpt_stages(
        config,
        llama_spec(),
        331,
        32,
        placement=on.placement,
        layers=cut,
        share_embeddings_and_output_weights=True,
        parallel=ps,
    )
    return ps, stages


def local_value(name, layout, kind, ps, empty):
    """[local], padded rows -9."""
    local = torch.full(layout.local_shape(ps.sizes), -9.0, dtype=torch.float32)
    box = layout.box(ps.coordinate, ps.sizes)
    local[tuple(slice(0, s.stop - s.start) for s in box)] = 0 if empty else plain.whole(name, kind, layout.shape)[box]
    return local


def fill(shard, optimizer, empty):
    """Weights and states are parts of the whole values, or zeros."""
    for name, kinds in optimizer.states().items():
        for kind, part in kinds.items():
            value = local_value(name, part.layout, kind, shard.ps, empty)
            if part.interval is None:
                part.tensor.copy_(value[tuple(slice(0, s.stop - s.start) for s in part.box)])
            else:
                part.tensor.copy_(value.view(-1)[slice(*part.interval)])
    for buffer in shard.buffers:
        for s in buffer.segments:
            value = local_value(s.name, layout_of(s.parameter), "main", shard.ps, empty).view(-1)
            buffer.weights[slice(*s.span)].copy_(value[slice(*s.interval)])
    shard.publish()
    shard.wait()


def snapshot(shard, optimizer):
    states = {(n, k): p.tensor.clone() for n, kinds in optimizer.states().items() for k, p in kinds.items()}
    return states, [buffer.weights.clone() for buffer in shard.buffers]


def same(one, other):
    assert one[0].keys() == other[0].keys()
    for key, tensor in one[0].items():
        assert torch.equal(tensor, other[0][key]), key
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b)


def whole_state(shard, optimizer):
    return {"model": sharded_state_dict(shard), "optimizer": optimizer.sharded_state_dict(), "step": 7}


def reference(directory, dtype):
    """What the plain optimizer writes in one process."""
    on = On(0, 1)
    ps, stages = build(on, dtype)
    optimizer = plain.AdamW(stages, ps, OptimizerConfig(), grad_sync=plain.PerParameterGradSync(stages, ps))
    plain.fill(stages, optimizer, ps, empty=False)
    saved = {"model": module_state_dict(stages, ps), "optimizer": optimizer.sharded_state_dict(), "step": 7}
    dist_checkpointing.save(saved, f"{directory}/plain", ps=ps)


def round_trip(on, directory, dtype):
    ps, stages = build(on, dtype)
    shard = DataParallel(stages, ps, zero_stage=on.zero, bucket_size=20_000)
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    fill(shard, optimizer, empty=False)
    want = snapshot(shard, optimizer)
    dist_checkpointing.save(whole_state(shard, optimizer), f"{directory}/{on}", ps=ps)
    fill(shard, optimizer, empty=True)
    loaded = dist_checkpointing.load(whole_state(shard, optimizer), f"{directory}/plain", ps=ps)
    optimizer.load_state_dict(loaded["optimizer"])
    shard.wait()
    same(snapshot(shard, optimizer), want)
    for stage in stages.values() if isinstance(stages, dict) else stages:
        shard.unshard(stage)
    for name, p in shard.named_parameters().items():  # whole again, also where weights are divided
        layout = layout_of(p)
        box = layout.box(ps.coordinate, ps.sizes)
        part = p.detach()[tuple(slice(0, s.stop - s.start) for s in box)]
        assert torch.equal(part, plain.expected(name, layout, box, "main").to(dtype)), name
    for stage in stages.values() if isinstance(stages, dict) else stages:
        shard.reshard(stage)


def check(ranks, tmp_path, layouts, dtype):
    ranks(reference, str(tmp_path), dtype, world=1)
    want = plain.digest(tmp_path / "plain")
    for on in layouts:
        ranks(round_trip, on, str(tmp_path), dtype, world=on.world)
        assert plain.digest(tmp_path / str(on)) == want, on


def test_every_stage_writes_the_same_bytes_and_reads_them(ranks, tmp_path):
    check(ranks, tmp_path, QUICK, torch.bfloat16)


@pytest.mark.parametrize("dtype", thinned([torch.bfloat16, torch.float32], 2, [FULL]), ids=str)
def test_every_stage_on_every_layout(ranks, tmp_path, dtype):
    check(ranks, tmp_path, ALL, dtype)
