"""A checkpoint of q, k, v, gate and up, layer by layer, read into a GPT's fused and stacked parameters and their
optimizer's states on any layout; and their fused ones back into the parts."""

import pytest
import torch

from core import dist_checkpointing
from core.data_parallel import DataParallel
from core.dist_checkpointing import Concat, Source, lazy_tensors, load_common_state_dict
from core.optimizer import OptimizerConfig, ShardedAdamW
from tests.parity.test_sharded_checkpoint import On, build, fill, reference, same, snapshot, whole_state

LAYERS, GROUPS, Q, D, H, F = 4, 4, 2, 6, 48, 160  # as `build` makes them
QKV, FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"


def stem(key, name):
    return key.removesuffix(name).replace("decoder.layers.", "blocks")


def take_apart(directory, single):
    """`plain` as another program would have named and cut it."""
    state = load_common_state_dict(f"{directory}/plain")
    for key, stored in lazy_tensors(f"{directory}/plain").items():
        if key.endswith(QKV):
            for i, layer in enumerate(stored[...]):
                for name, part in zip("qkv", layer.split([Q, 1, 1], dim=1), strict=True):
                    state[f"{stem(key, QKV)}.{i}.{name}"] = part.reshape(-1, H).clone()
        elif key.endswith(FC1):
            for i, layer in enumerate(stored[...]):
                state |= {f"{stem(key, FC1)}.{i}.{name}": layer[n].clone() for n, name in enumerate(("gate", "up"))}
        else:
            state[key] = stored[...]
    dist_checkpointing.save(state, f"{directory}/apart", ps=single)


def merged(key):
    """What a fused parameter is made of."""
    if key.endswith(QKV):
        shapes = {name: (1, GROUPS, n, D, H) for name, n in (("q", Q), ("k", 1), ("v", 1))}
        return Concat(
            [
                Concat([Source(f"{stem(key, QKV)}.{i}.{n}", shape=shape) for n, shape in shapes.items()], dim=2)
                for i in range(LAYERS)
            ]
        )
    if key.endswith(FC1):
        names = [[f"{stem(key, FC1)}.{i}.{name}" for name in ("gate", "up")] for i in range(LAYERS)]
        return Concat([Concat([Source(n, shape=(1, 1, F, H)) for n in layer], dim=1) for layer in names])
    return key


def read(on, directory):
    ps, stages = build(on, torch.bfloat16)
    shard = DataParallel(stages, ps, zero_stage=on.zero, bucket_size=20_000)
    optimizer = ShardedAdamW(shard, OptimizerConfig())
    fill(shard, optimizer, empty=False)
    want = snapshot(shard, optimizer)
    fill(shard, optimizer, empty=True)
    loaded = dist_checkpointing.load(whole_state(shard, optimizer), f"{directory}/apart", ps=ps, mapping=merged)
    optimizer.load_state_dict(loaded["optimizer"])
    shard.wait()
    same(snapshot(shard, optimizer), want)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "on",
    [
        On(3, 4, tp=2),
        pytest.param(On(1, 3), marks=FULL),
        pytest.param(On(2, 4, placement=(0, 1, 1, 0), layers=(1, 1, 1, 1)), marks=FULL),
        pytest.param(On(0, 4, tp=2, placement=(0, 1), layers=(1, 3)), marks=FULL),
    ],
    ids=str,
)
def test_parts_of_a_gpt_on_any_layout(ranks, tmp_path, single, on):
    ranks(reference, str(tmp_path), torch.bfloat16, world=1)
    take_apart(tmp_path, single)
    ranks(read, on, str(tmp_path), world=on.world)
    found = lazy_tensors(tmp_path / "apart")
    names = {}
    for i in range(LAYERS):
        for name, at in (("q", slice(Q)), ("k", slice(Q, Q + 1)), ("v", slice(-1, None))):
            names[f"model/blocks.{i}.{name}"] = Source(f"model/decoder.layers.{QKV}")[i, :, at]
    back = {name: torch.zeros(GROUPS, Q if name.endswith("q") else 1, D, H).bfloat16() for name in names}
    dist_checkpointing.load(back, tmp_path / "plain", ps=single, mapping=names, strict=False)
    assert all(torch.equal(t.view(-1, H), found[name][...]) for name, t in back.items())
