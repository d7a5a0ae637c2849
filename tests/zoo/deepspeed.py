"""DeepSpeed's configuration files as people have them: what becomes of each, beside what DeepSpeed makes of it.

Shapes are those of DeepSpeedExamples, accelerate's and transformers' integrations and Megatron-DeepSpeed; rates and
weights of updates are what DeepSpeed 0.19.8 gave.
"""

import json
import math
import tempfile
import warnings
from pathlib import Path

import torch

from core.interop.deepspeed import from_deepspeed
from core.optimizer import OptimizerConfig
from tests.zoo.case import Case, Family

# torch.optim.SGD(lr=3e-5) before each of 12 updates under deepspeed.runtime.lr_schedules
RATES = {
    "decay, all given": [0, 0, 1.5e-05, 2.37744375108e-05, 3e-05, 3e-05, 2.5e-05, 2e-05, 1.5e-05, 1e-05, 5e-06,
        0],
    "decay, no largest rate": [0, 0, 0.0005, 0.000792481250361, 0.001, 0.001, 0.000833333333333,
        0.000666666666667, 0.0005, 0.000333333333333, 0.000166666666667, 0],
    "warm-up, nothing given": [0, 0, 3.01029995664e-06, 4.7712125472e-06, 6.02059991328e-06, 6.98970004336e-06,
        7.78151250384e-06, 8.45098040014e-06, 9.03089986992e-06, 9.54242509439e-06, 1e-05, 1.04139268516e-05],
    "warm-up": [1e-06, 1e-06, 0.0005005, 0.00079268876911, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001,
        0.001],
    "warm-up, linear": [0, 0, 7.5e-06, 1.5e-05, 2.25e-05, 3e-05, 3e-05, 3e-05, 3e-05, 3e-05, 3e-05, 3e-05],
    "cosine": [0, 0, 1.89278926071e-05, 3e-05, 2.85146815652e-05, 2.43529117932e-05, 1.83389802279e-05,
        1.16640197721e-05, 5.65008820682e-06, 1.48831843477e-06, 3e-09, 3e-09],
    "cosine, ratios": [0, 3e-07, 1.02e-05, 2.01e-05, 2.86630797167e-05, 2.49171123251e-05, 1.95040326084e-05,
        1.34959673916e-05, 8.08288767491e-06, 4.33692028332e-06, 3e-06, 3e-06],
    "cycle": [0.0001, 0.000325, 0.00055, 0.000775, 0.001, 0.000775, 0.00055, 0.000325, 0.0001, 0.0001, 0.0001,
        0.0001],
    "cycle, decaying": [0.0001, 0.0004, 0.0007, 0.001, 0.00055, 0.0001, 8e-05, 6.66666666667e-05,
        5.71428571429e-05, 5e-05, 4.44444444444e-05, 4e-05],
    "range": [0.0001, 0.00035, 0.0006, 0.00085, 0.0011, 0.00135, 0.0016, 0.00185, 0.0021, 0.00235, 0.0026,
        0.00285],
    "range, stairs": [0.0001, 0.0001, 0.0001, 0.0006, 0.0006, 0.0006, 0.0011, 0.0011, 0.0011, 0.0016, 0.0016,
        0.0016],
}  # fmt: skip

AUTO = "auto"
ADAM = {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
OF_TRAINER = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], AUTO)},
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}
ZERO2 = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
ZERO3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
OFF = {"offload_param": {"device": "cpu", "pin_memory": True}}


def ignore_clip():
    """Most files here are about something else."""
    warnings.filterwarnings("ignore", ".*has no gradient_clipping")


def fields_of(config, data_ranks=8, auto=None, *, clips_told=False):
    """part.field -> value; a text is a file of that content."""
    if not clips_told:
        ignore_clip()
    if isinstance(config, str):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ds_config.json"
            path.write_text(config)
            found = from_deepspeed(path, data_ranks=data_ranks, auto=auto)
    else:
        found = from_deepspeed(config, data_ranks=data_ranks, auto=auto)
    return {f"{part}.{name}": value for part, fields in found.fields.items() for name, value in fields.items()}


def same(got, want):
    """As tensors, for the judge."""
    if isinstance(want, (int, float)) and not isinstance(want, bool) and isinstance(got, (int, float)):
        return torch.tensor(float(got), dtype=torch.float64), torch.tensor(float(want), dtype=torch.float64)
    return torch.tensor(got == want), torch.tensor(True)


def right(what, config, want, *, ranks=8, auto=None):
    def run():
        got = fields_of(config, ranks, auto)
        return {name: same(got.get(name), value) for name, value in want.items()}

    return Case(what, run, remedy="nothing to do")


def rates(what, kind, params, golden, lr=3e-5, auto=None):
    """The rates of 12 updates."""

    def run():
        optimizer = {"type": "AdamW", "params": {"lr": lr}}
        config = {"optimizer": optimizer, "scheduler": {"type": kind, "params": params}}
        ignore_clip()
        found = from_deepspeed(config, auto=auto).onto(OptimizerConfig())
        got = [found.learning_rate.at(step) for step in range(12)]
        return {"rates": (torch.tensor(got).double(), torch.tensor(RATES[golden]).double())}

    return Case(what, run, remedy="nothing to do")


def told(what, config, says, remedy, *, ranks=8, auto=None, clips_told=False):
    def run():
        return {"": same(fields_of(config, ranks, auto, clips_told=clips_told), None)}

    return Case(what, run, "told", says, remedy)


def refused(what, config, says, remedy="the message names key and values", *, ranks=8, auto=None):
    return Case(what, lambda: {"": same(fields_of(config, ranks, auto), None)}, "refused", says, remedy)


def of(kind, **params):
    return {"optimizer": {"type": kind, "params": params}}


HJSON = """# of the cluster
{
  // sizes
  train_batch_size: 32,
  "zero_optimization": {"stage": 1,}, /* no more */
  gradient_clipping: 1.0
}
"""
SIZES = {"training.global_batch_size": 64, "training.micro_batch_size": 4}
FLAT = {"optimizer.lr_schedule": "constant", "optimizer.lr_warmup_fraction": 0.0}
MANY = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}

CASES = [
    # whole files
    right("CIFAR of DeepSpeedExamples: Adam, WarmupLR, fp16, ZeRO 0",
          {"train_batch_size": 16, "steps_per_print": 2000, "optimizer": {"type": "Adam", "params": {
              "lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
           "scheduler": {"type": "WarmupLR", "params": {
               "warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000}},
           "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": False},
           "fp16": FP16 | {"fp16_master_weights_and_grads": False}, "wall_clock_breakdown": False,
           "zero_optimization": {"stage": 0, "allgather_partitions": True, "reduce_scatter": True,
                                 "allgather_bucket_size": 5e7, "reduce_bucket_size": 5e7, "overlap_comm": True,
                                 "contiguous_gradients": True, "cpu_offload": False}},
          {"training.global_batch_size": 16, "training.micro_batch_size": 2, "training.log_interval": 2000,
           "optimizer.lr": 1e-3, "optimizer.adam_beta1": 0.8, "optimizer.weight_decay": 3e-7,
           "optimizer.weight_decay_of": "all", "optimizer.lr_schedule": "WarmupLR", "optimizer.clip_grad": 1.0,
           "model.fp16": True, "data_parallel.zero_stage": 0, "data_parallel.bucket_size": 5e7}),
    right("Megatron-DeepSpeed: sizes, ZeRO 1, bf16, sums in float32",
          {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
           "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
           "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": 1.0, "wall_clock_breakdown": True},
          {"training.global_batch_size": 256, "training.micro_batch_size": 4, "data_parallel.zero_stage": 1,
           "model.bf16": True, "data_parallel.grad_dtype": "float32", "optimizer.clip_grad": 1.0}),
    right("accelerate's ZeRO 2: everything auto, steps_per_print of Infinity",
          OF_TRAINER | {"fp16": FP16 | {"enabled": AUTO}, "zero_optimization": ZERO2, "steps_per_print": math.inf},
          {"training.log_interval": 1e9, "data_parallel.zero_stage": 2, "data_parallel.offload": "optimizer",
           "data_parallel.bucket_size": 2e8, "data_parallel.overlap": True, "optimizer.optimizer": "adamw",
           "optimizer.weight_decay_of": "all", **FLAT}),
    right("transformers' ZeRO 3, its schedule filled in",
          OF_TRAINER | {"bf16": {"enabled": AUTO}, "zero_optimization": ZERO3, "scheduler": {
              "type": "WarmupDecayLR", "params": dict.fromkeys(
                  ["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], AUTO)}},
          {"data_parallel.zero_stage": 3, "model.bf16": True, "optimizer.lr": 2e-5,
           "optimizer.lr_schedule": "WarmupDecayLR", "optimizer.weight_decay": 0.01,
           "optimizer.weight_decay_of": "all", "training.micro_batch_size": 4, "training.global_batch_size": 64},
          auto={"bf16.enabled": True, "scheduler.params.total_num_steps": 100,
                "scheduler.params.warmup_num_steps": 10, "optimizer.params.lr": 2e-5,
                "optimizer.params.weight_decay": 0.01, "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2, "train_batch_size": 64}),
    told("transformers' ZeRO 3 with weights on the host (offload_param)",
         OF_TRAINER | {"zero_optimization": ZERO3 | OFF}, "weights stay on the device; stage 3 divides them",
         "stage 3 over more ranks"),
    right("transformers' tests, older: reduce_bucket_size 0", {"zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": 0}},
          {"data_parallel.bucket_size": 1, "data_parallel.zero_stage": 3}),
    right("ZeRO-Infinity: states in files", {"zero_optimization": {"stage": 3, "offload_optimizer": {
        "device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4, "fast_init": False}},
        "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1}},
          {"data_parallel.offload": "optimizer", "data_parallel.offload_directory": "/local_nvme"}),
    right("ZeRO++'s keys, all off", {"zero_optimization": {"stage": 3, "zero_quantized_weights": False,
          "zero_quantized_gradients": False, "zero_hpz_partition_size": 1}}, {"data_parallel.zero_stage": 3}),
    right("MiCS: shards of 4 ranks", {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
          {"parallel.replicate": 2}),
    right("an old zero_optimization: true", {"zero_optimization": True}, {"data_parallel.zero_stage": 1}),
    right("an old cpu_offload: true", {"zero_optimization": {"stage": 2, "cpu_offload": True}},
          {"data_parallel.offload": "optimizer"}),
    right("an empty file", {}, {"data_parallel.zero_stage": 0, "optimizer.clip_grad": 1}),
    right("an empty zero_optimization", {"zero_optimization": {}}, {"data_parallel.zero_stage": 0}),
    # sizes
    right("micro and accumulation, train_batch_size follows", MANY, SIZES),
    right("train and micro, accumulation follows",
          {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, SIZES),
    right("train and accumulation, micro follows", {"train_batch_size": 64, "gradient_accumulation_steps": 2}, SIZES),
    right("train_batch_size alone", {"train_batch_size": 64},
          {"training.global_batch_size": 64, "training.micro_batch_size": 8}),
    right("micro alone", {"train_micro_batch_size_per_gpu": 4},
          {"training.global_batch_size": 32, "training.micro_batch_size": 4}),
    right("all three", MANY | {"train_batch_size": 64}, SIZES),
    right("accumulation of 1 beside auto sizes", {"gradient_accumulation_steps": 1, "train_batch_size": AUTO,
          "train_micro_batch_size_per_gpu": AUTO}, {"data_parallel.zero_stage": 0}),
    told("accumulation of 4 beside auto sizes", {"gradient_accumulation_steps": 4, "train_batch_size": AUTO,
         "train_micro_batch_size_per_gpu": AUTO}, "left to Hugging Face's Trainer", "auto={...}"),
    told("no gradient_clipping, which newer versions take as 1.0 and older ones as none", {"train_batch_size": 64},
        "clipped at a norm of 1.0", "say gradient_clipping: 1.0, or 0", clips_told=True),
    told("micro alone, without the number of ranks", {"train_micro_batch_size_per_gpu": 4}, "give data_ranks",
         "data_ranks=...", ranks=None),
    refused("sizes that contradict each other", MANY | {"train_batch_size": 60},
            r"60 is not micro\(4\) x accumulation\(2\) x data ranks\(8\) = 64; use 64"),
    refused("a batch that the ranks do not divide", {"train_batch_size": 30},
            "no multiple of data ranks.*use 24 or 32"),
    refused("a micro batch of 0", {"train_micro_batch_size_per_gpu": 0}, "must be at least 1"),
    refused("a size in quotes", {"train_batch_size": "64"}, "'64' is not an integer"),
    refused("half a sample", {"train_batch_size": 6.5}, "6.5 is not an integer"),
    refused("an endless batch", {"train_batch_size": math.inf}, "inf is not an integer"),
    # optimizers
    right("AdamW, only lr", of("AdamW", lr=3e-5), {"optimizer.optimizer": "adamw", "optimizer.lr": 3e-5,
          "optimizer.weight_decay": 0, **FLAT}),
    right("Adam decays as AdamW does, every parameter", {"optimizer": ADAM}, {"optimizer.weight_decay": 3e-7,
          "optimizer.weight_decay_of": "all"}),
    right("torch_adam without weight_decay: torch's 0.01", of("AdamW", lr=1e-3, torch_adam=True),
          {"optimizer.weight_decay": 0.01, "optimizer.weight_decay_of": "all"}),
    right("Adam, torch_adam without weight_decay", of("Adam", torch_adam=True), {"optimizer.weight_decay": 0.01}),
    right("torch.optim.Adam without weight_decay", of("Adam", torch_adam=True, adam_w_mode=False),
          {"optimizer.weight_decay": 0}),
    right("AdamW whose adam_w_mode says false", of("AdamW", adam_w_mode=False, weight_decay=0.1),
          {"optimizer.weight_decay": 0.1}),
    told("Adam that decays into the gradient", of("Adam", adam_w_mode=False, weight_decay=0.1),
         "decay is decoupled; use AdamW, or a decay of 0", "AdamW, or no decay"),
    right("names in small letters", of("adamw", lr=0.1), {"optimizer.optimizer": "adamw"}),
    right("SGD of torch", of("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4), {"optimizer.optimizer": "sgd",
          "optimizer.momentum": 0.9, "optimizer.weight_decay": 5e-4, "optimizer.weight_decay_of": "all"}),
    right("SGD without momentum", of("SGD", lr=0.1), {"optimizer.momentum": 0}),
    right("Muon", of("Muon", lr=0.02), {"optimizer.optimizer": "muon", "optimizer.muon_lr": "original",
          "optimizer.muon_except": "embed,lm_head",
          "optimizer.momentum": 0.95, "optimizer.adam_beta2": 0.95, "optimizer.adam_eps": 1e-10}),
    right("Muon, its own momentum and betas", of("Muon", lr=0.02, momentum=0.9, betas=[0.9, 0.99], eps=1e-8),
          {"optimizer.momentum": 0.9, "optimizer.adam_beta2": 0.99, "optimizer.adam_eps": 1e-8}),
    right("Muon, one rate under two names", of("Muon", muon_lr=0.01, adam_lr=0.01), {"optimizer.lr": 0.01}),
    told("Muon, two rates", of("Muon", muon_lr=0.02, adam_lr=3e-4), "1 rate for all, 0.02; for 0.0003",
         "`ShardedMuon(groups=[...])`"),
    right("Muon under ZeRO 2", of("Muon", lr=0.02) | {"zero_optimization": {"stage": 2}},
          {"optimizer.optimizer": "muon", "data_parallel.zero_stage": 2}),
    told("Muon per head", of("Muon", lr=0.02, per_head_muon=True), "orthogonalised as a whole", "leave it out"),
    right("Lion", of("Lion", lr=1e-4, betas=[0.95, 0.98], weight_decay=0.1), {"optimizer.optimizer": "lion",
          "optimizer.lion_beta1": 0.95, "optimizer.lion_beta2": 0.98, "optimizer.weight_decay_of": "all"}),
    right("Adafactor, torch's", of("Adafactor", eps=[None, 1e-4], beta2_decay=-0.7, d=2), {"optimizer.lr": 0.01,
          "optimizer.optimizer": "adafactor", "optimizer.adafactor_eps2": 1e-4, "optimizer.adafactor_d": 2.0,
          "optimizer.adafactor_beta2_decay": -0.7}),
    *[told(f"the optimizer {name}", of(name, lr=0.01), "known: adam, adamw, sgd, muon, lion", "one of these")
      for name in ("Lamb", "OneBitAdam", "ZeroOneAdam", "Adagrad", "MuAdam")],
    refused("betas of one number", of("Adam", betas=[0.9]), "must be 2 numbers"),
    refused("a rate in quotes", of("Adam", lr="1e-4"), "'1e-4' is not a number"),
    # schedules
    rates("WarmupDecayLR", "WarmupDecayLR", {"total_num_steps": 10, "warmup_min_lr": 0, "warmup_max_lr": 3e-5,
          "warmup_num_steps": 4}, "decay, all given"),
    rates("WarmupDecayLR without warmup_max_lr: 0.001, whatever lr is", "WarmupDecayLR",
          {"total_num_steps": 10, "warmup_num_steps": 4}, "decay, no largest rate"),
    rates("WarmupDecayLR with a warmup_max_lr of auto: lr", "WarmupDecayLR", {"total_num_steps": AUTO,
          "warmup_max_lr": AUTO, "warmup_min_lr": AUTO, "warmup_num_steps": 4}, "decay, all given",
          auto={"scheduler.params.total_num_steps": 10}),
    rates("WarmupLR, nothing given", "WarmupLR", {}, "warm-up, nothing given"),
    rates("WarmupLR", "WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}, "warm-up"),
    rates("WarmupLR, linear", "WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, "warm-up, linear"),
    rates("WarmupCosineLR", "WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 3}, "cosine"),
    rates("WarmupCosineLR with ratios", "WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 3,
          "warmup_min_ratio": 0.01, "cos_min_ratio": 0.1, "warmup_type": "linear"}, "cosine, ratios"),
    rates("OneCycle", "OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 4,
          "cycle_momentum": False}, "cycle"),
    rates("OneCycle that goes on falling", "OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3,
          "decay_lr_rate": 0.5, "cycle_first_step_size": 3, "cycle_second_step_size": 2, "decay_step_size": 2,
          "cycle_momentum": False}, "cycle, decaying"),
    rates("LRRangeTest", "LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2,
          "lr_range_test_step_rate": 5, "lr_range_test_staircase": False}, "range"),
    rates("LRRangeTest in stairs", "LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 3,
          "lr_range_test_step_rate": 5, "lr_range_test_staircase": True}, "range, stairs"),
    told("OneCycle that moves the momentum too", {"scheduler": {"type": "OneCycle", "params": {
        "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}}, "the momentum has 1 value", "cycle_momentum: false"),
    told("a schedule whose length is auto", OF_TRAINER | {"scheduler": {"type": "WarmupDecayLR", "params": {
        "total_num_steps": AUTO}}}, "give auto=", "auto={'scheduler.params.total_num_steps': ...}"),
    told("a schedule of torch", {"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 9}}},
         "known: WarmupLR.*the rate is constant", "one of DeepSpeed's, or `OptimizerConfig.lr_schedule`"),
    refused("a parameter of a schedule that is misspelt", {"scheduler": {"type": "WarmupLR", "params": {
        "warmup_steps": 9}}}, "did you mean warmup_num_steps"),
    # types and the loss scale
    refused("fp16 and bf16", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "2 dtypes for 1 model"),
    right("bfloat16, its old name", {"bfloat16": {"enabled": True}}, {"model.bf16": True}),
    right("fp16's initial_scale_power and window", {"fp16": FP16 | {"initial_scale_power": 12}},
          {"optimizer.initial_loss_scale": 4096, "optimizer.loss_scale_window": 1000, "model.fp16": True}),
    told("a constant loss_scale", {"fp16": {"enabled": True, "loss_scale": 128}},
         "follows overflows; it begins at 128", "leave it at 0"),
    told("a least loss scale of 128", {"fp16": {"enabled": True, "min_loss_scale": 128}}, "the scale stops at 1",
         "`max_skipped_steps` ends a run that overflows"),
    told("fp16.auto_cast", {"fp16": {"enabled": True, "auto_cast": True}}, "cast those that float yourself",
         "`x.half()`"),
    told("amp", {"amp": {"enabled": True, "opt_level": "O1"}}, "weights have one type", "bf16"),
    told("torch_autocast", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "weights have one type",
         "bf16"),
    refused("an unknown communication_data_type", {"communication_data_type": "fp8"}, "known: fp32"),
    # the rest
    right("comments as keys", {"_comment": "ours", "//": "why", "zero_optimization": {"_why": 1, "stage": 1}},
          {"data_parallel.zero_stage": 1}),
    right("Hjson: comments, no quotes, commas at the end", HJSON, {"training.global_batch_size": 32,
          "data_parallel.zero_stage": 1, "optimizer.clip_grad": 1}),
    right("a byte order mark", "\ufeff" + json.dumps(MANY), SIZES),
    right("null", {"gradient_clipping": None, "optimizer": {"type": "AdamW", "params": {"lr": None}}},
          {"optimizer.clip_grad": 1, "optimizer.optimizer": "adamw"}),
    right("tensorboard and wandb", {"tensorboard": {"enabled": True, "job_name": "a"}, "wandb": {
        "enabled": True, "project": "mine", "group": "a"}}, {"training.tensorboard": True,
                                                             "training.wandb_project": "mine"}),
    right("steps_per_print of 0", {"steps_per_print": 0}, {"training.log_interval": 1e9}),
    right("no gradient_clipping: 1.0", {"train_batch_size": 8}, {"optimizer.clip_grad": 1}),
    right("gradient_clipping of 0: none", {"gradient_clipping": 0.0}, {"optimizer.clip_grad": 0}),
    right("activation_checkpointing, flops_profiler, comms_logger", {"activation_checkpointing": {
        "partition_activations": True}, "flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}},
          {"data_parallel.zero_stage": 0}),
    told("compression, sparse attention, curricula", {"compression_training": {"enabled": True}, "sparse_attention": {
        "mode": "fixed"}, "curriculum_learning": {"enabled": True}}, "3 of 5 keys are unsupported", "leave them out"),
    told("elasticity", {"elasticity": {"enabled": True, "max_train_batch_size": 2000}}, "a run has one size",
         "go on from a checkpoint"),
    told("a key that is misspelt", {"zero_optimization": {"stagee": 2}}, "did you mean zero_optimization.stage",
         "the nearest name"),
    told("a key in another section", {"optimizer": {"lr": 0.1}}, "did you mean optimizer.params.lr",
         "the nearest name"),
    refused("a key twice", '{"train_batch_size": 8, "train_batch_size": 16}', "is there 2 times"),
    refused("a file cut in the middle", '{"zero_optimization": {"stage": 2', "is no JSON.*and no Hjson"),
    refused("a list", "[1, 2]", "holds a list, not an object"),
    refused("stage 4", {"zero_optimization": {"stage": 4}}, "zero_stage=4 is unknown; known: 0, 1, 2, 3"),
    refused("a truth in quotes", {"zero_optimization": {"overlap_comm": "true"}}, "neither true nor false"),
    refused("nvme without a path", {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "needs 1 nvme_path"),
]  # fmt: skip

FAMILY = Family(
    "DeepSpeed's configuration files",
    "Read by `from_deepspeed` for 8 data ranks; the fields compared with what DeepSpeed's documentation says of "
    "them, rates of schedules with its own, 12 updates long. What is told is one warning, and the table of "
    "`python -m core.interop.deepspeed`.",
    CASES,
)
