"""A stage's backward in two halves: ours against torch.distributed.pipelining's, and both against one plain backward.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline_backward [--quick] [--json FILE]

`recompute_*`: extra forward executions per microbatch, counted. `held_between_i_and_w`: bytes alive between I and
W, in activations of [b, s, h], counted. The other two are I + W divided by `loss.backward()` of the same module
without rerouting, A B A B: on 8 tiny layers (host time only), and on 4 layers that are recomputed one by one,
where the plain side is torch.utils.checkpoint(use_reentrant=False), which stops early. `torch_*` are the
same figures for torch's own split. Gradients of all sides must agree.
"""

import gc
import statistics
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import _backward as torch_split
from torch.utils.checkpoint import checkpoint

from benchmarks.harness import arguments, report, take_turns
from core.autograd import StageContext, WeightGradBag, apply_recompute, reroute
from core.pipeline import stage_backward_input, stage_backward_weight
from core.testing import LiveBytes


class GeluLayer(nn.Module):
    def __init__(self, hidden, heads=4):
        super().__init__()
        self.heads, self.runs = heads, Counter()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        self.runs["forward"] += 1
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaLayer(nn.Module):
    """18 parameters, as in the measurements of torch's split."""

    def __init__(self, hidden, heads=4):
        super().__init__()
        self.heads, self.runs = heads, Counter()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.gate, self.down = (
            nn.Linear(*size) for size in ((hidden, 4 * hidden),) * 2 + ((4 * hidden, hidden),)
        )

    def forward(self, x):
        self.runs["forward"] += 1
        b, s, h = x.shape
        z = self.norm1(x)
        q, k, v = (
            linear(z).view(b, s, self.heads, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(o.transpose(1, 2).reshape(b, s, h))
        z = self.norm2(x)
        return x + self.down(F.silu(self.up(z)) * self.gate(z))


class Stage(nn.Module):
    """Layers, recomputed by torch's checkpoint: not at all ("none"), each ("layer"), or all together ("stage")."""

    def __init__(self, layer, layers, hidden, checkpointed="none"):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.checkpointed, self.runs = (
            nn.ModuleList(layer(hidden) for _ in range(layers)),
            checkpointed,
            0,
        )
        for p in self.parameters():
            p.grad = torch.zeros_like(p)  # there before the step, as a main gradient would be

    def body(self, x):
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=False)
                if self.checkpointed == "layer"
                else layer(x)
            )
        return x

    def forward(self, x):
        return (
            checkpoint(self.body, x, use_reentrant=False)
            if self.checkpointed == "stage"
            else self.body(x)
        )


class Side:
    """One way through one microbatch: `prepare` is the forward, the call its backward."""

    def __init__(self, stage, shape):
        self.stage = stage
        self.input, self.gy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))

    def prepare(self):
        self.x = self.input.clone().requires_grad_()
        self.y = self.stage(self.x)

    def input_half(self):
        self.y.backward(self.gy)

    def weight_half(self):
        pass

    def __call__(self):
        self.input_half()
        self.y = None
        self.weight_half()


class Ours(Side):
    """Rerouted; `policy` "layer" as regions, "stage" as an executor does it: F without a graph, R right before I."""

    def __init__(self, stage, shape, policy="none"):
        super().__init__(stage, shape)
        self.context, self.policy = StageContext(), policy
        reroute(stage, self.context)
        apply_recompute(stage, "layer" if policy == "layer" else "none", stage=self.context)

    def prepare(self):
        self.bag = WeightGradBag()
        self.context.begin(seed=0, step=0, microbatch=0, bag=self.bag)
        if self.policy == "stage":
            with torch.no_grad():
                self.stage(self.input)
        super().prepare()

    def input_half(self):
        self.dx = stage_backward_input(self.y, self.gy, self.x)

    def weight_half(self):
        stage_backward_weight(self.bag)


class Torch(Side):
    def input_half(self):
        self.dx, self.groups = torch_split.stage_backward_input(
            [self.y], [self.gy], [self.x], self.stage.parameters()
        )

    def weight_half(self):
        torch_split.stage_backward_weight(self.stage.parameters(), self.groups)


def extra_forwards(side):
    """Forward executions of a layer beyond the first, per microbatch."""
    before = [layer.runs.total() for layer in side.stage.layers]
    side.prepare()
    side()
    return sum(
        layer.runs.total() - old - 1 for layer, old in zip(side.stage.layers, before, strict=True)
    ) / len(before)


def held(side):
    """Activations alive between I and W, the input's gradient among them."""
    grads = [p.grad for p in side.stage.parameters()]
    with LiveBytes(side.input, side.gy, *side.stage.parameters(), *grads) as probe:
        side.prepare()
        before = side.x.untyped_storage().nbytes()
        side.input_half()
        side.y = None
        gc.collect()
        live = probe.live - before  # the stage's own input is another's
        side.weight_half()
    return live / (side.input.numel() * side.input.element_size())


def check(*sides):
    """All have the same gradients."""
    found = []
    for side in sides:
        for p in side.stage.parameters():
            p.grad.zero_()
        side.prepare()
        side()
        found.append([p.grad.clone() for p in side.stage.parameters()])
    for grads in found[1:]:
        for mine, theirs in zip(grads, found[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def times_of_plain(ours, plain, pairs, name, warmup=5):
    ratio = take_turns(ours, plain, pairs=pairs, warmup=warmup)
    each = [o / p for o, p in zip(ratio.ours, ratio.peer, strict=True)]
    spread = (
        f"{statistics.median(each):5.2f} ({min(each):.2f} .. {max(each):.2f}, {len(each)} pairs)"
    )
    print(
        f"{name:40s} {spread} x the plain backward of {statistics.median(ratio.peer) * 1e3:.2f} ms",
        flush=True,
    )
    return statistics.median(each)


def measure(quick):
    """Every key and its figure; prints a line for each that is timed."""
    torch.set_num_threads(1)
    hidden, pairs = (64, 5) if quick else (256, 31)
    shape, tiny, result = (2, 128, hidden), (1, 8, 64), {}
    for policy in ("layer", "stage"):
        ours = Ours(Stage(GeluLayer, 4, hidden), shape, policy)
        theirs = Torch(Stage(GeluLayer, 4, hidden, policy), shape)
        check(Side(Stage(GeluLayer, 4, hidden), shape), ours, theirs)
        result[f"recompute_{policy}"], result[f"torch_recompute_{policy}"] = map(
            extra_forwards, (ours, theirs)
        )
    make = lambda kind, *policy: Stage(kind, 4, hidden, *policy)  # noqa: E731
    result["held_between_i_and_w"] = held(Ours(make(GeluLayer), shape))
    result["torch_held_between_i_and_w"] = held(Torch(make(GeluLayer), shape))
    for kind, name in ((GeluLayer, ""), (LlamaLayer, "_llama")):
        plain = Side(make(kind, "layer"), shape)
        key = f"split_recompute_step_vs_unsplit{name}"
        result[key] = times_of_plain(Ours(make(kind), shape, "layer"), plain, pairs, key)
        if not name:
            theirs = Torch(make(kind, "layer"), shape)
            result[f"torch_{key}"] = times_of_plain(
                theirs, plain, max(5, pairs // 4), f"torch_{key}"
            )
    plain, layers = (
        Side(Stage(LlamaLayer, 8, 64), tiny),
        [Stage(LlamaLayer, 8, 64) for _ in range(2)],
    )
    key, pairs = "host_overhead_split_vs_full", 10 * pairs
    result[key] = times_of_plain(Ours(layers[0], tiny), plain, pairs, key, warmup=20)
    result[f"torch_{key}"] = times_of_plain(
        Torch(layers[1], tiny), plain, pairs // 4, f"torch_{key}", warmup=5
    )
    return result


def main():
    args = arguments(__doc__).parse_args()
    report(measure(args.quick), args.json)


if __name__ == "__main__":
    main()
