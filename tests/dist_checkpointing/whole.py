"""A small GPT-shaped state held by one process, and what a checkpoint of it must say."""

import torch

from core import dist_checkpointing
from core.dist_checkpointing import ShardedTensor

LAYERS = "decoder.layers"
TP_DIMS = {  # as in the stack
    f"{LAYERS}.norm.weight": None,
    f"{LAYERS}.qkv.weight": 1,
    f"{LAYERS}.fc1.weight": 1,
    f"{LAYERS}.fc2.weight": 2,
    "embedding.word_embeddings.weight": 0,
    "decoder.final_norm.weight": None,
    "output_layer.weight": 0,
    "scale": None,
}


def shapes(layers=4, hidden=48, groups=24, vocab=131):
    """Divisible by 1, 2, 3, 4, 6, 8, 12, 24."""
    stacked = {
        f"{LAYERS}.norm.weight": (hidden,),
        f"{LAYERS}.qkv.weight": (groups, 3, hidden // groups, hidden),
        f"{LAYERS}.fc1.weight": (4 * hidden, hidden),
        f"{LAYERS}.fc2.weight": (hidden, 4 * hidden),
    }
    table = (vocab, hidden)
    single = {"embedding.word_embeddings.weight": table, "decoder.final_norm.weight": (hidden,)}
    return {n: (layers, *s) for n, s in stacked.items()} | single | {"output_layer.weight": table, "scale": ()}


def mains(seed=0, **sizes):
    """name -> float32 main parameter, stacked."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(**sizes).items()}


def sharded(key, whole):
    """One process holds all of an array: a part per layer of a stack."""
    name = key.rpartition("/")[2]
    if not name.startswith(LAYERS + "."):
        return ShardedTensor(key, whole, tuple(whole.shape), (0,) * whole.dim(), tp_dim=TP_DIMS[name])
    more = {"prepend_axis_num": 1, "tp_dim": TP_DIMS[name], "stack": LAYERS}
    return [ShardedTensor(key, row, tuple(whole.shape), (i, *[0] * row.dim()), **more) for i, row in enumerate(whole)]


def state(main, *, dtype=torch.bfloat16, groups=("model", "optimizer/main", "optimizer/exp_avg"), step=7):
    """Weights of `dtype`, main parameters and a moment."""
    kinds = {
        "model": lambda t: t.to(dtype),
        "optimizer/main": lambda t: t,
        "optimizer/exp_avg": lambda t: t * 0.5,
    }
    arrays = {f"{group}/{name}": kinds[group](t) for group in groups for name, t in main.items()}
    return {key: sharded(key, t) for key, t in arrays.items()} | {"step": step}


def save(path, *, seed=0, sizes=None, **options):
    """The checkpoint, and its main parameters."""
    main = mains(seed, **(sizes or {}))
    dist_checkpointing.save(state(main, **options), path)
    return main
