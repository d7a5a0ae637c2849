"""What users of DDP try first with a `DataParallel`, which stands beside its module and not for it."""

from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from core.field_names import AnswersArguments

# of nn.Module, and not ours: load_state_dict, train, to ...
_OF_MODULES = frozenset(name for name in dir(nn.Module) if not name.startswith("_"))


_ZERO = (
    "give zero_stage=3 (2 keeps whole weights, 1 divides the optimizer's states alone, 0 nothing)"
)
_IN_BUCKETS = "leave it out: gradients lie in buckets anyway"
# of torch's DistributedDataParallel and FSDP -> what there is
_THEIRS = {
    "find_unused_parameters": "leave it out: a parameter may go without a gradient (shard.unused() names them)",
    "gradient_as_bucket_view": _IN_BUCKETS,
    "static_graph": _IN_BUCKETS,
    "bucket_cap_mb": "give bucket_size, in elements",
    "reshard_after_forward": _ZERO,
    "sharding_strategy": _ZERO,
    "mp_policy": "weights of torch.bfloat16 are that; give grad_dtype, reduce_dtype for gradients",
    "mixed_precision": "weights of torch.bfloat16 are that; give grad_dtype, reduce_dtype for gradients",
    "offload_policy": "give ShardedAdamW(shard, config, offload=Offload(kind='cpu'))",
    "cpu_offload": "give ShardedAdamW(shard, config, offload=Offload(kind='cpu'))",
    "auto_wrap_policy": "give shard_units, 'layer' by default",
    "replicate": "give initialize_model_parallel(replicate=N), the copies of what zero_stage divides",
    "device_ids": "leave it out: a rank has one device, ps.device",
    "process_group": "leave it out: ps has the groups",
    "device_mesh": "leave it out: ps has the groups",
    "mesh": "leave it out: ps has the groups",
}
# methods and attributes of theirs -> what there is
_THEIR_NAMES = {
    "register_comm_hook": "give reduce_dtype=torch.bfloat16, as bf16_compress_hook; other hooks are not here",
    "join": "give every rank as many batches, those of the rank that has fewest",
    "clip_grad_norm_": "call core.optimizer.clip_grad_norm_(module, max_norm)",
    "summon_full_params": "module.state_dict() gives whole weights",
    "full_optim_state_dict": "dist_checkpointing.save writes its optimizer's, whole under any layout",
    "optim_state_dict": "dist_checkpointing.save writes its optimizer's, whole under any layout",
    "set_requires_gradient_sync": "use no_sync()",
}


class BesideModule(AnswersArguments):
    """Says what to call instead."""

    _their_arguments = _THEIRS

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # first: what is said of an argument of theirs
        made = super().__new__(cls, *args, **kwargs)
        ps = kwargs.get("ps", args[1] if len(args) > 1 else None)
        # nothing at all: a copy
        if (args or kwargs) and len(args) < 2 and "ps" not in kwargs:
            raise TypeError(
                f"{cls.__name__}(module, ps): ps is what parallel_state.initialize_model_parallel(...) returns, for "
                "one process ParallelState.single()"
            )
        if ps is not None and not hasattr(ps, "coordinate"):
            raise TypeError(
                f"{cls.__name__}(module, ps): ps is what parallel_state.initialize_model_parallel(...) returns, not "
                f"a {type(ps).__name__}; its own mesh is ps.mesh"
            )
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} stands beside its module and is not called: call the module itself, whose "
            "backward it listens to"
        )

    # a type checker is to see which names there are
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _THEIR_NAMES:
                text += f": {_THEIR_NAMES[name]}"
            elif name in _OF_MODULES:
                text += f": it stands beside its module; use the module's own {name}"
            raise AttributeError(text)
