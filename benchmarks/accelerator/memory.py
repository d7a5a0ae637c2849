"""What a rank holds, predicted and measured: weights, gradients and states between steps, in six settings."""

import gc

import torch

from benchmarks.accelerator.bench import GPT_1B4, TINY, Bench, Trained, batch, gpt
from core.optimizer import Offload
from core.testing.live import LiveBytes
from core.training.log.memory import expected_of

SETTINGS = {
    "float32, ZeRO-0": (torch.float32, {"zero": 0}),
    "float32, ZeRO-1": (torch.float32, {"zero": 1}),
    "bf16, ZeRO-1": (torch.bfloat16, {"zero": 1}),
    "bf16, ZeRO-3": (torch.bfloat16, {"zero": 3}),
    "bf16, states in host memory": (torch.bfloat16, {"zero": 1, "offload": Offload(kind="cpu")}),
    "bf16, half of them": (
        torch.bfloat16,
        {"zero": 1, "offload": Offload(kind="cpu", fraction=0.5)},
    ),
}


def held(b, dtype, options):
    """(predicted, measured) bytes on the device between two steps."""
    size = TINY if b.dry else GPT_1B4
    gc.collect()
    before = b.memory()
    with LiveBytes() as live:
        job = Trained(gpt(size, dtype, b.state()), b.state(), **options)
        rows = batch(size, b.device)
        job.step(rows)
        job.optimizer.zero_grad()
        del rows
        gc.collect()
        measured = b.memory()[0] - before[0] if before is not None else live.live
    predicted = expected_of(job.shard, job.optimizer, options.get("offload"))
    # on a CPU offloaded states lie in the same memory
    return predicted.device + (predicted.host if b.on_cpu else 0), measured


def run(b: Bench):
    """Each setting."""
    for name, (dtype, options) in SETTINGS.items():

        def compare(b, name=name, dtype=dtype, options=options):
            predicted, measured = held(b, dtype, options)
            b.figures[f"memory_{name}"] = predicted / measured
            low, high = (0.8, 1.05) if b.dry else (0.98, 1.02)  # tiny tensors round up
            assert low <= predicted / measured <= high, (
                f"predicted {predicted:,}, measured {measured:,} bytes"
            )
            return f"predicted ÷ measured {predicted / measured:.3f}"

        b.line(f"memory: {name}", compare)
