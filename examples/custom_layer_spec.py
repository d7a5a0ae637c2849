"""Swap one part of every layer with `dataclasses.replace`: the MLP, for one with squared ReLU (arXiv 2109.08668).

    python examples/custom_layer_spec.py
    torchrun --standalone --nproc-per-node 2 examples/custom_layer_spec.py      # over two tensor-parallel ranks

A part is made from a `Build` (the model's config, the ranks, its layer's number) and maps [s, b, h] to [s, b, h].
Parallel linears divide it over the tensor ranks; recomputation, pipelines and checkpoints need nothing more.
"""

from dataclasses import replace

from torch import Tensor, nn

from core import parallel_state
from core.models.gpt import GPTModel, llama_spec
from core.parallel_state import Init
from core.parallel_state.environment import started_processes
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.training import RunConfig, initialize
from core.training.log.console import errors_as_one_line
from core.transformer.spec import Build

STEPS = 8


class SquaredReluMLP(nn.Module):
    """x [s, b, h] -> [s, b, h]: relu(x W1)^2 W2. Column, then row parallel: one reduction, no gather."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        h, ffn, std = build.config.hidden_size, build.config.ffn, build.config.init_method_std
        self.up = ColumnParallelLinear(h, ffn, place=build.place, bias=False, init=Init(std=std))
        self.down = RowParallelLinear(ffn, h, place=build.place, bias=False, init=Init(std=std))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.down(self.up(x).relu().square())


def losses_of(run: RunConfig, ps: parallel_state.ParallelState, *, swapped: bool) -> list[float]:
    """Train a few steps, with the swapped part or Llama's own."""
    spec = replace(llama_spec(), mlp=SquaredReluMLP) if swapped else llama_spec()
    model = GPTModel(
        run.model.transformer(), spec, run.data.vocab_size, run.data.sequence_length, parallel=ps
    )
    trained, *_, loader = initialize(model, run)
    return [float(trained.train_step(batch).loss) for batch in loader]


def main(run: RunConfig) -> None:
    """Both models, side by side."""
    with errors_as_one_line(), parallel_state.launch(run.device) as device:
        run = run.check(started_processes())
        ps = parallel_state.ParallelState.build(run.parallel, device=device)
        for name, swapped in (("gated SiLU", False), ("squared ReLU", True)):
            losses = losses_of(run, ps, swapped=swapped)
            if ps.rank == 0:
                print(f"{name:12s}  loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main(
        RunConfig.from_dict(
            {
                "parallel": {"tensor": started_processes()},
                "model": {
                    "num_layers": 2,
                    "hidden_size": 64,
                    "num_attention_heads": 4,
                    "ffn_hidden_size": 256,
                },
                "training": {"train_steps": STEPS},
                "optimizer": {"lr": 3e-3},
            }
        )
    )
