"""Methods and attributes of DeepSpeed's engine that are not here: what to use."""

_EXPORT = "save_checkpoint, then `python -m core.dist_checkpointing export`"
_SIZES = "initialize with other sizes, and load_checkpoint"
_FILE = "the mapping that you gave; training_config and optimizer.config have what came of it"
_TIMES = "torch.profiler; metrics.jsonl of core.pretrain has times"
_LOGS = "a writer of your own; core.pretrain takes training.tensorboard and training.wandb_project"
_OFFLOAD = "initialize with data_parallel.offload, which says where states live"
_NOTHING = "nothing: leave it out"
_SCALE = "optimizer.loss_scale, the factor of the next loss (1 where weights are not float16)"

# name -> what follows "use"
ELSEWHERE = {
    "train_batch": "train_step(batch)",
    "eval_batch": "evaluate(batch)",
    "save_16bit_model": _EXPORT,
    "save_fp16_model": _EXPORT,
    "allreduce_gradients": "nothing: step() sums what backward has not",
    "buffered_allreduce_fallback": "nothing: step() sums what backward has not",
    "set_train_batch_size": _SIZES,
    "set_gradient_accumulation_steps": "set_gradient_accumulation_boundary(is_boundary) before each step",
    "set_train_micro_batch_size": _SIZES,
    "config": _FILE,
    "dump_state": _NOTHING,
    "steps_per_print": _NOTHING,
    "csr_gradients": "nothing: gradients are dense",
    "sparse_gradients_enabled": "nothing: gradients are dense",
    "amp_enabled": "fp16_enabled() and bfloat16_enabled()",
    "loss_scale": _SCALE,
    "dynamic_loss_scale": _SCALE,
    "initial_dynamic_scale": "optimizer.config.initial_loss_scale",
    "basic_optimizer": "optimizer",
    "client_optimizer": "optimizer",
    "scheduler_name": "optimizer.config.lr_schedule",
    "set_mom": "optimizer.param_groups",
    "tput_timer": _TIMES,
    "timers": _TIMES,
    "flops_profiler": _TIMES,
    "wall_clock_breakdown": _TIMES,
    "monitor": _LOGS,
    "summary_writer": _LOGS,
    "data_parallel_group": "core.parallel_state.get_data_parallel_group()",
    "deepspeed_io": "torch.utils.data.DataLoader, or batches= of initialize",
    "offload_states": _OFFLOAD,
    "reload_states": _OFFLOAD,
}
