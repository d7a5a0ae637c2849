"""A ds_config.json: every key is told, values arrive, sizes are solved or their contradiction explained."""

import json
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interop.deepspeed import PARTS, from_deepspeed
from core.interop.deepspeed.__main__ import main
from core.interop.deepspeed.keys import IGNORED, IGNORED_SECTIONS, MAPPED, UNSUPPORTED, UNSUPPORTED_SECTIONS
from core.interop.deepspeed.optimization import CONSTANT
from core.interop.deepspeed.reader import leaves
from core.interop.deepspeed.sections import solve_batch
from core.optimizer import OptimizerConfig
from core.parallel_state import ParallelConfig
from core.training import DataConfig, DataParallelConfig, ModelConfig, PipelineConfig, TrainingConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*(keys are unsupported|has no gradient_clipping)")
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12, "hysteresis": 2}
ADAM = {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"], "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
# config, data ranks, fields that are expected
FILES = {
    "stage 1, bf16": (
        {
            "train_batch_size": 32,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e5, "overlap_comm": False},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "bf16",
            "gradient_clipping": 1.0,
            "steps_per_print": 5,
        },
        4,
        {
            "training": {"micro_batch_size": 8, "global_batch_size": 32, "log_interval": 5},
            "model": {"bf16": True},
            "data_parallel": {
                "zero_stage": 1,
                "bucket_size": 500_000,
                "overlap": False,
                "grad_dtype": "float32",
                "reduce_dtype": "bfloat16",
            },
            "optimizer": {"clip_grad": 1.0},
        },
    ),
    "stage 2, fp16, WarmupLR": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "optimizer": ADAM,
            "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_num_steps": 9}},
            "zero_optimization": {"stage": 2, "cpu_offload": True, "contiguous_gradients": True},
            "fp16": FP16,
        },
        8,
        {
            "training": {"micro_batch_size": 4, "global_batch_size": 64},
            "model": {"fp16": True},
            "data_parallel": {"zero_stage": 2, "offload": "optimizer"},
            "optimizer": {
                "optimizer": "adamw",
                "lr": 1e-4,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1e-6,
                "weight_decay": 0.1,
                "weight_decay_of": "all",
                "initial_loss_scale": 4096.0,
                "loss_scale_window": 500,
                "lr_schedule": "WarmupLR",
                "lr_warmup_fraction": 0.0,
                "lr_schedule_options": {"warmup_num_steps": 9},
                "clip_grad": 1.0,
            },
        },
    ),
    "stage 3, files, half of it": (
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "ratio": 0.5, "buffer_size": 100},
                "mics_shard_size": 2,
            },
            "pipeline": {"activation_checkpoint_interval": 1},
        },
        8,
        {
            "training": {"micro_batch_size": 1, "global_batch_size": 16, "recompute": "layer"},
            "data_parallel": {
                "zero_stage": 3,
                "offload": "optimizer",
                "offload_directory": "/n",
                "offload_fraction": 0.5,
            },
            "parallel": {"replicate": 4},
            "optimizer": {"clip_grad": 1.0},
        },
    ),
    "no ZeRO, pure bf16, SGD of torch": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "fp16": {"enabled": False, "loss_scale": 128},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"offload_optimizer": {"device": "none"}},
        },
        None,
        {
            "model": {"bf16": True, "fp16": False},
            "data_parallel": {"zero_stage": 0, "grad_dtype": "bfloat16"},
            "optimizer": {
                "main_params": False,
                "optimizer": "sgd",
                "lr": 0.1,
                "weight_decay": 0.0,
                "momentum": 0.0,
                **CONSTANT,
                "clip_grad": 1.0,
            },
        },
    ),
    "of Hugging Face": (
        AUTO,
        8,
        {
            "data_parallel": {"zero_stage": 3, "offload": "optimizer", "overlap": True},
            "optimizer": {"optimizer": "adamw", "weight_decay_of": "all", "initial_loss_scale": 65536.0, **CONSTANT},
        },
    ),
}


def verdicts(found):
    return {told.key: told.verdict for told in found.told}


@pytest.mark.parametrize("name", FILES)
def test_values_arrive_and_every_key_is_told(name, tmp_path):
    config, data_ranks, expected = FILES[name]
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    found = from_deepspeed(tmp_path / "ds_config.json", data_ranks=data_ranks)
    assert found.fields == expected
    assert from_deepspeed(config, data_ranks=data_ranks) == found
    assert {key for key, _ in leaves(config)} <= verdicts(found).keys()
    assert set(verdicts(found).values()) <= {"mapped", "ignored", "unsupported"}
    lines = found.table().splitlines()
    assert len(lines) == len(found.told) and all(
        told.words in line for told, line in zip(found.told, lines, strict=True)
    )
    for kind in PARTS.values():
        made = found.onto(kind())
        for key, value in found.fields.get(next(n for n, k in PARTS.items() if k is kind), {}).items():
            assert getattr(made, key) == value


@dataclass(frozen=True)
class Run:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@pytest.mark.parametrize("name", FILES)
def test_the_flags_say_the_same(name):
    found = from_deepspeed(FILES[name][0], data_ranks=FILES[name][1])
    run = tyro.cli(Run, args=found.flags())
    for part in fields(Run):
        ours, theirs = getattr(run, part.name), found.onto(PARTS[part.name]())
        if part.name == "optimizer":  # options are texts on a command line
            assert ours.learning_rate == theirs.learning_rate
            ours = theirs if ours.lr_schedule == theirs.lr_schedule and ours.lr == theirs.lr else ours
        assert ours == theirs


def test_what_trainer_would_fill_in():
    told = {told.key: told for told in from_deepspeed(AUTO).told}
    assert told["scheduler.type"].verdict == "unsupported"
    assert "give auto={'scheduler.params.total_num_steps': ...}" in told["scheduler.params.total_num_steps"].words
    assert told["train_batch_size"].verdict == "ignored" and "Trainer" in told["train_batch_size"].words
    steps = {"scheduler.params.total_num_steps": 100, "scheduler.params.warmup_num_steps": 10, "fp16.enabled": True}
    found = from_deepspeed(AUTO, auto=steps | {"optimizer.params.lr": 0.5})
    assert not found.unsupported and found.fields["model"] == {"fp16": True}
    rate = found.onto(OptimizerConfig()).learning_rate
    assert (rate.at(11), rate.at(101)) == (0.5, 0.0), "up to lr, as nothing else is said; down to 0"
    with pytest.raises(ValueError, match='the file does not say "auto" there'):
        from_deepspeed(AUTO, auto={"zero_optimization.stage": 1})


TOLD = {  # config, key, verdict, words
    "misspelt": (
        {"zero_optimization": {"offload_optimzer": {"device": "cpu"}}},
        "did you mean zero_optimization.off",
    ),
    "another section": ({"optimizer": {"scheduler": {"type": "WarmupLR"}}}, "did you mean scheduler.type?"),
    "british": ({"zero_optimisation": True}, "did you mean zero_optimization?"),
    "nobody's": ({"xyzzy": 1}, "unknown key"),
    "lamb": ({"optimizer": {"type": "Lamb"}}, "known: adam, adamw, sgd, muon, lion"),
    "another schedule": ({"scheduler": {"type": "CosineAnnealingLR"}}, "known: WarmupLR, WarmupDecayLR"),
    "weights elsewhere": ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "weights stay on the device"),
    "quantized": ({"zero_optimization": {"zero_quantized_weights": True}}, "nothing is quantized"),
    "constant scale": ({"fp16": {"enabled": True, "loss_scale": 128}}, "follows overflows; it begins at 128"),
    "amp": ({"amp": {"enabled": True, "opt_level": "O1"}}, "weights have one type"),
    "plain Adam": (
        {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}},
        "decay is decoupled; use AdamW",
    ),
    "cycled momentum": (
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
        "the momentum has 1 value",
    ),
    "size without ranks": ({"train_micro_batch_size_per_gpu": 4}, "give data_ranks"),
    "copies without ranks": ({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, "give data_ranks"),
    "inputs cast": ({"fp16": {"enabled": True, "auto_cast": True}}, "cast those that float yourself"),
    "a least scale": ({"fp16": {"enabled": True, "min_loss_scale": 128}}, "the scale stops at 1"),
    "steps beside auto": (
        {"gradient_accumulation_steps": 4, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
        "left to Hugging Face's Trainer",
    ),
    "sums": ({"gradient_allreduce_op": "sum"}, "the loss is a mean over tokens"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_has_no_place_here_is_told(name):
    config, words = TOLD[name]
    with pytest.warns(UserWarning, match="keys are unsupported") as warned:
        found = from_deepspeed(config)
    assert any(words in str(each.message) for each in warned)
    assert any(words in told.words for told in found.unsupported), found.table()


@pytest.mark.parametrize(
    "config",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "nvme_path": "/n"}}},
        {"zero_optimization": {"zero_quantized_gradients": False, "zero_hpz_partition_size": 1}},
        {"fp16": {"enabled": False, "fp16_master_weights_and_grads": True, "loss_scale": 128}},
        {"curriculum_learning": {"enabled": False, "params": {"a": {"b": 1}}}},
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        {
            "scheduler": {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": False},
            }
        },
        {"zero_optimization": {"mics_shard_size": -1}},
        {"_comment": "ours", "zero_optimization": {"//": "why", "stage": 1}, "comment": ["a", "b"]},
        {"gradient_clipping": None, "fp16": {}, "optimizer": {"type": "AdamW", "params": {}}},
        {"gradient_accumulation_steps": 1, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
        {"fp16": {"enabled": True, "auto_cast": False, "min_loss_scale": 1}},
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/n", "ratio": 0.5}}},
    ],
    ids=str,
)
def test_what_is_off_is_not_missed(config):
    found = from_deepspeed(config)
    assert not found.unsupported, found.table()
    assert {key for key, _ in leaves(config)} <= verdicts(found).keys()


WRONG = {
    "two types": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "2 dtypes for 1 model"),
    "a text": ({"zero_optimization": {"stage": "three"}}, "zero_optimization.stage='three' is not an integer"),
    "stage 4": ({"zero_optimization": {"stage": 4}}, "zero_stage=4 is unknown; known: 0, 1, 2, 3"),
    "ratio": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 2}}},
        "offload_fraction=2.0 must",
    ),
    "no path": ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "needs 1 nvme_path"),
    "betas": ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "must be 2 numbers"),
    "a truth": ({"zero_optimization": {"overlap_comm": "yes"}}, "overlap_comm='yes' is neither true nor false"),
    "dtype": ({"communication_data_type": "fp8"}, "communication_data_type='fp8' is unknown; known: fp32"),
    "schedule": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 9}}},
        "unknown parameter warmup_steps; did you mean warmup_num_steps?",
    ),
    "batch": (
        {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        r"train_batch_size=30 is not micro(4) x accumulation(2) x data ranks(2) = 16; use 16, or leave one",
    ),
    "batch, half told": (
        {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
        r"train_batch_size=30 is no multiple of micro(4) x data ranks(2) = 8; use 24 or 32",
    ),
    "no batch": ({"train_batch_size": 0}, "train_batch_size=0 must be at least 1"),
    "copies": ({"zero_optimization": {"mics_shard_size": 3}}, "mics_shard_size=3 does not divide 2 data ranks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name):
    config, words = WRONG[name]
    with pytest.raises(ValueError, match=r"^ds_config: ") as error:
        from_deepspeed(config, data_ranks=2)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is no JSON"), ("[1]", "holds a list, not an object"), ('{"a": 1, "a": 2}', "'a' is there 2 times")],
)
def test_files_that_are_none(tmp_path, text, words):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        from_deepspeed(tmp_path / "ds.json")


@given(micro=st.integers(1, 9), accumulation=st.integers(1, 9), ranks=st.integers(1, 9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_sizes_follow_from_each_other(micro, accumulation, ranks, data):
    train = micro * accumulation * ranks
    assert solve_batch(train, micro, accumulation, ranks) == (train, micro)
    assert solve_batch(train, micro, None, ranks) == (train, micro)
    assert solve_batch(train, None, accumulation, ranks) == (train, micro)
    assert solve_batch(None, micro, accumulation, ranks) == (train, micro)
    assert solve_batch(train, None, None, ranks) == (train, micro * accumulation)
    assert solve_batch(None, micro, None, ranks) == (micro * ranks, micro)
    assert solve_batch(train, micro, accumulation, None) == (train, micro)
    assert solve_batch(None, micro, accumulation, None) == (None, micro)
    off = data.draw(st.integers(1, 1000).filter(lambda n: n != train))
    with pytest.raises(ValueError, match=f"train_batch_size={off} is not .* = {train}; use {train}"):
        solve_batch(off, micro, accumulation, ranks)


def test_no_key_is_in_two_tables():
    tables = [MAPPED, IGNORED, UNSUPPORTED]
    keys = [key for table in tables for key in table]
    assert len(keys) == len(set(keys))
    assert not IGNORED_SECTIONS.keys() & UNSUPPORTED_SECTIONS.keys()


def test_onto_another_config():
    with pytest.raises(ValueError, match="DataConfig has nothing from a ds_config"):
        from_deepspeed({}).onto(DataConfig())


def test_as_a_command(tmp_path, capsys):
    (tmp_path / "ds.json").write_text(json.dumps(AUTO | {"train_batch_size": 32}))
    line = [str(tmp_path / "ds.json"), "--data-ranks", "8", "--auto", "optimizer.params.lr=0.1"]
    assert main([*line, "--auto", "train_micro_batch_size_per_gpu=2"]) == 1
    said = capsys.readouterr().out
    assert "mapped       zero_optimization.stage" in said and said.endswith("3 unsupported\n")
    assert "--training.micro-batch-size 2 --training.global-batch-size 32" in said
    (tmp_path / "ds.json").write_text(json.dumps(FILES["stage 1, bf16"][0]))
    assert main(line[:3]) == 0 and capsys.readouterr().out.endswith("10 keys, 0 unsupported\n")
    assert main([*line[:2], "3"]) == 2
    assert "error: " in (told := capsys.readouterr().err) and "no multiple of data ranks(3) = 3" in told
    assert main([*line, "--auto", "optimizer.params.lr=high"]) == 2
    assert main(["nowhere.json"]) == 2 and "nowhere.json" in capsys.readouterr().err


def test_a_stage_that_somebody_else_fills_in():
    config = {"zero_optimization": {"stage": "auto"}}
    assert "data_parallel" not in from_deepspeed(config).fields
    assert from_deepspeed(config, auto={"zero_optimization.stage": 2}).fields["data_parallel"] == {"zero_stage": 2}


@pytest.mark.full
def test_as_a_program(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    line = [sys.executable, "-m", "core.interop.deepspeed", tmp_path / "ds.json"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and not done.stderr, done
