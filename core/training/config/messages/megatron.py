"""What Megatron-LM's arguments are here, where no field of one name and one meaning stands for them.

Read for names without a part: `--load`, not `--checkpoint.load`.
"""

from collections.abc import Sequence

_SCALE = "float16's loss scale is halved at each overflow, doubled after optimizer.loss_scale_window good updates"
_STATES = "not here: moments are float32; optimizer.main_params=false drops the float32 weights"
_IN_UPDATES = "a run is measured in updates; give"
_SHARD = (
    "give data_parallel.zero_stage: 0 no_shard, 1 optim, 2 optim_grads, 3 optim_grads_params (FSDP)"
)
_YARN = "give model.rotary_scaling kind yarn factor 40 ... (a table)"
_TEXTS = "give data.train and data.valid: prefixes, or weight prefix weight prefix ..."

# of a script with its sizes, but whose other facts are Megatron's defaults
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
OTHER_DEFAULTS = (
    "What a script of Megatron's leaves out is otherwise here. Its defaults: --model.style gpt2 "
    "--model.ffn-hidden-size (4 x hidden_size) --model.dropout 0.1 --optimizer.lr-schedule linear "
    "--optimizer.lr-warmup-fraction 0 --optimizer.weight-decay 0.01 (docs/from_megatron.md, Other defaults)"
)


def is_script(mistakes: Sequence[str]) -> bool:
    """Whether these mistakes are the arguments of a script of Megatron's."""
    return all(any(line.startswith(f"unknown {size};") for line in mistakes) for size in _SIZES)


# name -> what to do instead
_ANSWERS = {
    # where a run is saved, and where it begins
    "load": "give checkpoint.directory, as for save: a run goes on from its newest step there, and begins where "
    "there is none; checkpoint.load goes on from one checkpoint of another run, checkpoint.weights begins with one",
    "ckpt_step": "give checkpoint.load, the step's own directory: DIR/step-00001000",
    "save_retain_interval": "give checkpoint.keep_every, in steps",
    "exit_on_missing_checkpoint": "give checkpoint.resume=must",
    "no_load_optim": "give checkpoint.weights in the place of load: weights and nothing else are read",
    "no_load_rng": "give checkpoint.weights in the place of load: weights and nothing else are read",
    "exit_interval": "give training.train_steps, and optimizer.lr_decay_steps where the schedule ends later",
    "exit_duration_in_mins": "not here: end a run by SIGTERM (timeout -s TERM 60m ...); it saves, and goes on by the "
    "same command",
    # the model
    "untie_embeddings_and_output_weights": "give model.tie_embeddings=false",
    "disable_bias_linear": "give model.add_bias_linear=false; model.style=llama, the default, has none",
    "use_rotary_position_embeddings": "give model.position_embedding_type=rope, as the default style llama does",
    "no_position_embedding": "give model.position_embedding_type, rope or none",
    "rotary_seq_len_interpolation_factor": "give model.rotary_scaling kind linear factor 4 (a table)",
    "use_rope_scaling": "give model.rotary_scaling kind llama3 factor 8 ... (a table)",
    "rope_scaling_factor": "give model.rotary_scaling kind llama3 factor 8 ... (a table)",
    "rotary_scaling_factor": _YARN,
    "mscale": _YARN,
    "mscale_all_dim": _YARN,
    "no_rope_freq": "not here as a setting; model.huggingface keeps a folder's layers that do not rotate (SmolLM3)",
    "apply_layernorm_1p": "give model.layernorm_zero_centered_gamma",
    "openai_gelu": "give model.activation_func=gelu_tanh",
    "squared_relu": "give model.activation_func=squared_relu",
    "window_size": "give model.windows: the tokens that a token sees, itself included, so their first number + 1",
    "vocab_file": "give data.tokenizer, a tokenizer.json of Hugging Face's, which holds vocabulary and merges",
    "merge_file": "give data.tokenizer, a tokenizer.json of Hugging Face's, which holds vocabulary and merges",
    "legacy_tokenizer": "leave it out: data.tokenizer is a tokenizer.json of Hugging Face's",
    "tiktoken_pattern": "tiktoken is not here; give data.tokenizer, a tokenizer.json of Hugging Face's",
    "padded_vocab_size": "give model.vocab_size; each layout pads it by itself",
    "add_position_embedding": "give model.position_embedding_type=learned_absolute",
    "quick_geglu": "not here; model.activation_func=gelu_tanh with model.gated_linear_unit is the nearest",
    "window_attn_skip_freq": "give model.windows, a list that repeats over the layers: 4096 4096 None",
    "spec": "give model.build=package.module:function, which makes the model",
    # layouts and memory
    "num_layers_per_virtual_pipeline_stage": "give pipeline.schedule=interleaved-1f1b and pipeline.chunks, stages "
    "per rank: num_layers / parallel.pipeline / their number",
    "use_distributed_optimizer": "leave it out: data_parallel.zero_stage=1 is the default",
    "data_parallel_sharding_strategy": _SHARD,
    "use_torch_fsdp2": "give data_parallel.zero_stage=3",
    "use_custom_fsdp": "give data_parallel.zero_stage=3",
    "use_megatron_fsdp": "give data_parallel.zero_stage=3",
    "ddp_num_buckets": "give data_parallel.bucket_size, in elements",
    "grad_reduce_in_bf16": "give data_parallel.reduce_dtype=bfloat16",
    "recompute_granularity": "give training.recompute: layer for full, selective for selective",
    "recompute_activations": "give training.recompute=selective",
    "hierarchical_context_parallel_sizes": "give parallel.ulysses, the ranks among which heads are exchanged, beside "
    "parallel.context",
    "load_main_params_from_ckpt": "leave it out: a checkpoint's weights are the main ones, float32",
    "no_use_tokenizer_model_from_checkpoint_args": "leave it out: data.tokenizer is taken, or that beside the text",
    "moe_layer_recompute": "give training.recompute=layer; in a program apply_recompute(model, ['mlp'])",
    "moe_use_upcycling": "not here: a program makes the experts' weights of a dense checkpoint's",
    "overlap_moe_expert_parallel_comm": "not here; leave it out",
    "moe_router_group_topk": "give model.moe_router_group_topk, and as model.moe_router_group_score_topk Megatron's "
    "moe_router_topk // moe_router_group_topk (here 2, DeepSeek-V3's)",
    "moe_router_topk_limited_devices": "give model.moe_router_num_groups and model.moe_router_group_topk",
    "recompute_modules": "give training.recompute=selective; in a program apply_recompute(model, ['mlp'])",
    "cpu_offloading_num_layers": "give training.offload_activations, a share of each stage's layers, as 0.5",
    "optimizer_cpu_offload": "give data_parallel.offload=optimizer",
    "optimizer_offload_fraction": "give data_parallel.offload=optimizer and data_parallel.offload_fraction",
    "delay_wgrad_compute": "give pipeline.schedule=zb-v, or another one with weight gradients of their own",
    "microbatch_group_size_per_virtual_pipeline_stage": "not here: pipeline.schedule=auto searches an order",
    "use_tp_pp_dp_mapping": "give parallel.order, axes from the outermost to the innermost",
    # optimizer and rates
    "optimizer": "give optimizer.optimizer: adamw (their adam), sgd, muon, lion or lamb",
    "sgd_momentum": "give optimizer.momentum",
    "start_weight_decay": "weight decay does not change here; give optimizer.weight_decay",
    "end_weight_decay": "weight decay does not change here; give optimizer.weight_decay",
    "weight_decay_incr_style": "weight decay does not change here; leave it out",
    "decoupled_lr": "give optimizer.lr_multipliers 'embedding.*' 2 'output_layer.*' 2, times optimizer.lr",
    "decoupled_min_lr": "not here: optimizer.lr_multipliers multiplies the whole schedule",
    "lr_decay_samples": f"{_IN_UPDATES} optimizer.lr_decay_steps",
    "lr_warmup_samples": f"{_IN_UPDATES} optimizer.lr_warmup_steps",
    "lr_wsd_decay_samples": f"{_IN_UPDATES} optimizer.lr_wsd_decay_steps",
    "lr_warmup_init": "not here: the warm-up begins at 0; leave it out",
    "lr_wsd_decay_style": "leave it out: wsd decays in a straight line",
    "loss_scale": f"not here: {_SCALE}; give optimizer.initial_loss_scale, or leave it out",
    "min_loss_scale": f"leave it out: {_SCALE}",
    "hysteresis": f"leave it out: {_SCALE}",
    "check_for_spiky_loss": "give optimizer.skip_grad_norm_above, times the median of the norms before",
    # data, records
    "encoder_seq_length": "give data.sequence_length",
    "decoder_seq_length": "give data.sequence_length",
    "no_load_strict": "leave it out: what a checkpoint lacks is refused, with its names",
    "check_weight_hash_across_dp_replicas_interval": "give data_parallel.check_replicas_every, in steps",
    "test_data_path": "not here: `python -m core.training.evaluate RUN --data PREFIX` after the run",
    "data_args_path": _TEXTS,
    "per_split_data_args_path": _TEXTS,
    "mock_data": "leave it and data.train out: the standard library's sources are read",
    "skip_train": "not here: `python -m core.training.evaluate RUN` validates",
    "profile_step_start": "give training.profile=10:12, steps from 0, the last one excluded",
    "profile_step_end": "give training.profile=10:12, steps from 0, the last one excluded",
    "tensorboard_dir": "give training.tensorboard; the records are written into training.output",
    "yaml_cfg": "give --config FILE.toml; python -m core.training.config --template prints one",
    "model_parallel_size": "give parallel.tensor",
    "replication": "not here: give checkpoint.every, each step is saved whole",
    "replication_jump": "not here: give checkpoint.every, each step is saved whole",
    "replication_factor": "not here: give checkpoint.every, each step is saved whole",
    "iterations_to_skip": "not here: optimizer.skip_grad_norm_above skips updates whose norm is a spike",
    "num_distributed_optimizer_instances": "give parallel.replicate, the copies of what zero_stage divides",
    "eval_micro_batch_size": "leave it out: validation takes training.micro_batch_size",
    "full_validation": "give training.eval_batches, as many as data.valid has",
    "multiple_validation_sets": "give data.valid one blend, and python -m core.training.evaluate RUN --data TEXT "
    "for each of the others",
    "export_te_mcore_model": "not here: python -m core.models.huggingface export writes a model",
    "wandb_entity": "set WANDB_ENTITY in the environment",
    "use_tokenizer_model_from_checkpoint_args": "leave it out: the tokenizer beside the prepared text is taken, or "
    "data.tokenizer",
    "record_memory_history": "not here; training.profile=10:12 traces steps, and --explain says what a rank keeps",
    "renormalize_blend_weights": "leave it out: a blend's weights are divided by their sum",
    "train_data_path": _TEXTS,
}

# what is not here, and no setting approximates
_NOT_HERE = """
tp_comm_overlap tp_comm_overlap_cfg no_manual_gc_eval disable_tp_comm_split_ag
fp16_lm_cross_entropy qk_clip te_rng_tracker enable_cuda_graph external_cuda_graph
cuda_graph_scope use_nccl_ub manual_gc manual_gc_interval empty_unused_memory_level
mtp_loss_scaling_factor
log_num_zeros_in_grad log_params_norm log_straggler
enable_one_logger one_logger_project adlr_autoresume enable_ft_package rerun_mode
non_persistent_save_interval non_persistent_ckpt_type train_sync_interval
wandb_exp_name wandb_save_dir
distributed_timeout_minutes moe_shared_expert_overlap
moe_router_force_load_balancing enable_experimental
no_one_logger disable_straggler_on_startup use_sharp nccl_communicator_config_path disable_gloo_process_groups
tp_comm_overlap_ag moe_router_padding_for_fp8 encoder_tensor_model_parallel_size moe_hybridep_num_sms s3_cache_path
"""

# what is not here either, and changes what is computed
_ANOTHER_MODEL = """
moe_input_jitter_eps mtp_num_layers fp32_residual_connection apply_query_key_layer_scaling
init_method_xavier_uniform embedding_init_method_std apply_residual_connection_post_layernorm
moe_shared_expert_gate moe_apply_probs_on_input is_hybrid_model hybrid_attention_ratio hybrid_mlp_ratio
hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
linear_attention_freq attention_output_gate experimental_attention_variant
heterogeneous_layers_config_path num_classes output_bert_embeddings bert_embedder_type retro_workdir
retro_add_retriever softmax_type
"""

# what there is nothing to give for -> why
_LEAVE_OUT = {
    "torch's own operations are used": (
        "masked_softmax_fusion bias_gelu_fusion no_bias_gelu_fusion bias_swiglu_fusion "
        "no_bias_swiglu_fusion bias_dropout_fusion no_bias_dropout_fusion no_rope_fusion "
        "apply_rope_fusion no_persist_layer_norm cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl moe_permute_fusion moe_router_fusion"
    ),
    "torch's scaled_dot_product_attention chooses the kernel": (
        "attention_backend attention_softmax_in_fp32"
    ),
    "a checkpoint holds the whole run, in one format that opens under every layout": (
        "ckpt_format dist_ckpt_format use_dist_ckpt auto_detect_ckpt_format ckpt_convert_format "
        "ckpt_fully_parallel_save ckpt_fully_parallel_load ckpt_assume_constant_structure "
        "use_persistent_ckpt_worker dist_ckpt_strictness no_save_optim no_save_rng "
        "no_ckpt_fully_parallel_save ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format"
    ),
    "settings are those of this run, and what differs from the checkpoint's is told": (
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler use_checkpoint_args "
        "use_mp_args_from_checkpoint_args"
    ),
    "a run saves at SIGTERM and ends, where checkpoint.directory is given": "exit_signal_handler",
    "each layout pads the vocabulary as it needs": "make_vocab_size_divisible_by",
    "training.rampup_batch_size grows in whole microbatches of all replicas": (
        "decrease_batch_size_if_needed"
    ),
    "gradients of 16-bit weights are added up in float32 (data_parallel.grad_dtype)": (
        "main_grads_dtype accumulate_allreduce_grads_in_fp32"
    ),
    "a step whose gradients are not finite is skipped and counted": (
        "check_for_nan_in_loss_and_grad no_check_for_nan_in_loss_and_grad"
    ),
    "training.recompute=layer is of all layers": (
        "recompute_method recompute_num_layers distribute_saved_activations"
    ),
    "messages and sums overlap where that pays (data_parallel.overlap)": (
        "overlap_p2p_communication no_overlap_p2p_communication "
        "async_tensor_model_parallel_allreduce overlap_param_gather_with_optimizer_step "
        "no_async_tensor_model_parallel_allreduce align_grad_reduce no_align_grad_reduce "
        "no_align_param_gather align_param_gather overlap_p2p_communication_warmup_flush "
        "use_ring_exchange_p2p pipeline_model_parallel_comm_backend "
        "no_scatter_gather_tensors_in_pipeline ddp_average_in_collective "
        "defer_embedding_wgrad_compute"
    ),
    "layers are divided into stages by their cost": (
        "decoder_first_pipeline_num_layers num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage standalone_embedding_stage "
        "decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
    ),
    "scales follow the present largest value, not those of steps before": "fp8_interval fp8_amax_compute_algo",
    "torchrun says it": "local_rank",
    "scores are not scaled by the layer's number": "no_query_key_layer_scaling",
    "there is one kind of model": "use_legacy_models deprecated_use_mcore_models",
    "weights are always initialised or read": (
        "perform_initialization no_initialization data_parallel_random_init lazy_mpu_init "
        "init_model_with_meta_device"
    ),
    "the loss is the sum over all tokens divided by their number": "calculate_per_token_loss",
    "rows are drawn in an order that data.seed decides, and no index is built": (
        "data_sharding no_data_sharding mmap_bin_files dataloader_type data_cache_path no_mmap_bin_files "
        "no_create_attention_mask_in_dataloader create_attention_mask_in_dataloader data_impl "
        "num_dataset_builder_threads mid_level_dataset_surplus"
    ),
    "training.profile is torch's profiler, on every rank": "use_pytorch_profiler profile_ranks",
    "metrics.jsonl has times, training.tensorboard every record": (
        "barrier_with_L1_time no_barrier_with_level_1_timing "
        "timing_log_level timing_log_option log_progress tensorboard_log_interval "
        "tensorboard_queue_size log_timers_to_tensorboard log_memory_to_tensorboard "
        "no_log_loss_scale_to_tensorboard log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_world_size_to_tensorboard "
        "log_learning_rate_to_tensorboard no_log_learning_rate_to_tensorboard "
        "log_batch_size_to_tensorboard logging_level moe_per_layer_logging"
    ),
    "products of experts are grouped where that is faster": (
        "moe_grouped_gemm moe_use_legacy_grouped_gemm"
    ),
    "tokens go to their experts in one way, and none is dropped": (
        "moe_token_dispatcher_type moe_enable_deepep moe_token_drop_policy "
        "moe_pad_expert_input_to_capacity"
    ),
    "routers compute in float32": "moe_router_dtype",
    "experts are not cut over tensor ranks (1)": "expert_tensor_parallel_size moe_extended_tp",
}

MEGATRON = (
    _ANSWERS
    | dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), _STATES)
    | dict.fromkeys(("use_precision_aware_optimizer",), _STATES)
    | dict.fromkeys(_NOT_HERE.split(), "not here; leave it out")
    | dict.fromkeys(
        _ANOTHER_MODEL.split(),
        "not here, and a model without it is another one; model.build=package.module:function takes any model",
    )
    | {
        name: f"leave it out: {reason}"
        for reason, names in _LEAVE_OUT.items()
        for name in names.split()
    }
)
