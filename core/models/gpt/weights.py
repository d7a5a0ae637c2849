"""The parameters of a part of a model: their initial values, and this rank's shards of them for checkpoints."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from core.dist_checkpointing.state.mapping import ShardedTensor, sharded_state_dict
from core.models.gpt.their_methods import ELSEWHERE, AbsentMethod, not_here
from core.models.lora.config import LoraConfig
from core.parallel_state import (
    ParallelState,
    initialize_parameters,
    layout_of,
    mix32,
    seeded,
)
from core.parallel_state.by_hand.functions import called_by_core
from core.tensor_parallel import (
    ColumnParallelLinear,
    Placement,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from core.tensor_parallel.chosen_by_class import tell_of_loop
from core.tensor_parallel.watch import SplitWatch
from core.transformer.transformer_config import TransformerConfig

# torch's class -> those that stand here in its place
_PLACED = {
    "Linear": {ColumnParallelLinear.__name__, RowParallelLinear.__name__},
    "Embedding": {VocabParallelEmbedding.__name__},
}


class ModelWeights(nn.Module):
    """What `GPTModel` says of its weights.

    seed: of initial values, which are the same on every layout of ranks.
    """

    parallel: ParallelState
    config: TransformerConfig
    place: Placement
    seed: int
    # whether its weights are no numbers yet, because a checkpoint will fill them
    awaits_checkpoint = False
    # of the adapters beside its linears
    lora: LoraConfig | None = None
    # follows split weights; None where one rank has all
    _watch: SplitWatch | None
    _warned_of_shards = False
    _warned_of_classes = False
    from_pretrained = AbsentMethod()
    from_config = AbsentMethod()

    def __getattr__(self, name: str) -> Any:
        # asked for every submodule: no slower than nn.Module's own, and without a further call
        try:
            return self.__dict__["_modules"][name]
        except KeyError:
            pass
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in ELSEWHERE:
                raise
        raise not_here(type(self), name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """As torch's. Warns, once, of a loop that asks for torch's classes: `isinstance(m, nn.Linear)`."""
        modules = super().named_modules(*args, **kwargs)
        if not self._warned_of_classes:
            self._warned_of_classes = tell_of_loop(self, _PLACED)
        return modules

    def init_weights(self) -> None:
        """Fill every parameter with its initial values again, after `to_empty` above all.

        Modules of your own are filled by their `reset_parameters`. Raises ValueError: one without that method.
        """
        for name, submodule in self.named_modules():
            without_initial = [
                p
                for p in submodule.parameters(recurse=False)
                if getattr(p, "initial", None) is None
            ]
            if not without_initial:
                continue
            reset = getattr(submodule, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"{name} ({type(submodule).__name__}) has {len(without_initial)} parameters and no "
                    "reset_parameters(): nobody can fill it; add the method, or load a checkpoint"
                )
            with seeded(without_initial[0].device, mix32(self.seed, "parts", name)):
                reset()
        self._initialize()

    @property
    def draws_on_cpu(self) -> bool:
        """Whether initial values are drawn on the CPU, the same ones for every kind of device."""
        return self.config.use_cpu_initialization

    def _initialize(self) -> None:
        ps = self.parallel
        on_cpu = self.draws_on_cpu
        initialize_parameters(
            self, seed=self.seed, coordinate=ps.coordinate, sizes=ps.sizes, draw_on_cpu=on_cpu
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As torch's: this rank's shards. Warns, once, where other ranks hold others."""
        ps = self.parallel
        is_stage = ps.size("pp") > 1 and not called_by_core(sys._getframe(1))
        if (self._watch is not None or is_stage) and not self._warned_of_shards:
            self._warned_of_shards = True
            kinds = (("tensor", "tp"), ("expert", "ep"), ("pipeline", "pp"))
            parts = [f"{kind} rank {ps.index(axis)} of {ps.size(axis)}" for kind, axis in kinds]
            warnings.warn(
                f"state_dict() holds the parts of {', '.join(parts)}: one rank's file "
                "(torch.distributed.checkpoint writes one, too) loses the others'. Use dist_checkpointing.save("
                "model.sharded_state_dict(), directory), or a file per rank; a copy in memory for this rank is right",
                stacklevel=2,
            )
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        """name -> this rank's shard of each parameter, for `dist_checkpointing.save` and `load`; live memory."""
        return sharded_state_dict(self, self.parallel, prefix=prefix)

    def num_parameters(self) -> int:
        """True parameters of the part of the model that all tensor ranks of this stage hold together."""
        return sum(layout_of(p).numel for p in self.parameters())
