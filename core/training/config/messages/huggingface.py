"""What the arguments of transformers' TrainingArguments, TRL's SFTConfig, DPOConfig and peft's LoraConfig are here.

Where a field of one name and one meaning stands for them, `elsewhere` says so.
"""

from core.training.config.messages.deepspeed import AS_COMMAND

_SAVING = "give checkpoint.directory and checkpoint.every, in updates"
_TEMPLATE = (
    "leave it out: the chat template beside the tokenizer is read (model.huggingface, data.tokenizer); "
    "edit chat_template.jinja there"
)
_HUB = "not here: checkpoint.export_huggingface writes a folder; huggingface-cli upload sends it"
_SHARDING = (
    "give data_parallel.zero_stage (3 is FSDP's full_shard), parallel.tensor, parallel.pipeline"
)
_EIGHT = "not here: weights are not quantized; give lora.rank, model.bf16, data_parallel.zero_stage=3 for memory"
_REFERENCE = "leave it out: the reference is the weights that the run begins with"
_REFERENCE_ONCE = (
    "leave it out: its log probabilities are computed once, before the first step, and kept in every "
    "checkpoint"
)

_MASKED = (
    "leave it out: rows of messages, or of prompt and completion, are known by their keys, and the answers alone "
    "are learned"
)
_LOSS = "not here: the loss of a run is next_token or dpo; initialize(..., loss_fn=...) takes another one"

# name -> what to do instead
_ANSWERS = {
    # of the Trainer and SFTTrainer themselves
    "args": "give its values as fields: docs/coming_from.md has a table of their names",
    "train_dataset": "give data.train=FILE or FOLDER: text, JSON lines, parquet, what save_to_disk wrote, hf://datasets/..",
    "eval_dataset": "give data.valid=FILE or FOLDER, or data.split",
    "processing_class": "give data.tokenizer=FOLDER/tokenizer.json, or leave it out beside model.huggingface",
    "peft_config": "give lora.rank, lora.alpha, lora.modules",
    "data_collator": "leave it out: conversations are packed into rows; initialize(..., batches=...) takes others",
    "formatting_func": "give rows of messages, prompt and completion, or text (another key: prepare --text-key)",
    "compute_metrics": "leave it out: validation is of losses; a loop of your own on initialize(...) computes others",
    "compute_loss_func": _LOSS,
    "optimizers": "give optimizer.optimizer, optimizer.lr, optimizer.lr_schedule",
    "optimizer_cls_and_kwargs": "give optimizer.optimizer, and its fields",
    "preprocess_logits_for_metrics": "leave it out: validation is of losses",
    "callbacks": "not here: a loop of your own on initialize(...) does what they do",
    "shuffle_dataset": "leave it out: rows are drawn in an order of data.seed",
    "response_template": _MASKED,
    "instruction_template": _MASKED,
    "train_on_inputs": _MASKED,
    "resume_from_checkpoint": "give checkpoint.directory, as for saving: a run goes on from its newest step there; "
    "checkpoint.load goes on from one step's own directory",
    # LoRA
    "use_peft": "give lora.rank",
    "target_modules": "give lora.modules linear_qkv linear_proj linear_fc1 linear_fc2 (all of them is the default)",
    "lora_target_modules": "give lora.modules linear_qkv linear_proj linear_fc1 linear_fc2 (all of them is the "
    "default)",
    "bias": "give model.add_bias_linear for those of linears; peft's: leave it out, adapters alone are trained",
    "task_type": "leave it out: every model predicts the next token",
    "modules_to_save": "not here: adapters alone are trained; leave lora.rank out to train all",
    "init_lora_weights": "leave it out: A is drawn and B is 0",
    "use_dora": "not here; leave it out",
    # data
    "dataset_name": "give data.train=hf://datasets/ORG/NAME, or a file or folder",
    "dataset_config": "give the files: data.train='hf://datasets/ORG/NAME/CONFIG/train-*'",
    "dataset_train_split": "give the split's files: data.train='hf://datasets/ORG/NAME/data/train-*'",
    "dataset_test_split": "give data.valid='hf://datasets/ORG/NAME/data/test-*'",
    "dataset_text_field": "give python -m core.datasets.prepare --text-key NAME, and its output as data.train",
    "max_seq_length": "give data.sequence_length",
    "max_length": "give data.sequence_length",
    "max_prompt_length": "leave it out: data.sequence_length is of prompt and response; long ones lose their end",
    "max_completion_length": "leave it out: data.sequence_length is of prompt and response",
    "truncation_mode": "leave it out: what is longer than data.sequence_length loses its end",
    "packing": "leave it out: conversations are packed and kept apart, text fills its rows",
    "packing_strategy": "leave it out: whole conversations are packed in the order of the file",
    "eval_packing": "leave it out: conversations are packed and kept apart",
    "padding_free": "leave it out: rows are packed",
    "assistant_only_loss": "leave it out: of chats the assistant's turns alone are learned",
    "completion_only_loss": "leave it out: of prompts the completion alone is learned",
    "eos_token": "leave it out: tokenizer_config.json's is read; python -m core.datasets.prepare --end-of-text TOKEN "
    "takes another one",
    "pad_token": "leave it out: rows are packed, and padding has no loss",
    "pad_to_multiple_of": "leave it out: rows have data.sequence_length tokens",
    "chat_template": _TEMPLATE,
    "chat_template_path": _TEMPLATE,
    "group_by_length": "leave it out: conversations are packed, text fills its rows",
    "dataset_num_proc": "leave it out: text is prepared once, on all cores",
    # DPO
    "ref_model": _REFERENCE,
    "ref_model_init_kwargs": _REFERENCE,
    "ref_adapter_name": _REFERENCE,
    "model_adapter_name": "leave it out: a run has one adapter",
    "sync_ref_model": "not here: the reference does not change",
    "precompute_ref_log_probs": _REFERENCE_ONCE,
    "precompute_ref_batch_size": _REFERENCE_ONCE,
    "disable_dropout": "give model.dropout=0, beside model.huggingface too; lora.dropout is 0 by default",
    "reference_free": "not here; leave it out",
    "rpo_alpha": "not here; leave it out",
    # the model
    "attn_implementation": "leave it out: torch's scaled_dot_product_attention chooses the kernel",
    "load_in_4bit": _EIGHT,
    "load_in_8bit": _EIGHT,
    "quantization_config": _EIGHT,
    "trust_remote_code": "not here: a model of its own code is model.build=package.module:function",
    "model_init_kwargs": "leave it out: model.huggingface's config.json says it; model.bf16 is the dtype",
    "use_cache": "leave it out: training keeps no cache",
    "use_liger_kernel": "leave it out: torch's own operations are used; training.compile=layer fuses them",
    "liger_kernel_config": "leave it out: torch's own operations are used; training.compile=layer fuses them",
    "use_liger_loss": "leave it out: torch's own operations are used",
    "neftune_noise_alpha": "not here: embeddings get no noise",
    "activation_offloading": "give training.offload_activations, a share of each stage's layers, as 0.5",
    "activation_checkpointing": "give training.recompute",
    "activation_checkpointing_kwargs": "give training.recompute: layer, or selective",
    "gradient_checkpointing_kwargs": "give training.recompute: layer, or selective",
    "torch_compile_backend": "give training.compile=layer; the backend is torch's inductor",
    "torch_compile_mode": "give training.compile=layer; the mode is torch's default",
    # updates
    "lr_scheduler_kwargs": "give optimizer.min_lr, optimizer.lr_decay_steps, optimizer.lr_wsd_decay_steps",
    "optim_args": "give the fields of optimizer: optimizer.adam_beta2, optimizer.momentum ...",
    "optim_target_modules": "not here: every parameter is trained; lora.modules names those with adapters",
    "label_smoothing_factor": "not here; of preferences dpo.label_smoothing",
    "average_tokens_across_devices": "leave it out: the loss is the sum over all tokens divided by their number",
    "auto_find_batch_size": "give training.micro_batch_size; a run's first lines tell memory per rank",
    "bf16_full_eval": "leave it out: validation has the dtype of training",
    "fp16_full_eval": "leave it out: validation has the dtype of training",
    "tf32": "set torch.backends.cuda.matmul.allow_tf32 in a program",
    "torch_empty_cache_steps": "leave it out: memory is not given back between steps",
    # layouts
    "deepspeed": f"give data_parallel.zero_stage and data_parallel.offload; of a ds_config, {AS_COMMAND}",
    "fsdp": _SHARDING,
    "fsdp_config": _SHARDING,
    "parallelism_config": _SHARDING,
    "accelerator_config": "leave it out: parallel and data_parallel say the layout",
    "ddp_bucket_cap_mb": "give data_parallel.bucket_size, in elements",
    "ddp_backend": "give parallel.backend, or leave it out: the device decides",
    "ddp_timeout": "not here; leave it out",
    "use_cpu": "give device=cpu",
    "no_cuda": "give device=cpu",
    # records
    "logging_dir": "give training.output; training.tensorboard writes there",
    "run_name": "not here: a run is named by training.output",
    "project": "give training.wandb_project",
    "include_num_input_tokens_seen": "leave it out: metrics.jsonl counts tokens",
    "debug": "not here: python -m core.training.doctor looks at the machine",
    # validation
    "evaluation_strategy": "give training.eval_interval, in updates",
    "do_eval": "leave it out: training.eval_interval validates",
    "eval_on_start": "leave it out: validation begins at training.eval_interval",
    "eval_delay": "leave it out: validation begins at training.eval_interval",
    "metric_for_best_model": "give checkpoint.keep_best",
    "greater_is_better": "give checkpoint.keep_best_mode",
    "early_stopping_patience": "not here: training.eval_interval validates, checkpoint.keep_best keeps the best, and "
    "SIGTERM ends a run after a save",
    "early_stopping": "not here: training.eval_interval validates, checkpoint.keep_best keeps the best step",
    "num_proc": "leave it out: text is prepared on all cores (python -m core.datasets.prepare --workers N)",
    "early_stopping_threshold": "not here: checkpoint.keep_best keeps the best step",
    "load_best_model_at_end": "give checkpoint.keep_best, and export that step",
    # saving
    "save_safetensors": "leave it out: checkpoint.export_huggingface writes safetensors",
    "save_only_model": "leave it out: a checkpoint holds the whole run, checkpoint.export_huggingface the model",
    "enable_jit_checkpoint": "leave it out: a run saves at SIGTERM and ends",
    "overwrite_output_dir": "leave it out: give another training.output, or remove it",
    "ignore_data_skip": "leave it out: a run goes on with the row that comes next, at no cost",
    "save_on_each_node": f"leave it out: {_SAVING}, which all nodes share",
}

# what there is nothing to give for -> why
_LEAVE_OUT = {
    "rows are read from mapped files": (
        "dataloader_pin_memory dataloader_drop_last dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
        "dataset_kwargs dataset_batch_size skip_prepare_dataset num_of_sequences chars_per_token"
    ),
    "rows have no other columns": "remove_unused_columns label_names length_column_name",
    "the order of rows follows data.seed": "train_sampling_strategy full_determinism",
    "gradients are summed by data_parallel, whatever is used of a model": (
        "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph"
    ),
    "a run trains": "do_train do_predict",
    "validation is of losses alone": (
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics"
    ),
    "lines come every training.log_interval steps": (
        "logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm skip_memory_metrics"
    ),
    "a checkpoint holds all that a run needs": "restore_callback_states_from_checkpoint",
}

HUGGINGFACE = (
    _ANSWERS
    | dict.fromkeys(
        (
            *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy"),
            *("hub_always_push", "hub_revision"),
        ),
        _HUB,
    )
    | dict.fromkeys(
        ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        "not here; give training.tensorboard or training.wandb_project",
    )
    | {
        name: f"leave it out: {reason}"
        for reason, names in _LEAVE_OUT.items()
        for name in names.split()
    }
)
