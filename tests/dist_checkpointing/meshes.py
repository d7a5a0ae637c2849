"""GPT-shaped arrays and what every rank of a mesh holds of them, by arithmetic: the models under these tests."""

from dataclasses import dataclass, field
from math import ceil, prod
from unittest import mock

import numpy as np

from core.dist_checkpointing.format import grid
from core.dist_checkpointing.format.arrays import STORED_DTYPES, ArrayInfo
from core.parallel_state.flat import flat_boxes, intersect, shifted, whole


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple  # of one layer
    tp_dim: int | None = None
    stacked: bool = True
    ragged: bool = False


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    ffn: int
    groups: int
    per_group: int = 3  # q + 2
    vocab: int = 0
    gated: bool = False
    biases: bool = False
    tied: bool = False

    @property
    def head(self):
        return self.hidden // (self.groups * (self.per_group - 2))

    def layer(self):
        h, f, g, q, d = self.hidden, self.ffn, self.groups, self.per_group, self.head
        up = Weight("up", (2, f, h), 1) if self.gated else Weight("up", (f, h), 0)
        weights = [Weight("norm1", (h,)), Weight("qkv", (g, q, d, h), 0)]
        weights += [Weight("qkv_bias", (g, q, d), 0), Weight("proj_bias", (h,))] if self.biases else []
        return [*weights, Weight("proj", (h, h), 1), Weight("norm2", (h,)), up, Weight("down", (h, f), 1)]

    @property
    def embedding(self):
        return Weight("embedding", (self.vocab, self.hidden), 0, False, True)

    def last(self):
        head = self.embedding if self.tied else Weight("head", (self.vocab, self.hidden), 0, False, True)
        return [Weight("norm", (self.hidden,), None, False), head]

    def arrays(self, states=("",), dtype="float32"):
        infos = {}
        for w in [self.embedding, *self.layer(), *self.last()]:
            shape = (self.layers, *w.shape) if w.stacked else w.shape
            tp_dim = None if w.tp_dim is None else w.tp_dim + w.stacked
            infos[w.name] = ArrayInfo(shape, dtype, tp_dim, w.stacked, w.ragged)
        return {state + name: info for state in states for name, info in infos.items()}


@dataclass(frozen=True)
class Mesh:
    """stages: the layers of each; their ranks are the slowest axis, tensor the fastest."""

    tp: int = 1
    dp: int = 1
    stages: tuple = field(default=())
    zero: bool = False
    bucket: int = 40_000_000

    def size(self):
        return self.tp * self.dp * max(1, len(self.stages))

    def holdings(self, model, states=("",)):
        stages = self.stages or (tuple(range(model.layers)),)
        ranks = []
        for at, layers in enumerate(stages):
            weights = [(None, model.embedding)] if at == 0 else []
            weights += [(layer, w) for layer in layers for w in model.layer()]
            last = model.last() if at == len(stages) - 1 else []
            weights += [(None, w) for w in last if (None, w) not in weights]
            for d in range(self.dp):
                for t in range(self.tp):
                    held = {}
                    for (layer, weight), interval in zip(weights, self.intervals(weights, d), strict=True):
                        if boxes := self.boxes(layer, weight, t, interval):
                            held[weight.name] = held.get(weight.name, ()) + boxes
                    ranks.append({state + name: boxes for state in states for name, boxes in held.items()})
        return ranks

    def local_shape(self, weight):
        shape = list(weight.shape)
        if weight.tp_dim is not None:
            if weight.ragged:
                part = 8 if 8 % self.tp == 0 else self.tp
                shape[0] = ceil(ceil(shape[0] / part) / 16) * 16 * part
            assert shape[weight.tp_dim] % self.tp == 0
            shape[weight.tp_dim] //= self.tp
        return tuple(shape)

    def intervals(self, weights, d):
        """Of each weight, what replica `d` holds of its flat form: buckets of whole weights from the last one on,
        each cut in equal parts."""
        sizes = [prod(self.local_shape(w)) for _, w in weights]
        if not self.zero:
            return [(0, n) for n in sizes]
        found, bucket = [], []
        for i, n in reversed(list(enumerate(sizes))):
            bucket.append(n)
            if sum(bucket) >= self.bucket or i == 0:
                share = -(-sum(bucket) // (64 * self.dp)) * 64
                start = 0
                for size in bucket:
                    found.append(tuple(min(max(edge - start, 0), size) for edge in (d * share, (d + 1) * share)))
                    start += size
                bucket = []
        return found[::-1]

    def boxes(self, layer, weight, t, interval):
        local = self.local_shape(weight)
        origin = [t * n if dim == weight.tp_dim else 0 for dim, n in enumerate(local)]
        found = [intersect(shifted(box, origin), whole(weight.shape)) for box in flat_boxes(local, *interval)]
        lead = ((layer, layer + 1),) if weight.stacked else ()
        return tuple(lead + box for box in found if box is not None)


SMALL = Model(layers=6, hidden=48, ffn=96, groups=12, vocab=1003, gated=True, biases=True, tied=True)
GPT_124M = Model(layers=12, hidden=768, ffn=3072, groups=12, vocab=50257, biases=True, tied=True)
GPT_7B = Model(layers=32, hidden=4096, ffn=11008, groups=32, vocab=32000, gated=True)
GPT_70B = Model(layers=80, hidden=8192, ffn=28672, groups=8, per_group=10, vocab=128256, gated=True)


def small_cells():
    """For the time of a `with`: a grid of many cells for models that fit a test; 16 times between least and most."""
    return mock.patch.multiple(grid, MIN=2**8, MAX=2**12)


def random_arrays(arrays, seed=0):
    """key -> random bits in the stored dtype, NaNs with payloads among them."""
    rng = np.random.default_rng(seed)
    values = {}
    for key, info in arrays.items():
        dtype = np.dtype(STORED_DTYPES[info.dtype][0])
        most = 2 if info.dtype == "bool" else 256
        raw = rng.integers(0, most, prod(info.shape) * info.itemsize, np.uint8)
        values[key] = raw.view(dtype).reshape(info.shape)
    return values
