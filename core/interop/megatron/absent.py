"""Modules and names of Megatron's that are not here: importing one says what there is instead."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_HERE = "core.interop.megatron."
_PAGE = "docs/from_megatron.md has a table of names"
_EXPERTS = (
    "num_moe_experts of TransformerConfig and core.models.gpt.moe_spec (docs/concepts/experts.md)"
)
_LAYER = "core.transformer.layer.TransformerLayer and core.transformer.spec.TransformerLayerSpec"
_NORM = "core.transformer.norm.build_norm"
_BLOCK = "gpt2_spec() or llama_spec() of core.models.gpt: every layer is built from one spec"
_ONE_KIND = "get_gpt_layer_local_spec(): there is one implementation, torch's"
_NO_BUFFER = "leave it out: there is no global buffer"
_CHUNK = "leave it out: the stages that initialize_model_parallel and the schedule lay out know their chunk"
_RANKS = "leave it out: layouts say which ranks hold an embedding"
_PROFILER = "torch.profiler"
_STEP = "get_forward_backward_func(), which gives the one that fits"
_SHARDED = (
    "set_layout(parameter, Layout(shape, split)) of core.parallel_state; sharded_state_dict derives "
    "the rest"
)
# the first that fits: a module of theirs, or one inside it -> what to do
_INSTEAD = {
    "training": "python -m core.pretrain, whose answer to Megatron's arguments names ours",
    "inference": "core.training.generate",
    "export": "python -m core.models.huggingface export",
    "transformer.attention": "core.transformer.attention.self_attention.SelfAttention; its parts are callables of "
    "TransformerLayerSpec",
    "transformer.dot_product_attention": "core.transformer.attention.self_attention.CoreAttention",
    "transformer.mlp": "core.transformer.mlp.MLP, dataclasses.replace(spec, mlp=...)",
    "transformer.transformer_layer": _LAYER,
    "transformer.transformer_block": _BLOCK,
    "transformer.torch_norm": _NORM,
    "transformer.utils": _SHARDED,
    "transformer.moe": _EXPERTS,
    "models.gpt.moe_module_specs": _EXPERTS,
    "models.huggingface": "core.models.huggingface",
    "model_parallel_config": "TransformerConfig for its fields, initialize_model_parallel for the sizes",
    "tokenizers.utils": "core.datasets.load_tokenizer",
    "hyper_comm_grid": "ParallelState.mesh and ParallelState.mesh_for(*axes) of core.parallel_state",
    "resharding": "core.dist_checkpointing.load: a checkpoint opens under any layout",
    "typed_torch": "leave it out: plain annotations",
    "extensions": "torch's own kernels; Transformer Engine's are not here",
    "fusions.fused_layer_norm": _NORM,
    "fusions.fused_bias_dropout": "core.transformer.dropout.residual_dropout",
    "fusions": "torch's own operations",
    "packed_seq_params": "core.datasets.Packing",
    "jit": "torch.compile",
    "models.common": "GPTModel's parts of core.models.gpt, or core.transformer.spec.TransformerLayerSpec",
    "optimizer.muon": "build_optimizer(shard, OptimizerConfig(optimizer='muon')) of core.optimizer",
    "optimizer.distrib_optimizer": "OptimizerConfig(use_distributed_optimizer=True) of "
    "core.interop.megatron.optimizer",
    "optimizer.cpu_offloading": "offload=Offload(...) of core.optimizer.build_optimizer",
    "tensor_parallel.cross_entropy": "vocab_parallel_cross_entropy of tensor_parallel",
    "pipeline_parallel.p2p_communication": "leave it out: get_forward_backward_func() sends activations",
    "optimizer.clip_grads": "clip_grad_norm_ and get_grad_norm of core.optimizer",
    "fp8_utils": "fp8 and fp8_recipe of TransformerConfig",
    "rerun_state_machine": "leave it out: no step is run again",
}
_OTHER_MODELS = (
    *("datasets.bert_dataset", "datasets.t5_dataset", "models.bert", "models.T5", "models.mamba"),
    *("models.hybrid", "models.multimodal", "models.mimo", "models.vision", "ssm"),
)
_INSTEAD |= dict.fromkeys(_OTHER_MODELS, "only decoders of text are (GPTModel)")
# names of modules that are here: module, name -> what to do
_NAMES = {
    ("models.gpt.gpt_layer_specs", "get_gpt_layer_with_transformer_engine_spec"): _ONE_KIND,
    ("models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec"): _BLOCK,
    (
        "models.gpt.gpt_layer_specs",
        "get_gpt_mtp_block_spec",
    ): "leave it out: a model here predicts the next token only",
    (
        "datasets.gpt_dataset",
        "MockGPTLowLevelDataset",
    ): "MockGPTDataset, which makes its own tokens",
    ("parallel_state", "get_model_parallel_group"): "get_megatron_optimizer, which clips over "
    "tensor and pipeline ranks; or clip_grad_norm_ of core.optimizer",
    (
        "utils",
        "get_attr_wrapped_model",
    ): "getattr(model, name): the wrapper gives the module's attributes",
    (
        "optimizer",
        "get_megatron_muon_optimizer",
    ): "build_optimizer(shard, OptimizerConfig(optimizer='muon')) of core.optimizer",
    (
        "optimizer",
        "DistributedOptimizer",
    ): "get_megatron_optimizer(OptimizerConfig(use_distributed_optimizer=True), ...)",
    ("transformer.module", "Float16Module"): "params_dtype of the configuration",
    ("parallel_state", "get_position_embedding_group"): _RANKS,
    ("parallel_state", "default_embedding_ranks"): _RANKS,
    ("parallel_state", "default_position_embedding_ranks"): _RANKS,
    ("parallel_state", "set_virtual_pipeline_model_parallel_rank"): _CHUNK,
    ("parallel_state", "set_virtual_pipeline_model_parallel_world_size"): _CHUNK,
    ("parallel_state", "get_virtual_pipeline_model_parallel_world_size"): _CHUNK,
    ("parallel_state", "get_global_memory_buffer"): _NO_BUFFER,
    ("parallel_state", "destroy_global_memory_buffer"): _NO_BUFFER,
    ("parallel_state", "_set_global_memory_buffer"): _NO_BUFFER,
    ("parallel_state", "get_virtual_pipeline_model_parallel_rank"): _CHUNK,
    (
        "parallel_state",
        "get_tensor_and_context_parallel_group",
    ): "get_context_parallel_group(), then get_tensor_model_parallel_group(): two sums are the same",
    (
        "parallel_state",
        "get_tensor_and_data_parallel_group",
    ): "get_data_parallel_group(), then get_tensor_model_parallel_group(): two sums are the same",
    (
        "parallel_state",
        "get_context_parallel_global_ranks",
    ): "current_state().group('cp').ranks of core.parallel_state (the group is None over 1 rank)",
    (
        "parallel_state",
        "get_amax_reduction_group",
    ): "leave it out: FP8's scales are of the present largest value",
    ("utils", "is_te_min_version"): "leave it out: Transformer Engine is not used",
    ("utils", "get_te_version"): "leave it out: Transformer Engine is not used",
    (
        "utils",
        "StragglerDetector",
    ): "timings of each rank in metrics.jsonl of a run; or torch.profiler",
    (
        "parallel_state",
        "is_rank_in_embedding_group",
    ): "is_pipeline_first_stage() or is_pipeline_last_stage()",
    (
        "utils",
        "is_last_rank",
    ): "torch.distributed.get_rank() == torch.distributed.get_world_size() - 1",
    ("utils", "init_method_normal"): "init_method_std of TransformerConfig",
    (
        "utils",
        "check_param_hashes_across_dp_replicas",
    ): "check_replicas() of core.data_parallel.DataParallel, data_parallel.check_replicas_every of a run",
    ("pipeline_parallel.schedules", "forward_backward_no_pipelining"): _STEP,
    ("pipeline_parallel.schedules", "forward_backward_pipelining_with_interleaving"): _STEP,
    ("pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving"): _STEP,
    ("tensor_parallel", "cross_entropy"): "vocab_parallel_cross_entropy of tensor_parallel",
    ("dist_checkpointing.mapping", "ShardedTensorFactory"): _SHARDED,
    ("dist_checkpointing", "check_is_distributed_checkpoint"): "load, which says what a folder is",
    ("utils", "configure_nvtx_profiling"): _PROFILER,
    ("utils", "nvtx_range_push"): _PROFILER,
    ("utils", "nvtx_range_pop"): _PROFILER,
    (
        "process_groups_config",
        "MultiModuleProcessGroupCollection",
    ): "ProcessGroupCollection: a model is one module",
}


def _not_here(name: str, instead: str | None) -> ImportError:
    if instead is None:
        remedy = ""
    elif instead.startswith(("leave it out", "only ")):
        remedy = f"{instead}; "
    else:
        remedy = f"use {instead}; "
    return ImportError(f"megatron.core.{name} is not here: {remedy}{_PAGE}", name=_HERE + name)


def _instead(module: str) -> str | None:
    """What to use in the place of a module, its name counted from `megatron.core`."""
    for megatron_module, ours in _INSTEAD.items():
        if module == megatron_module or module.startswith(f"{megatron_module}."):
            return ours
    return None


def absent_names(module: str) -> Callable[[str], NoReturn]:
    """`__getattr__` of a module that is here: ImportError for the names of `_NAMES`, AttributeError for others."""
    theirs = module.removeprefix(_HERE)

    def missing(name: str) -> NoReturn:
        if instead := _NAMES.get((theirs, name)):
            raise _not_here(f"{theirs}.{name}", instead)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


class AbsentModules(MetaPathFinder):
    """Stands last among the importers: asked only for modules that nobody has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for everybody else's modules. Raises ImportError: a module of `megatron.core` that is not here."""
        if not fullname.startswith(_HERE):
            return None
        module = fullname.removeprefix(_HERE)
        raise _not_here(module, _instead(module))


def tell_of_absent_modules() -> None:
    """Put an `AbsentModules` behind Python's own importers, once."""
    if not any(isinstance(importer, AbsentModules) for importer in sys.meta_path):
        sys.meta_path.append(AbsentModules())
