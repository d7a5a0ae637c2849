"""What is said about a name that no field has: the nearest one, or ours for a name from elsewhere."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from core.training.config.fields import Field

# names of Megatron-LM's arguments and of Hugging Face's TrainingArguments that are not ours too
ELSEWHERE = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "num_layers_per_virtual_pipeline_stage": "pipeline.chunks",
    "num_virtual_stages_per_pipeline_rank": "pipeline.chunks",
    "use_distributed_optimizer": "data_parallel.zero_stage",
    "data_parallel_sharding_strategy": "data_parallel.zero_stage",
    "overlap_grad_reduce": "data_parallel.overlap",
    "ddp_bucket_size": "data_parallel.bucket_size",
    "group_query_attention": "model.num_query_groups",
    "swiglu": "model.style",
    "disable_bias_linear": "model.add_bias_linear",
    "norm_epsilon": "model.layernorm_epsilon",
    "use_rotary_position_embeddings": "model.position_embedding_type",
    "window_size": "model.windows",
    "untie_embeddings_and_output_weights": "model.tie_embeddings",
    "seq_length": "data.sequence_length",
    "data_path": "data.train",
    "train_data_path": "data.train",
    "valid_data_path": "data.valid",
    "tokenizer_model": "data.tokenizer",
    "train_iters": "training.train_steps",
    "eval_iters": "training.eval_batches",
    "recompute_granularity": "training.recompute",
    "tensorboard_dir": "training.tensorboard",
    "lr_decay_style": "optimizer.lr_schedule",
    "lr_decay_iters": "optimizer.lr_decay_steps",
    "lr_warmup_iters": "optimizer.lr_warmup_steps",
    "warmup_ratio": "optimizer.lr_warmup_fraction",
    "lr_wsd_decay_iters": "optimizer.lr_wsd_decay_steps",
    "save": "checkpoint.directory",
    "save_interval": "checkpoint.every",
    "async_save": "checkpoint.asynchronous",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_query_groups",
    "intermediate_size": "model.ffn_hidden_size",
    "head_dim": "model.kv_channels",
    "hidden_act": "model.activation_func",
    "rms_norm_eps": "model.layernorm_epsilon",
    "layer_norm_eps": "model.layernorm_epsilon",
    "initializer_range": "model.init_method_std",
    "rope_theta": "model.rotary_base",
    "rope_scaling": "model.rotary_scaling",
    "sliding_window": "model.windows",
    "tie_word_embeddings": "model.tie_embeddings",
    "model_name_or_path": "model.huggingface",
    "finetune": "checkpoint.weights",
    "pretrained_checkpoint": "checkpoint.weights",
    "lr_mult": "optimizer.lr_multipliers",
    "learning_rate": "optimizer.lr",
    "warmup_steps": "optimizer.lr_warmup_steps",
    "lr_scheduler_type": "optimizer.lr_schedule",
    "max_grad_norm": "optimizer.clip_grad",
    "adam_epsilon": "optimizer.adam_eps",
    "optim": "optimizer.optimizer",
    "max_steps": "training.train_steps",
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_checkpointing": "training.recompute",
    "logging_steps": "training.log_interval",
    "eval_steps": "training.eval_interval",
    "output_dir": "training.output",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.load",
    "data_seed": "data.seed",
}


# words of `ParallelConfig` and of the layers' rules -> the field of a run that says the same
_IN_A_RUN = (
    (r"^(ParallelConfig|DataConfig|model): ", ""),
    (r"\btensor_model_parallel_size\b", "parallel.tensor"),
    (r"(?<![\w.])(tensor|pipeline|context|data|expert|replicate)(?=[=(]\d)", r"parallel.\1"),
    (r"(?<![\w.])(num_attention_heads|num_query_groups|ffn_hidden_size|hidden_size|num_layers)(?==)", r"model.\1"),
    (r"(?<![\w.])(global_batch_size|micro_batch_size|recompute)(?==)", r"training.\1"),
    (r"(?<![\w.])(sequence_length)(?==)", r"data.\1"),
    (r"(?<![\w.])(schedule)(?==)", r"pipeline.\1"),
    (r"(?<![\w.])(zero_stage|offload|offload_fraction|grad_dtype|reduce_dtype)(?==)", r"data_parallel.\1"),
)


def in_the_runs_names(text: str) -> str:
    """A rule's message with the names that the user writes: parallel.tensor=3 for tensor_model_parallel_size=3."""
    for pattern, name in _IN_A_RUN:
        text = re.sub(pattern, name, text)
    return text


def unknown(name: str, fields_by_name: Mapping[str, Field]) -> str:
    """What is said about a name that no field has: the nearest one that there is."""
    sections = sorted({field.section for field in fields_by_name.values()} - {""})
    if name in sections:
        return (
            f"{name} is a part of a run, with fields of its own; give {name}.{_first(name, fields_by_name)} or others"
        )
    key = name.rpartition(".")[2]
    same_key = [field.name for field in fields_by_name.values() if field.key == key]
    same_key = [ELSEWHERE[key]] if key in ELSEWHERE else same_key
    nearest = same_key or get_close_matches(name, fields_by_name, n=1) or _by_key(key, fields_by_name)
    remedy = f"did you mean {' or '.join(nearest)}?" if nearest else f"the parts are {', '.join(sections)}"
    return f"unknown {name or repr(name)}; {remedy}"


def _first(section: str, fields_by_name: Mapping[str, Field]) -> str:
    return next(field.key for field in fields_by_name.values() if field.section == section)


def _by_key(key: str, fields_by_name: Mapping[str, Field]) -> list[str]:
    nearest = get_close_matches(key, [field.key for field in fields_by_name.values()], n=1)
    return [field.name for field in fields_by_name.values() if field.key in nearest]
