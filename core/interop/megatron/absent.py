"""Modules of Megatron's that are not here: importing one says what there is instead."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_HERE = "core.interop.megatron."
_EXPERTS = (
    "num_moe_experts of TransformerConfig and core.models.gpt.moe_spec (docs/concepts/experts.md)"
)
# the first that fits: a module of theirs, or one inside it -> what to do
_INSTEAD = {
    "optimizer": "ShardedAdamW(shard, OptimizerConfig(...)) of core.optimizer, or torch.optim's",
    "optimizer_param_scheduler": "OptimizerConfig.lr_schedule of core.optimizer, or torch's schedulers",
    "num_microbatches_calculator": "num_microbatches of core.pipeline.Pipeline; a run solves the batch by itself",
    "timers": "torch.profiler; a run's metrics.jsonl has times",
    "training": "python -m core.pretrain, whose answer to Megatron's arguments names ours",
    "inference": "core.training.generate",
    "export": "python -m core.models.huggingface export",
    "transformer.moe": _EXPERTS,
    "models.gpt.moe_module_specs": _EXPERTS,
    "models.huggingface": "core.models.huggingface",
    "extensions": "torch's own kernels; Transformer Engine's are not here",
    "fusions": "torch's own operations",
    "packed_seq_params": "core.datasets.Packing",
    "jit": "torch.compile",
}


def _instead(module: str) -> str:
    """What to use in the place of a module, its name counted from `megatron.core`."""
    for megatron_module, ours in _INSTEAD.items():
        if module == megatron_module or module.startswith(f"{megatron_module}."):
            return f"use {ours}; "
    return ""


class AbsentModules(MetaPathFinder):
    """Stands last among the importers: asked only for modules that nobody has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for everybody else's modules. Raises ImportError: a module of `megatron.core` that is not here."""
        if not fullname.startswith(_HERE):
            return None
        module = fullname.removeprefix(_HERE)
        raise ImportError(
            f"megatron.core.{module} is not here: {_instead(module)}docs/from_megatron.md has all names",
            name=fullname,
        )


def tell_of_absent_modules() -> None:
    """Put an `AbsentModules` behind Python's own importers, once."""
    if not any(isinstance(importer, AbsentModules) for importer in sys.meta_path):
        sys.meta_path.append(AbsentModules())
