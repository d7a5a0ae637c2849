"""`get_megatron_optimizer`: parameters by their options, gradients and states in a `DataParallel`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from core.data_parallel import DataParallel
from core.interop.megatron.distributed import DistributedDataParallel
from core.interop.megatron.optimizer.optimizer import MegatronOptimizer
from core.interop.megatron.optimizer.optimizer_config import OptimizerConfig, ParamKey
from core.optimizer import OptimizerConfig as UpdateConfig
from core.optimizer.adamw import ShardedAdamW
from core.optimizer.sgd import ShardedSGD
from core.parallel_state import layout_of
from core.parallel_state.collectives import all_gather_objects

Overrides = Mapping[ParamKey, Mapping[str, Any]]
# what a group may have of its own
_OVERRIDES = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult")


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, dict[str, Any]]:
    """Biases and parameters of one dimension do not decay; with apply_wd_to_qk_layernorm those of q and k do."""

    def spared(parameter: Tensor, name: str) -> bool:
        if config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
            return False
        # of the full parameter: experts' are stacked
        return len(layout_of(parameter).shape) == 1 or name.endswith(".bias")

    return {ParamKey(with_name_predicate=spared): {"wd_mult": 0.0}}


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module] | nn.Module,
    config_overrides: Overrides | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    **more: Any,
) -> MegatronOptimizer:
    """An optimizer over wrapped chunks, all of this rank. Collective. From now on their gradients lie in a
    `DataParallel`: `get_forward_backward_func()`, `finalize_model_grads` and `zero_grad_buffer` know it.

    config_overrides: by default `get_standard_config_overrides(config)`; {} decays everything. wd_mult counts from
    the first step, Megatron's from its scheduler on.
    Raises ValueError, before anything is changed: chunks that are not wrapped, or have an optimizer already; a
    wrapper whose use_distributed_optimizer is another; no lr; an override that no group has.
    """
    given = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    chunks, rate = _checked(config, given, more)
    if dump_param_to_param_group_map is not None:
        raise ValueError(
            f"dump_param_to_param_group_map={dump_param_to_param_group_map!r} is not here; param_groups "
            f"have the parameters of {len(chunks)} chunks"
        )
    if config_overrides is None:
        config_overrides = get_standard_config_overrides(config)
    members = _by_overrides(chunks, config_overrides)
    update = UpdateConfig(
        optimizer="adamw" if config.optimizer == "adam" else "sgd",
        lr=rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        momentum=config.sgd_momentum if config.optimizer == "sgd" else None,
        clip_grad=config.clip_grad,
    )

    ps = chunks[0].parallel
    modules = [chunk.module for chunk in chunks]
    zero_stage = 1 if config.use_distributed_optimizer else 0
    shard = DataParallel(modules if modules[1:] else modules[0], ps, zero_stage=zero_stage)
    for chunk in chunks:
        chunk.take_shard(shard)
    # as many groups in one order on every rank, those without overrides first
    keys = {key for keys in all_gather_objects(list(members), ps.world) for key in keys}
    ordered = sorted(keys | {()})
    groups: list[dict[str, Any]] = []
    for key in ordered:
        decay = config.weight_decay * dict(key).get("wd_mult", 1.0)
        which = {"params": members.get(key, []), "may_be_empty": True} if key else {"rest": True}
        groups.append({**which, "weight_decay": decay})
    kind = ShardedAdamW if config.optimizer == "adam" else ShardedSGD
    optimizer = kind(shard, update, groups=groups)
    for key, group in zip(ordered, optimizer.param_groups, strict=True):
        group.update(_facts_of_group(dict(key), rate, config.min_lr))
    return MegatronOptimizer(optimizer, config)


def _facts_of_group(own: dict[str, Any], rate: float, least: float | None) -> dict[str, Any]:
    """What Megatron's groups say beside torch's options, and schedulers read."""
    is_default = not any("lr" in name for name in own)
    facts = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": rate}
    return facts | {"min_lr": least, "default_config": is_default} | own


def _checked(
    config: OptimizerConfig, given: Sequence[nn.Module], more: Mapping[str, Any]
) -> tuple[list[DistributedDataParallel], float]:
    """The chunks, and the largest rate. See `get_megatron_optimizer`."""
    config.check()
    if more:
        raise ValueError(
            f"get_megatron_optimizer has no {', '.join(more)} ({len(more)} given): since Megatron-Core 0.16 "
            "config_overrides={ParamKey(name='*.bias'): {'wd_mult': 0.0}} says it; max_lr and min_lr of a group are "
            "its rates"
        )
    if config.lr is None:
        raise ValueError("OptimizerConfig: lr=None; give the largest rate, which is above 0")
    chunks: list[DistributedDataParallel] = []
    for chunk in given:
        if not isinstance(chunk, DistributedDataParallel):
            raise ValueError(
                f"get_megatron_optimizer: 1 of {len(given)} chunks is a {type(chunk).__name__}; wrap it in "
                "DistributedDataParallel(config, ddp_config, module)"
            )
        if chunk.shard is not None:
            raise ValueError(
                f"get_megatron_optimizer: 1 of {len(given)} chunks has an optimizer already; use that, or "
                "chunk.shard.remove(), and wrap chunk.module anew"
            )
        divided = chunk.ddp_config.use_distributed_optimizer
        if divided != config.use_distributed_optimizer:
            raise ValueError(
                f"OptimizerConfig(use_distributed_optimizer={config.use_distributed_optimizer}), the wrapper's "
                f"DistributedDataParallelConfig has {divided}; say the same in both"
            )
        chunks.append(chunk)
    return chunks, config.lr


def _by_overrides(
    chunks: Sequence[DistributedDataParallel], overrides: Overrides
) -> dict[tuple, list[Tensor]]:
    """What parameters have of their own, as sorted pairs -> these parameters."""
    for options in overrides.values():
        if unknown := [name for name in options if name not in _OVERRIDES]:
            raise ValueError(
                f"config_overrides has {', '.join(unknown)}; known are the {len(_OVERRIDES)}: {', '.join(_OVERRIDES)}"
            )
    members: dict[tuple, list[Tensor]] = {}
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            own: dict[str, Any] = {}
            for key, options in overrides.items():
                if not (parameter.requires_grad and key.matches(parameter, name)):
                    continue
                for option, value in options.items():
                    if own.setdefault(option, value) != value:
                        raise ValueError(
                            f"config_overrides give {name} 2 values of {option}: {own[option]} and {value}; let 1 "
                            "key match it"
                        )
            if own:
                members.setdefault(tuple(sorted(own.items())), []).append(parameter)
    return members
