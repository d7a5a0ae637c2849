"""The device under test: sizes, clocks, models, and lines that one failure does not end."""

import statistics
import time
import traceback
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from core.autograd import compiled
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt2_spec, llama_spec
from core.optimizer import OptimizerConfig, ShardedAdamW
from core.parallel_state import ParallelState
from core.pipeline import SingleStage
from core.training import next_token_loss
from core.transformer import TransformerConfig

LLAMA = {
    "normalization": "RMSNorm",
    "activation_func": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
}


FLOAT32 = 2e-4  # of the largest gradient of a tensor: sums in another order, tf32 off


class NotHereError(Exception):
    """This machine cannot show it; neither right nor wrong."""


@dataclass(frozen=True)
class Size:
    """Of a model and its batch; microbatches of `rows` sequences."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    sequence: int
    rows: int = 1

    @property
    def tokens(self):
        return self.rows * self.sequence

    def parameters(self):
        head = self.hidden // self.heads
        layer = (
            self.hidden * (2 * self.hidden + 2 * head * self.groups + 3 * self.ffn)
            + 2 * self.hidden
        )
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    def flops(self, *, causal):
        """(in products, in attention) of one step, forward and backward."""
        head = self.hidden // self.heads
        layer = self.hidden * (2 * self.hidden + 2 * head * self.groups + 3 * self.ffn)
        products = 6 * self.tokens * (self.layers * layer + self.vocab * self.hidden)
        attention = 12 * self.tokens * self.layers * self.sequence * self.hidden
        return products, attention / 2 if causal else attention


TINY = Size(2, 64, 160, 4, 2, 512, 32, 2)
SMALL = Size(4, 512, 1408, 8, 4, 8192, 512, 2)
GPT_1B4 = Size(24, 2048, 5632, 16, 16, 50304, 4096, 4)
GPT_3B6 = Size(28, 3072, 8192, 24, 8, 128256, 4096, 4)


@dataclass
class Bench:
    """dry: tiny sizes and few rounds, on whatever device. figures: what `--json` writes."""

    device: torch.device
    dry: bool
    figures: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)
    not_here: list = field(default_factory=list)

    @property
    def on_cpu(self):
        return self.device.type == "cpu"

    def line(self, name, run):
        """Run one check or figure in a `try` of its own; print what it says."""
        begin = time.perf_counter()
        try:
            status, said = "ok", run(self) or ""
        except NotHereError as error:
            status, said = "not here", str(error)
            self.not_here.append(name)
        except Exception as error:
            status, said = (
                "FAILED",
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            )
            self.failed.append(name)
            traceback.print_exc(limit=-4)
        print(f"{name:44s} {status:8s} {time.perf_counter() - begin:6.1f} s  {said}", flush=True)

    def sync(self):
        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)

    def mark(self):
        """A moment on the device's stream."""
        if self.on_cpu:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def between(self, start, end):
        """Seconds between two marks; waits for the device."""
        if self.on_cpu:
            return end - start
        self.sync()
        return start.elapsed_time(end) / 1e3

    def seconds(self, run, rounds=None, calls=1):
        """Median seconds of a call, by the device's events."""
        rounds = rounds or (2 if self.dry else 15)
        for _ in range(1 if self.dry else 3):
            run()
        times = []
        for _ in range(rounds):
            start = self.mark()
            for _ in range(calls):
                run()
            times.append(self.between(start, self.mark()) / calls)
        return statistics.median(times)

    def state(self, device=None):
        return ParallelState.single(device or self.device)

    def memory(self):
        """(allocated now, peak since `reset`) in bytes; None on a CPU."""
        if self.on_cpu:
            return None
        stats = torch.accelerator.memory_stats(self.device)
        return stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]


def gpt(size, dtype, ps, *, style="llama", seed=7, std=0.02, **facts):
    """Our model of this size on the device of `ps`; `facts`: of the configuration."""
    config = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "ffn_hidden_size": size.ffn,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "init_method_std": std,
    }
    if style == "llama":
        config |= LLAMA | {"num_query_groups": size.groups}
    spec = llama_spec() if style == "llama" else gpt2_spec()
    torch.manual_seed(seed)
    return GPTModel(
        TransformerConfig(**config | facts), spec, size.vocab, size.sequence, parallel=ps
    )


def compile_for(b, model):
    """Compile its layers; on an accelerator also with a torch that runs refuse: the checks compare gradients."""
    with patch.object(compiled, "OLDEST_TORCH", (2, 11) if not b.on_cpu else compiled.OLDEST_TORCH):
        if not b.dry:
            compiled.check_compiler(b.device)
        compiled.compile_layers(model, backend="eager" if b.dry else "inductor")


def batch(size, device, rows=None, seed=1):
    data = torch.randint(
        size.vocab,
        (rows or size.rows, size.sequence + 1),
        generator=torch.Generator().manual_seed(seed),
    )
    return {
        "tokens": data[:, :-1].contiguous().to(device),
        "labels": data[:, 1:].contiguous().to(device),
    }


class Trained:
    """A model with its owner, optimizer and executor; `step()` makes one update."""

    def __init__(
        self, model, ps, *, zero=0, microbatches=1, offload=None, executor=None, **options
    ):
        self.model, self.ps = model, ps
        self.shard = DataParallel(model, ps, zero_stage=zero)
        config = OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0} | options)
        self.optimizer = ShardedAdamW(self.shard, config, offload=offload)
        made = executor or SingleStage
        self.executor = made(
            model, ps=ps, num_microbatches=microbatches, grad_sync=self.shard, seed=3
        )

    def gradients(self, rows):
        """Loss and gradients of one batch, without an update."""
        self.optimizer.zero_grad()
        self.executor.step_index = 0
        result = self.executor.step(rows, next_token_loss, self.optimizer.loss_scale)
        found = {n: p.main_grad.detach().clone() for n, p in self.shard.named_parameters().items()}
        return result.loss.detach().clone(), found

    def step(self, rows):
        self.optimizer.zero_grad()
        result = self.executor.step(rows, next_token_loss, self.optimizer.loss_scale)
        return result.loss, self.optimizer.step(num_tokens=result.num_tokens)


def same_bits(found, expected, what):
    """Raise AssertionError for tensors that differ in a bit, or are not finite."""
    for name, tensor in expected.items():
        mine, theirs = found[name].detach().cpu(), tensor.detach().cpu()
        assert torch.isfinite(theirs).all(), f"{what}: {name} is not finite"
        assert torch.equal(mine, theirs), (
            f"{what}: {name} differs by {(mine - theirs).abs().max():.3e}"
        )


def close(found, expected, tolerance, what):
    """Raise AssertionError unless max |difference| <= tolerance * max |expected| per tensor; NaN never passes."""
    worst = 0.0
    for name, tensor in expected.items():
        mine, theirs = found[name].detach().cpu().double(), tensor.detach().cpu().double()
        error = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        assert error <= tolerance, f"{what}: {name} is off by {error:.3e}, at most {tolerance:.0e}"
        worst = max(worst, error)
    return f"largest relative error {worst:.1e}"
