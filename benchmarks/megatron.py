"""TP=2 and PP=2 (1F1B) against Megatron-Core 0.16.1, GPT and Llama style, over two gloo ranks.

    pip install --no-deps megatron-core==0.16.1       # in an environment of its own, above this one
    OMP_NUM_THREADS=1 python -m benchmarks.megatron [--quick] [--json FILE]

Starts two ranks by itself. The same shapes, tokens, microbatches, threads and fused AdamW on both sides, float32;
weights are each side's own, drawn with one standard deviation: parameters are counted, and the losses must begin and
fall alike. Megatron-Core takes what it has without Transformer Engine: its local layer spec.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks import megatron_peer
from benchmarks.harness import arguments, fused_adamw, report, take_turns
from benchmarks.llama import Shape
from core.models.gpt import GPTModel, gpt2_config, gpt2_spec, gpt_stages, llama_config, llama_spec
from core.parallel_state import ParallelConfig, ParallelState
from core.pipeline import Pipeline, SingleStage
from core.training import next_token_loss

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
MICROBATCHES, ROWS = 4, 2
BASE = Shape(layers=4, heads=8, kv_heads=8, seq=128, vocab=1024)
MISSING = """megatron-core is not installed here, so there is nothing to compare with. In an environment of its own:
    pip install --no-deps megatron-core==0.16.1"""


class OurSide:
    """One training step of ours on this layout; `step()` gives the mean loss."""

    def __init__(self, shape, style, layout, batch):
        config_of, spec = (
            (llama_config, llama_spec()) if style == "llama" else (gpt2_config, gpt2_spec())
        )
        activation = {} if style == "llama" else {"activation_func": "gelu"}  # Megatron's default
        config = config_of(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            num_query_groups=shape.kv_heads,
            ffn_hidden_size=shape.ffn,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **activation,
        )
        ps = ParallelState.build(ParallelConfig(**layout), device="cpu")
        how = {"parallel": ps, "seed": 1}
        if ps.size("pp") > 1:
            # half of the layers each, as Megatron cuts them
            half = shape.layers // 2
            layers = [range(half), range(half, shape.layers)]
            stages = gpt_stages(
                config, spec, shape.vocab, shape.seq, placement=(0, 1), layers=layers, **how
            )
            self.executor = Pipeline(stages, ps=ps, schedule="1f1b", num_microbatches=MICROBATCHES)
            self.model = torch.nn.ModuleList(stages.values())
        else:
            self.model = GPTModel(config, spec, shape.vocab, shape.seq, **how)
            self.executor = SingleStage(self.model, ps=ps, num_microbatches=MICROBATCHES)
        self._batch, self._optimizer = batch, fused_adamw(self.model)
        self._scale = 1 / batch["tokens"].numel()

    def step(self):
        """Forward, backward and update of all microbatches."""
        result = self.executor.step(self._batch, next_token_loss, loss_scale=self._scale)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return result.loss.item()


def check_alike(ours, peer):
    """Raise AssertionError unless both have as many parameters and their losses begin and fall alike."""
    counts = [sum(p.numel() for p in side.model.parameters()) for side in (ours, peer)]
    assert counts[0] == counts[1], (
        f"ours has {counts[0]:,} parameters on this rank, Megatron's model {counts[1]:,}"
    )
    for moment in ("first", "third"):
        mine, theirs = ours.step(), peer.step()
        if theirs is not None:  # the last pipeline rank
            assert abs(mine - theirs) < 0.15, f"the {moment} losses are {mine:.3f} and {theirs:.3f}"
        ours.step(), peer.step()


def compare(shape, style, layout, pairs):
    """The two sides' seconds in turns."""
    data = torch.randint(
        shape.vocab,
        (MICROBATCHES * ROWS, shape.seq + 1),
        generator=torch.Generator().manual_seed(1),
    )
    batch = {"tokens": data[:, :-1].contiguous(), "labels": data[:, 1:].contiguous()}
    parts = list(zip(batch["tokens"].split(ROWS), batch["labels"].split(ROWS), strict=True))
    ours, peer = (
        OurSide(shape, style, layout, batch),
        megatron_peer.MegatronSide(shape, style, layout, parts),
    )
    check_alike(ours, peer)
    ratio = take_turns(ours.step, peer.step, pairs=pairs, before=dist.barrier)
    peer.close()
    return ratio


def work(args):
    torch.set_num_threads(1)
    megatron_peer.load()
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None
    tokens = MICROBATCHES * ROWS * BASE.seq
    say(
        f"{BASE.layers} layers, {tokens} tokens in {MICROBATCHES} microbatches, 2 gloo ranks, fused AdamW, float32"
    )
    found = {}
    for hidden in (64,) if args.quick else (256, 512):
        for style in ("gpt", "llama"):
            shape = replace(
                BASE, hidden=hidden, ffn=4 * hidden if style == "gpt" else hidden * 11 // 4
            )
            for name, layout in LAYOUTS.items():
                key = f"speedup_vs_megatron_{name}_{style}_{hidden}"
                ratio = compare(shape, style, layout, pairs=3 if args.quick else 15)
                say(ratio.row(key))
                found[key] = ratio.median
    if dist.get_rank() == 0:
        report(found, args.json)
    dist.barrier()
    dist.destroy_process_group()


def main():
    args = arguments(__doc__).parse_args()
    if "RANK" in os.environ:
        work(args)
        return
    if (
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.core") is None
    ):
        raise SystemExit(MISSING)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    raise SystemExit(subprocess.call([*launcher, "-m", "benchmarks.megatron", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
