"""Puts low-rank adapters beside the linears of a GPTModel's layers, and folds them into the weights again."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from core.autograd import has_main_grad
from core.models.gpt.gpt_model import GPTModel
from core.models.lora.config import LoraConfig
from core.parallel_state import layout_of
from core.parallel_state.collectives import all_gather_objects
from core.parallel_state.initial import fill
from core.parallel_state.modules import Modules, modules_of, named_parameters
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.tensor_parallel.low_rank import LowRank
from core.transformer.dropout import Dropout
from core.transformer.spec import Build

# names of linears of ours -> what Hugging Face's models call them, or parts of them
_THEIRS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"),
    "linear_proj": ("o_proj", "out_proj", "dense"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "c_fc"),
    "linear_fc2": ("down_proj",),
}

Linear = ColumnParallelLinear | RowParallelLinear
# in the name of every parameter of an adapter, and of no other
ADAPTER = ".adapter.lora_"


def _warn(line: str) -> None:
    warnings.warn(f"LoRA: {line}", stacklevel=4)


def apply_lora(model: Modules, config: LoraConfig, *, say: Callable[[str], None] = _warn) -> None:
    """Freeze a GPTModel, or this rank's pipeline stages, and put an adapter beside each linear that `config` names.

    Before `DataParallel`. The initial values follow from the model's seed and are the same on every layout; the
    model computes what it did before, since B is zero. All-gather of names over the pipeline ranks.
    Raises ValueError, on every rank and before anything has changed: no GPTModel, one that has adapters or belongs to
    a DataParallel, names of no linear (with those that exist), a rank above a matrix's sizes. Where modules are left
    out and the model has experts, which get none, `say` is told on the first rank; default: a warning.
    """
    stages = [_checked(stage) for stage in modules_of(model).values()]
    scale = config.scale
    linears_by_stage = [list(_linears(stage)) for stage in stages]
    names = _checked_names(config, list(chain.from_iterable(linears_by_stage)), stages)
    if not config.modules:
        config = replace(config, modules=names)
        _tell_of_experts(names, stages[0], say)
    assert config.rank is not None
    for stage, linears in zip(stages, linears_by_stage, strict=True):
        stage.requires_grad_(False)
        for name, linear in linears:
            if _is_named(name, config.modules):
                _adapt(stage, name, linear, config.rank, scale, config.dropout)
        stage.lora = config
        stage.draws = stage.draws or config.dropout > 0


def adapter_numel(stage: GPTModel, config: LoraConfig) -> int:
    """Parameters of the adapters that `apply_lora` would put in, on this rank; names of no linear count nothing."""
    weights = [w.weight for name, w in _linears(stage) if _is_named(name, config.modules)]
    return sum((config.rank or 0) * (w.numel() // w.shape[-1] + w.shape[-1]) for w in weights)


def merge_lora(model: Modules) -> None:
    """Fold every adapter into its matrix, W + scale B A, and take it away: an ordinary model; no collective.

    Its parameters stay frozen until `requires_grad_`. The optimizer that trained the adapters is done with.
    Raises ValueError: no adapters.
    """
    stages = [_gpt(stage) for stage in modules_of(model).values()]
    if any(stage.lora is None for stage in stages):
        raise ValueError("merge_lora: the model has 0 adapters; apply_lora puts them in")
    for stage in stages:
        for _, linear in _linears(stage):
            if linear.adapter is not None:
                with torch.no_grad():
                    linear.weight.copy_(linear.adapter.folded(linear.weight))
                linear.adapter = None
        stage.lora = None


def lora_state_dict(state: Mapping[str, Any], model: Modules) -> dict[str, Any]:
    """A model's `sharded_state_dict` without what is frozen: all that training changes, for `dist_checkpointing`.

    What is trained beside adapters, and buffers, stay in it. Raises ValueError: there are no adapters in it.
    """
    frozen = {name for name, p in named_parameters(model) if not p.requires_grad}
    trained = {name: tensor for name, tensor in state.items() if name not in frozen}
    if not any(ADAPTER in name for name in trained):
        raise ValueError(f"lora_state_dict: none of {len(state)} names is of an adapter")
    return trained


def _gpt(stage: nn.Module) -> GPTModel:
    if not isinstance(stage, GPTModel):
        raise ValueError(
            f"LoRA: the model is a {type(stage).__name__}, a GPTModel is needed; beside a linear of your own put a "
            "core.tensor_parallel.low_rank.LowRank"
        )
    return stage


def _checked(stage: nn.Module) -> GPTModel:
    model = _gpt(stage)
    if model.lora is not None:
        raise ValueError(
            f"apply_lora: the model has adapters of rank {model.lora.rank} already; merge_lora folds them in"
        )
    if owned := sum(has_main_grad(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"apply_lora: {owned} parameters belong to a DataParallel, which would not know the adapters; call it "
            "before DataParallel"
        )
    return model


def _linears(stage: GPTModel) -> Iterator[tuple[str, Linear]]:
    """(global name, linear) of every split linear of the layers."""
    for name, module in stage.decoder.named_modules(prefix="decoder"):
        if isinstance(module, Linear):
            yield name, module


def _path(name: str) -> str:
    """Where a linear lies in its layer: decoder.layers.7.mlp.linear_fc1 -> mlp.linear_fc1."""
    return name.split(".", 3)[3]


def _is_named(name: str, modules: Sequence[str]) -> bool:
    """Whether a linear is one of `modules`; empty: all are."""
    path = _path(name)
    return not modules or any(path == module or path.endswith(f".{module}") for module in modules)


def _checked_names(
    config: LoraConfig, linears: Sequence[tuple[str, Linear]], stages: Sequence[GPTModel]
) -> tuple[str, ...]:
    """Names of the linears of the whole model, as "linear_fc1".

    Raises ValueError, on all pipeline ranks alike, for what does not fit them.
    """
    sizes = {}
    for name, linear in linears:
        layout = layout_of(linear.weight)
        sizes[name] = (layout.numel // layout.shape[-1], layout.shape[-1])
    ps = stages[0].parallel
    whole: dict[str, tuple[int, int]] = {}
    for stage_sizes in all_gather_objects(sizes, ps.group("pp")):
        whole |= stage_sizes
    existing = sorted({_path(name) for name in whole})
    problems = []
    unknown = [
        module for module in config.modules if not any(_is_named(name, (module,)) for name in whole)
    ]
    if unknown:
        said = "".join(
            f"; {module!r} is no linear of this model{_theirs(module)}" for module in unknown
        )
        problems.append(f"modules: {said.removeprefix('; ')}; there are {', '.join(existing)}")
    assert config.rank is not None
    too_small = {
        _path(name): size
        for name, size in whole.items()
        if _is_named(name, config.modules) and min(size) < config.rank
    }
    problems += [
        f"rank={config.rank} is above the matrix of {path}, {list(size)}; use at most {min(size)}"
        for path, size in too_small.items()
    ]
    if problems:
        raise ValueError("apply_lora: " + "; ".join(problems))
    return tuple(sorted({path.rpartition(".")[2] for path in existing}))


def _tell_of_experts(names: Sequence[str], stage: GPTModel, say: Callable[[str], None]) -> None:
    """That adapters of all linears are not of all matrices of the layers."""
    if stage.config.num_moe_experts is not None and stage.parallel.rank == 0:
        say(
            f"the experts take no adapters and stay frozen; adapters are beside {', '.join(names)}; name these as "
            "modules (lora.modules in a run) to say so"
        )


def _adapt(
    stage: GPTModel, name: str, linear: Linear, rank: int, scale: float, dropout: float
) -> None:
    """Put an adapter beside one linear, with its first values; on meta they are left to who fills the others."""
    layer, path = int(name.split(".")[2]), _path(name)
    place = replace(
        stage.place, dtype=linear.weight.dtype, device=linear.weight.device, filled_by_model=True
    )
    drop = None
    if dropout > 0:
        build = Build(stage.config, stage.parallel, stage.stage, stage.seed, layer)
        # a row-parallel linear's ranks have other columns, sequence shards other tokens
        sharded = isinstance(linear, RowParallelLinear) or place.splits_sequence
        drop = Dropout(build, dropout, f"lora {path}", sharded=sharded)
    adapter = LowRank(layout_of(linear.weight), rank, place=place, scale=scale, dropout=drop)
    for factor, parameter in adapter.named_parameters():
        if not parameter.is_meta:
            ps = stage.parallel
            fill(
                parameter,
                f"{name}.adapter.{factor}",
                parameter.initial,  # type: ignore[attr-defined]
                seed=stage.seed,
                coordinate=ps.coordinate,
                sizes=ps.sizes,
                draw_on_cpu=stage.draws_on_cpu,
            )
    adapter.train(linear.training)
    linear.adapter = adapter


def _theirs(module: str) -> str:
    """What a name of Hugging Face's linears is here; empty: it is none."""
    if module == "all-linear":
        return "; leave lora.modules out for all of them"
    ours = next((name for name, theirs in _THEIRS.items() if module in theirs), None)
    return "" if ours is None else f"; their {module} lies in {ours}, which is named instead"
