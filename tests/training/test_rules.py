"""What does not fit together is told before any process exists, all at once, with both numbers and the remedy."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from core.data_parallel import DataParallel
from core.datasets import TokenFileWriter
from core.optimizer import Offload, OptimizerConfig
from core.parallel_state import ParallelConfig
from core.training import DataConfig, DataParallelConfig, ModelConfig, PipelineConfig, TrainingConfig, check_run

MODEL = ModelConfig(num_layers=4, hidden_size=48, num_attention_heads=12, num_query_groups=6, ffn_hidden_size=96)
FITS = {"model": MODEL, "parallel": ParallelConfig(), "data": DataConfig(), "training": TrainingConfig()}

# what is changed of a run that fits, the number of ranks, what is said
WRONG = {
    "heads": (
        {"model": replace(MODEL, num_attention_heads=6, num_query_groups=6), "parallel": ParallelConfig(tensor=4)},
        4,
        "num_attention_heads=6 does not divide over tensor_model_parallel_size=4; valid: 1, 2, 3, 6",
    ),
    "query groups": (
        {"parallel": ParallelConfig(tensor=4)},
        4,
        "num_query_groups=6 does not divide over tensor_model_parallel_size=4; valid: 1, 2, 3, 6",
    ),
    "ffn": (
        {"model": replace(MODEL, ffn_hidden_size=99), "parallel": ParallelConfig(tensor=2)},
        2,
        "ffn_hidden_size=99 does not divide over tensor_model_parallel_size=2; valid: 1, 3, 9, 11, 33",
    ),
    "world": (
        {"parallel": ParallelConfig(tensor=3)},
        4,
        "world size 4 is not a multiple of tensor(3) x pipeline(1) x context(1) = 3; the nearest world sizes are 3 "
        "or 6; with 4 ranks tensor may be 1, 2, 4",
    ),
    "data axis": ({"parallel": ParallelConfig(data=3)}, 4, "data=3 x 1 model ranks is not the world size 4; leave"),
    "pipeline": (
        {"parallel": ParallelConfig(pipeline=4), "pipeline": PipelineConfig(schedule="zb-v")},
        4,
        "schedule=zb-v has 8 stages over pipeline=4 ranks, num_layers=4 cannot fill them; use at least 8 layers",
    ),
    "recompute": (
        {"training": TrainingConfig(recompute="stage")},
        1,
        "recompute=stage is an action of a pipeline's schedule, pipeline=1 has none; use recompute=layer",
    ),
    "context": (
        {"parallel": ParallelConfig(context=3)},
        3,
        "is not a multiple of 2 x context(3) = 6; use",
    ),
    "experts": ({"parallel": ParallelConfig(expert=2)}, 2, "expert=2, and the model has no experts; give num_moe"),
    "stages": (
        {"parallel": ParallelConfig(pipeline=8)},
        8,
        "num_layers=4 cannot fill 8 pipeline stages; use at most 4",
    ),
    "batch": (
        {"training": TrainingConfig(global_batch_size=12, micro_batch_size=4)},
        2,
        "global_batch_size=12 is not a multiple of micro_batch_size=4 x data(2) = 8; use 8 or 16, or a "
        "micro_batch_size of 1, 2, 3, 6",
    ),
    "batch of fewer rows than ranks": (
        {"training": TrainingConfig(global_batch_size=2, micro_batch_size=1)},
        4,
        "global_batch_size=2 is not a multiple of micro_batch_size=1 x data(4) = 4; use 4",
    ),
    "sequence": (
        {"data": DataConfig(sequence_length=127), "parallel": ParallelConfig(tensor=2, sequence_parallel=True)},
        2,
        "sequence_length=127 does not divide over tensor=2, as sequence_parallel needs; use 128",
    ),
    "hidden": (
        {"model": replace(MODEL, hidden_size=50)},
        1,
        "hidden_size=50 does not divide by num_attention_heads=12; use 48 or 60, or give kv_channels",
    ),
    "groups": (
        {"model": replace(MODEL, num_query_groups=5)},
        1,
        "num_attention_heads=12 does not divide by num_query_groups=5; valid: 1, 2, 3, 4, 6, 12",
    ),
    "dropout": (
        {"model": replace(MODEL, dropout=1.0)},
        1,
        "hidden_dropout=1.0 must lie in [0, 1); attention_dropout=",
    ),
    "layers": ({"model": replace(MODEL, num_layers=0)}, 1, "num_layers=0 must be at least 1"),
    "odd heads": (
        {"model": replace(MODEL, hidden_size=36)},
        1,
        "rotary positions rotate pairs of dims, hidden_size=36 with num_attention_heads=12 has heads of 3; use an",
    ),
    "muon on the host": (
        {
            "optimizer": OptimizerConfig(optimizer="muon"),
            "data_parallel": DataParallelConfig(zero_stage=0, offload="optimizer", offload_fraction=0.5),
        },
        2,
        "offload_fraction=0.5 of them would be on the host; use offload=none, or optimizer=adamw",
    ),
    "rounding of float32": (
        {"optimizer": OptimizerConfig(main_params=False)},
        1,
        "main_params=False rounds weights to bfloat16 stochastically, these are float32; use bf16",
    ),
    "float16 sums": (
        {"data_parallel": DataParallelConfig(grad_dtype="float16", reduce_dtype="float16")},
        1,
        "grad_dtype=float16 loses what is below 6e-8 where no loss scale lifts it, and weights of float32 have none; "
        "use bfloat16 or float32, or fp16; reduce_dtype=float16 loses",
    ),
    "copies": (
        {"parallel": ParallelConfig(tensor=2, replicate=3)},
        8,
        "replicate=3 does not divide data(4); valid: 1, 2, 4",
    ),
    "no such file": (
        {"data": DataConfig(train="nowhere/t", valid="nowhere/v", tokenizer="nowhere/tokenizer.json")},
        1,
        "nowhere/t.bin does not exist: a token file is a .bin and an .idx; make it with `python -m "
        "core.datasets.prepare --input TEXT --output nowhere/t`; for the data set of the Hugging Face Hub give "
        "hf://datasets/nowhere/t; "
        "nowhere/v.bin does not exist: a token file is a .bin and an .idx; make it with `python -m "
        "core.datasets.prepare --input TEXT --output nowhere/v`; for the data set of the Hugging Face Hub give "
        "hf://datasets/nowhere/v; "
        "tokenizer=nowhere/tokenizer.json is not a file; give a tokenizer.json",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_run_that_does_not_fit_is_refused(case):
    changes, world, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_run(**FITS | changes, world_size=world)
    assert str(error.value).startswith("this run: ")


@pytest.mark.parametrize("tensor, world, data", [(1, 1, 1), (2, 4, 2), (6, 6, 1), (3, 6, 2)])
def test_a_run_that_fits_gets_its_data_size(tensor, world, data):
    assert check_run(**FITS | {"parallel": ParallelConfig(tensor=tensor)}, world_size=world).data == data


def test_files_that_cannot_serve_are_refused_before_the_run(tmp_path):
    for name in ("train", "valid"):
        with TokenFileWriter(tmp_path / name, vocab_size=9) as writer:
            writer.add_document([1, 2, 3, 4, 5])
    (tmp_path / "tokenizer.json").write_text("{}")
    paths = {"train": f"{tmp_path}/train", "valid": f"{tmp_path}/valid", "tokenizer": f"{tmp_path}/tokenizer.json"}
    check_run(**FITS | {"data": DataConfig(**paths, sequence_length=4)}, world_size=1)
    with pytest.raises(ValueError) as error:
        check_run(**FITS | {"data": DataConfig(**paths, sequence_length=5)}, world_size=1)
    said = f"sequence_length=5 needs 6 tokens (one more to predict), train={tmp_path}/train has 5; use at most 4"
    assert said in str(error.value) and "valid=" not in str(error.value), "short validation rows are filled up"
    (tmp_path / "train.bin").write_bytes(b"\0" * 8)
    (tmp_path / "valid.idx").write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ValueError, match=r"train\.bin has 8 bytes, train\.idx says 10.*valid\.idx begins with b'PK"):
        check_run(**FITS | {"data": DataConfig(**paths, sequence_length=4)}, world_size=1)


def test_all_parts_of_a_run_are_told_at_once():
    run = {
        "model": replace(MODEL, hidden_size=50),
        "parallel": ParallelConfig(tensor=3, pipeline=2, data=2, sequence_parallel=True),
        "pipeline": PipelineConfig(schedule="interleaved-1f1b", chunks=3),
        "data": DataConfig(sequence_length=7),
        "training": TrainingConfig(global_batch_size=9, micro_batch_size=1),
    }
    with pytest.raises(ValueError) as error:
        check_run(**run, world_size=4)
    for part in (
        "world size 4",
        "hidden_size=50",
        "global_batch_size=9",
        "sequence_length=7",
        "schedule=interleaved-1f1b has 6 stages",
    ):
        assert part in str(error.value), part


@pytest.mark.parametrize(
    "make, messages",
    [
        (
            lambda: TrainingConfig(offload_activations=0.5, recompute="stage", compile="layer"),
            [
                "offload_activations=0.5 moves what single operations save, compile=layer makes 1 of a layer's; use",
                "offload_activations=0.5 moves what layers save in forward, which is nothing with recompute=stage",
            ],
        ),
        (
            lambda: TrainingConfig(offload_activations=2),
            ["offload_activations=2 must be between 0 (no layer) and 1 (all of them)"],
        ),
        (
            lambda: TrainingConfig(train_steps=0, global_batch_size=-1, log_interval=0, eval_interval=-1),
            [
                "train_steps=0 must be",
                "global_batch_size=-1 must be",
                "log_interval=0 must",
                "eval_interval=-1 must not",
            ],
        ),
        (
            lambda: DataConfig(valid="a", split="1,2", sequence_length=0, vocab_size=100),
            [
                "valid is given and train has 0 prefixes: the default corpus has its own valid; give train, or leave",
                "split='1,2' must be 3 numbers, of train, valid and test, as '969,30,1'",
                "sequence_length=0",
                "vocab_size=100 cannot",
            ],
        ),
        (
            lambda: ModelConfig(style="bert", bf16=True, fp16=True),
            ["unknown style 'bert'; known: llama, gpt2", "bf16 and fp16 are 2 dtypes for one model"],
        ),
        (
            lambda: DataParallelConfig(
                zero_stage=4, offload_fraction=1.5, offload_directory="d", grad_dtype="half", bucket_size=0
            ),
            [
                "zero_stage=4 is unknown; known: 0, 1, 2, 3",
                "offload_fraction=1.5 must be between 0 (nothing) and 1 (all)",
                "offload_directory=d holds nothing with offload=none",
                "unknown grad_dtype 'half'; known: float64, float32, bfloat16, float16",
                "bucket_size=0 must be at least 1",
            ],
        ),
        (
            lambda: DataParallelConfig(offload="weights", check_replicas_every=-1),
            ["unknown offload 'weights'; known: none, optimizer", "check_replicas_every=-1 must be at least 0"],
        ),
    ],
    ids=["offload", "share", "training", "data", "model", "data parallel", "replicas"],
)
def test_each_config_tells_all_that_is_wrong_with_it(make, messages):
    with pytest.raises(ValueError) as error:
        make()
    for message in messages:
        assert message in str(error.value)


def test_the_rules_ask_no_process_group(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the process group was asked")

    for name in ("init_process_group", "new_group", "get_rank", "get_world_size", "is_initialized"):
        monkeypatch.setattr(torch.distributed, name, refuse)
    assert check_run(**FITS | {"parallel": ParallelConfig(tensor=2)}, world_size=4).data == 2
    with pytest.raises(ValueError, match="world size 4"):
        check_run(**FITS | {"parallel": ParallelConfig(tensor=3)}, world_size=4)


def test_a_schedule_that_nobody_knows():
    with pytest.raises(ValueError, match="there is no schedule 'zbv': did you mean 'zb-v'"):
        PipelineConfig(schedule="zbv")
    # as torch, and torchtitan's settings, call them
    for name, ours in (
        ("ZBVZeroBubble", "zb-v"),
        ("ScheduleZBVZeroBubble", "zb-v"),
        ("InterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("LoopedBFS", "looped-bfs"),
        ("ScheduleDualPipeV", "dualpipe-v"),
    ):
        with pytest.raises(ValueError, match=f"did you mean '{ours}'"):
            PipelineConfig(schedule=name)
    with pytest.raises(ValueError, match="zb-v has 2 chunks per rank, got chunks 3"):
        PipelineConfig(schedule="zb-v", chunks=3)


def test_where_auto_has_its_stages():
    assert PipelineConfig(schedule="auto").placement(2) == (0, 1, 1, 0)
    assert PipelineConfig(schedule="auto", chunks=3).placement(2) == (0, 1, 0, 1, 0, 1)


def test_what_the_data_ranks_are_told():
    assert ModelConfig(fp16=True).transformer().params_dtype == torch.float16
    assert DataParallelConfig().offload_policy() is None
    told = DataParallelConfig(zero_stage=3, grad_dtype="bfloat16", offload="optimizer", offload_fraction=0.5)
    assert told.offload_policy() == Offload(kind="cpu", fraction=0.5)
    assert replace(told, offload_directory="d").offload_policy() == Offload(kind="disk", fraction=0.5, directory="d")
    arguments = told.arguments()
    assert arguments["grad_dtype"] is torch.bfloat16 and arguments["zero_stage"] == 3
    parameters = inspect.signature(DataParallel).parameters
    assert arguments.keys() <= parameters.keys()
    assert DataParallelConfig().arguments() == {name: parameters[name].default for name in arguments}


def test_what_the_update_needs_may_be_given():
    run = FITS | {"model": replace(MODEL, bf16=True), "optimizer": OptimizerConfig(main_params=False)}
    check_run(**run, world_size=1)
    run = FITS | {"model": replace(MODEL, fp16=True), "data_parallel": DataParallelConfig(reduce_dtype="float16")}
    check_run(**run, world_size=1)
    cut = {"data_parallel": DataParallelConfig(zero_stage=3), "parallel": ParallelConfig(tensor=2)}
    check_run(**FITS | cut, optimizer=OptimizerConfig(optimizer="muon"), world_size=4)
