"""A state of a few kilobytes, as one rank of any number holds it, with all that a real one has: layers in a stack,
tensor-parallel cuts, flat intervals, bf16 weights beside float32 main parameters, buffers, plain values."""

import zlib

import torch

from core.dist_checkpointing import ShardedObject, ShardedTensor

LAYERS, HIDDEN, ROWS = 3, 8, 24


def whole(name, shape, seed, dtype=torch.float32):
    """The value of one global tensor, the same everywhere."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def wholes(seed):
    """key -> whole tensor of everything in `state`."""
    found = {}
    for name, shape in (("table", (ROWS, HIDDEN)), ("layers.w", (LAYERS, 4, HIDDEN)), ("layers.norm", (LAYERS, 5))):
        main = whole(name, shape, seed)
        found |= {f"optimizer/main/{name}": main, f"model/{name}": main.bfloat16()}
        found |= {f"optimizer/exp_avg/{name}": whole(f"avg {name}", shape, seed)}
    found["model/count"] = torch.tensor(seed, dtype=torch.int64)
    return found


def part(key, value, rank, world):
    """This rank's sharded tensors of a whole: a share of the rows of the table and of each layer."""
    stacked = "layers" in key
    rows = value[0] if stacked else value
    if not rows.dim():
        return ShardedTensor(key, rows.clone(), tuple(value.shape), ())
    first, last = len(rows) * rank // world, len(rows) * (rank + 1) // world
    made = []
    for layer, of_layer in enumerate(value if stacked else [value]):
        offset = (layer,) * stacked + (first,) + (0,) * (rows.dim() - 1)
        cut = of_layer[first:last].clone()
        made.append(ShardedTensor(key, cut, tuple(value.shape), offset, 0, int(stacked), tp_dim=int(stacked)))
    return made


def state(seed, rank=0, world=1, *, empty=False):
    """What a rank saves, or, empty, loads into: every number is -1 then."""
    made = {key: part(key, value, rank, world) for key, value in wholes(seed).items()}
    if empty:
        for tensor in tensors(made):
            tensor.data.fill_(-1)
    return {"arrays": made, "step": -1 if empty else seed, "named": ShardedObject("order", [seed] * 2)}


def tensors(made):
    """Every sharded tensor of `state`'s arrays, or of the whole state."""
    found = made.get("arrays", made)
    return [part for parts in found.values() for part in (parts if isinstance(parts, list) else [parts])]


def assert_holds(made, seed):
    """Bit for bit; the numbers of `seed` and of nobody else."""
    expected = wholes(seed)
    for tensor in tensors(made):
        box = tuple(slice(a, b) for a, b in tensor.box)
        assert torch.equal(tensor.stacked_data, expected[tensor.key][box]), tensor.key


def snapshot(made):
    """A copy of every number, to see that nothing was touched."""
    return [tensor.data.clone() for tensor in tensors(made)]


def assert_untouched(made, before):
    for tensor, old in zip(tensors(made), before, strict=True):
        assert torch.equal(tensor.data, old), tensor.key
