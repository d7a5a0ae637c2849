"""Right numbers on the device: float32 against the CPU's float64, bit for bit where nothing may differ."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.accelerator.bench import (
    FLOAT32,
    TINY,
    Bench,
    NotHereError,
    Trained,
    batch,
    close,
    compile_for,
    gpt,
    same_bits,
)
from core import dist_checkpointing
from core.autograd import apply_recompute
from core.autograd.fp8 import E4M3, E5M2, Fp8, multiplies
from core.autograd.products import weight_gradient
from core.data_parallel import DataParallel
from core.dist_checkpointing.manager import CheckpointManager
from core.optimizer import Offload, sharded_state_dict
from core.parallel_state import ParallelState
from core.pipeline import Pipeline, SingleStage
from core.tensor_parallel import vocab_parallel_cross_entropy


def reference(style="llama", **facts):
    """Loss and gradients on the CPU in float64."""
    ps = ParallelState.single("cpu")
    model = gpt(TINY, torch.float32, ps, style=style, std=0.2, **facts)
    twin = gpt(TINY, torch.float64, ps, style=style, std=0.2, **facts)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return Trained(twin, ps).gradients(batch(TINY, "cpu"))


def trained(b: Bench, style="llama", dtype=torch.float32, facts=None, **options):
    ps = b.state()
    return Trained(gpt(TINY, dtype, ps, style=style, std=0.2, **(facts or {})), ps, **options)


def initial_weights(b):
    here = gpt(TINY, torch.float32, b.state())
    there = gpt(TINY, torch.float32, ParallelState.single("cpu"))
    same_bits(dict(here.named_parameters()), dict(there.named_parameters()), "initial weights")


def gradients(style):
    def check(b):
        loss, found = trained(b, style).gradients(batch(TINY, b.device))
        expected_loss, expected = reference(style)
        assert abs(loss.item() - expected_loss.item()) < 1e-4, (
            f"loss {loss.item()} and {expected_loss.item()}"
        )
        return close(found, expected, FLOAT32, style)

    return check


def sixteen_bits(b):
    """bf16 may be off by what bf16 is off on the CPU, twice."""
    _, expected = reference()
    _, found = trained(b, dtype=torch.bfloat16).gradients(batch(TINY, b.device))
    cpu = Trained(
        gpt(TINY, torch.bfloat16, ParallelState.single("cpu"), std=0.2), ParallelState.single("cpu")
    )
    _, there = cpu.gradients(batch(TINY, "cpu"))
    for name, exact in expected.items():
        here_off = (found[name].cpu().double() - exact).norm()
        there_off = (there[name].double() - exact).norm()
        assert here_off <= 2 * there_off + 1e-3 * exact.norm(), (
            f"{name}: off by {here_off:.2e}, CPU {there_off:.2e}"
        )


def dropout_again(b):
    """The same masks whatever is computed again."""
    facts, found = {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {}
    for policy in ("none", "layer", "selective"):
        job = trained(b, "gpt2", facts=facts)
        apply_recompute(job.model, policy, stage=job.model.stage)
        found[policy] = job.gradients(batch(TINY, b.device))[1]
    for policy in ("layer", "selective"):
        close(found[policy], found["none"], FLOAT32, policy)
    return "none, layer, selective"


class Foreign(nn.Module):
    """Somebody's model: a convolution and plain linears, from tokens to logits."""

    def __init__(self, size):
        super().__init__()
        self.table, self.mix = nn.Embedding(size.vocab, 32), nn.Conv1d(32, 32, 3, padding=1)
        self.out = nn.Linear(32, size.vocab)

    def forward(self, tokens):
        return self.out(self.mix(self.table(tokens).transpose(1, 2)).transpose(1, 2).tanh())


def split_backward(style):
    """I and W against one backward."""

    def check(b):
        rows, ps = batch(TINY, b.device), b.state()
        results = []
        for pipeline in (False, True):
            torch.manual_seed(5)
            model = (
                Foreign(TINY).to(b.device)
                if style == "foreign"
                else gpt(TINY, torch.float32, ps, style=style, std=0.2)
            )

            def loss(output, microbatch):
                if output.dim() == 3 and style == "foreign":
                    output = F.cross_entropy(
                        output.flatten(0, 1), microbatch["labels"].flatten(), reduction="none"
                    )
                return output.sum(), microbatch["labels"].numel()

            shard = DataParallel(model, ps, zero_stage=0)
            made = {"ps": ps, "num_microbatches": 2, "grad_sync": shard}
            executor = (
                Pipeline([model], schedule="1f1b", **made)
                if pipeline
                else SingleStage(model, **made)
            )
            executor.step(rows, loss)
            results.append({n: p.main_grad.clone() for n, p in shard.named_parameters().items()})
        return close(results[1], results[0], FLOAT32, style)

    return check


def adds_to_what_is_there(b):
    """A weight gradient of bf16 operands is added to a float32 `main_grad`, which is not zero."""
    weight = nn.Parameter(torch.zeros(24, 16, dtype=torch.bfloat16, device=b.device))
    weight.main_grad = torch.full((24, 16), 3.0, device=b.device)
    x, gy = (
        torch.ones(8, 16, dtype=torch.bfloat16, device=b.device),
        torch.ones(8, 24, dtype=torch.bfloat16, device=b.device),
    )
    assert weight_gradient(weight, x, gy) is None
    assert (weight.main_grad == 11).all(), f"8 added to 3 is {weight.main_grad[0, 0].item()}"


def large_vocabulary(b):
    """Cross entropy, forward and backward, over the vocabulary of Llama 3 (dry: a small one)."""
    vocab, tokens = (4001, 8) if b.dry else (128_256, 2048)
    logits = torch.randn(tokens, 1, vocab, generator=torch.Generator().manual_seed(2)) * 4
    labels = torch.randint(vocab, (tokens, 1), generator=torch.Generator().manual_seed(3))
    mine = logits.to(b.device, copy=True).requires_grad_()
    theirs = logits.double().requires_grad_()
    # the loss may overwrite its logits: give it a copy
    losses = vocab_parallel_cross_entropy(mine * 1, labels.to(b.device), None)
    losses.sum().backward()
    expected = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="none")
    expected.sum().backward()
    found = {"loss": losses.flatten(), "gradient": mine.grad}
    return close(found, {"loss": expected, "gradient": theirs.grad}, 1e-5, "cross entropy")


def attention_kernel(b):
    """Which kernel serves grouped queries in bf16: told, and no mathematical fallback on an accelerator."""
    q = torch.randn(2, 8, 64, 64, device=b.device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, 2, 64, 64, device=b.device, dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
        b.sync()
    names = {e.key for e in profile.key_averages() if e.key.startswith("aten::_scaled_dot_product")}
    assert names, "no fused attention ran: the mathematical one did"
    return ", ".join(
        sorted(
            name.removeprefix("aten::_scaled_dot_product_")
            for name in names
            if "backward" not in name
        )
    )


def zero_stages(b):
    rows, steps = batch(TINY, b.device), []
    for stage in range(4):
        job = trained(b, zero=stage)
        for _ in range(3):
            job.step(rows)
        job.shard.wait()
        job.shard.unshard(job.model)
        steps.append({n: p.detach().clone() for n, p in job.model.named_parameters()})
    for stage in (1, 2, 3):
        same_bits(steps[stage], steps[0], f"ZeRO-{stage}")


def offload(b):
    """States in host memory, or in files, give the bits of resident ones."""
    rows, found = batch(TINY, b.device), []
    with tempfile.TemporaryDirectory() as folder:
        for policy in (None, Offload(kind="cpu"), Offload(kind="disk", directory=folder)):
            job = trained(b, dtype=torch.bfloat16, offload=policy)
            for _ in range(3):
                job.step(rows)
            found.append(dict(job.model.named_parameters()))
    same_bits(found[1], found[0], "offload to host memory")
    same_bits(found[2], found[0], "offload to files")


def skipped_step(b):
    """A gradient that is not finite: nothing changes, and the parameter is named."""
    job = trained(b)
    job.step(batch(TINY, b.device))
    before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
    job.optimizer.zero_grad()
    job.executor.step(batch(TINY, b.device), lambda output, microbatch: (output.sum(), 1))
    name, parameter = next(iter(job.shard.named_parameters().items()))
    parameter.main_grad.view(-1)[0] = float("inf")
    stats = job.optimizer.step(num_tokens=1)
    assert bool(stats.skipped)
    same_bits(dict(job.model.named_parameters()), before, "a skipped step")
    assert any(name in said for said in job.optimizer.non_finite()), "the parameter is not named"


def saved_here_loaded_there(b):
    """A checkpoint of the device, loaded on the CPU: the bits; also when parameters change while it is written."""
    with tempfile.TemporaryDirectory() as folder:
        job = trained(b)
        job.step(batch(TINY, b.device))
        before = {n: p.detach().clone() for n, p in job.model.named_parameters()}
        manager = CheckpointManager(Path(folder) / "run", ps=job.ps)
        manager.save_async(1, {"model": sharded_state_dict(job.shard)})
        manager.before_update()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(1.0)
        manager.close()
        ps = ParallelState.single("cpu")
        there = gpt(TINY, torch.float32, ps, seed=9)
        dist_checkpointing.load(
            {"model": there.sharded_state_dict()}, Path(folder) / "run" / "step-00000001", ps=ps
        )
        same_bits(dict(there.named_parameters()), before, "a checkpoint")


def no_host_sync(b):
    """20 steps after warm-up under torch's own check that nothing waits for the device."""
    if b.device.type != "cuda":
        raise NotHereError(
            "torch's sync debug mode is of CUDA; on CPUs tests/training/test_host_reads.py counts"
        )
    job, rows = trained(b, zero=1), batch(TINY, b.device)
    for _ in range(3):
        job.step(rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            job.step(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def same_bits_twice(b):
    """The same steps twice, with torch's deterministic algorithms."""
    found = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(2):
            job = trained(b, dtype=torch.bfloat16)
            for _ in range(2 if b.dry else 20):
                job.step(batch(TINY, b.device))
            found.append(dict(job.model.named_parameters()))
    finally:
        torch.use_deterministic_algorithms(False)
    same_bits(found[1], found[0], "the same steps")


def compiled_layers(b):
    """Compiled layers give the eager gradients (dry: without inductor)."""
    _, expected = trained(b).gradients(batch(TINY, b.device))
    job = trained(b)
    compile_for(b, job.model)
    for _ in range(2):
        _, found = job.gradients(batch(TINY, b.device))
    torch._dynamo.reset()
    return close(found, expected, FLOAT32, "compiled")


def eight_bits(b):
    """Products of 8-bit factors against their plain twins in float64 on the CPU; which of them the device makes."""
    made = []
    for rowwise in (False, True):
        for gradient_dtype in (E4M3, E5M2):
            recipe = Fp8(gradient_dtype, rowwise)
            for tokens, inputs, outputs in ((64, 96, 48), (37, 80, 23)):
                generator = torch.Generator().manual_seed(tokens)
                sizes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
                x, w, gy = (torch.randn(size, generator=generator).bfloat16() for size in sizes)
                twins = _three_products(recipe, x.double(), w.double(), gy.double())
                found = _three_products(recipe, *(t.to(b.device) for t in (x, w, gy)))
                for ours, exact in zip(found, twins, strict=True):
                    error = (ours.cpu().double() - exact).abs().max() / exact.abs().max()
                    assert error < 2**-7, f"{recipe}: off by {error:.1e}"
            for dtype in (torch.float32, torch.bfloat16):
                if multiplies(b.device.type, gradient_dtype, dtype, rowwise):
                    scales = "rowwise" if rowwise else "tensorwise"
                    made.append(f"{gradient_dtype} {scales} {dtype}")
    return f"8-bit kernels: {', '.join(made).replace('torch.', '') or 'none'}"


def _three_products(recipe, x, w, gy):
    y = recipe.forward(x, w)
    return y, recipe.input_gradient(gy, w), recipe.weight_gradient(x, gy, torch.float32)


CHECKS = {
    "initial weights, bit for bit": initial_weights,
    "loss and gradients, llama": gradients("llama"),
    "loss and gradients, gpt2": gradients("gpt2"),
    "bf16 within twice the CPU's error": sixteen_bits,
    "dropout under recomputation": dropout_again,
    "I and W are backward, llama": split_backward("llama"),
    "I and W are backward, gpt2": split_backward("gpt2"),
    "I and W are backward, a foreign model": split_backward("foreign"),
    "weight gradients add to what is there": adds_to_what_is_there,
    "cross entropy over a large vocabulary": large_vocabulary,
    "attention kernel of grouped queries": attention_kernel,
    "ZeRO 0 to 3, bit for bit": zero_stages,
    "offloaded states, bit for bit": offload,
    "a skipped step": skipped_step,
    "checkpoint here, loaded on the CPU": saved_here_loaded_there,
    "no host read in a step": no_host_sync,
    "the same bits twice": same_bits_twice,
    "compiled layers": compiled_layers,
    "products of 8-bit factors": eight_bits,
}


def run(b: Bench):
    """All of them."""
    for name, check in CHECKS.items():
        b.line(name, check)
