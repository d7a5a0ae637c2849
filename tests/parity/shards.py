"""What a `DataParallel` holds, put together from all ranks, for comparison with one process."""

import torch

from core.parallel_state.collectives import all_gather, all_gather_objects
from core.parallel_state.layout import layout_of
from tests.parity.whole import assembled


def whole_buckets(shard, of):
    """name -> local tensor, from every rank's part `of(buffer)` [own]; all-gather per bucket."""
    found = {}
    for buffer in shard.buffers:
        whole = all_gather(of(buffer).contiguous(), buffer.ranks)
        for slot, parameter in zip(buffer.bucket.slots, buffer.parameters, strict=True):
            found[slot.name] = whole[slot.start : slot.stop].view(parameter.shape)
    return found


def _assembled(shard, tensors):
    layouts = {name: layout_of(p) for name, p in shard.named_parameters().items()}
    return assembled(tensors, layouts, shard.ps)


def whole_gradients(shard):
    """Global name -> the whole gradient, after `finish`; replicas and copies must agree bit for bit."""
    return _assembled(shard, whole_buckets(shard, lambda buffer: buffer.own_gradients))


def whole_weights(shard):
    """Global name -> the whole weight, from the parts that optimizers update."""

    def own(buffer):
        return buffer.weights[
            buffer.shard_interval[0] - buffer.updated_interval[0] : buffer.shard_interval[1]
            - buffer.updated_interval[0]
        ]

    return _assembled(shard, whole_buckets(shard, own))


def norm(shard, tokens):
    """From what every rank counts, each true element once."""
    mine = sum((buffer.gradients[a:b].square().sum() for buffer in shard.buffers for a, b in buffer.counted), 0.0)
    parts = all_gather_objects(float(mine), shard.ps.world)
    return torch.tensor(parts, dtype=torch.float64).sum().sqrt().item() / float(tokens)
