"""A run from plain values: what is wrong is told at once, by name, with both values and the remedy."""

import builtins
import io
import os
import pathlib
import re
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager

import pytest
import torch

from core.models import gpt
from core.optimizer import OptimizerConfig
from core.parallel_state.config import divisors
from core.training import DataConfig, RunConfig, TrainingConfig
from core.training.config import ConfigError
from core.training.config.messages.names import ELSEWHERE
from core.training.config.run import known_fields
from core.training.config.sources import merge

ROOT = pathlib.Path(__file__).parents[2]
COSINE = {"optimizer.lr_schedule": "cosine"}

# what is given, for how many ranks, what is said
WRONG = [
    ({"optimizer": {"lrr": 3e-4}}, 1, "unknown optimizer.lrr; did you mean optimizer.lr?"),
    ({"optimiser": {"lr": 3e-4}}, 1, "unknown optimiser.lr; did you mean optimizer.lr?"),
    ({"lr": 3e-4}, 1, "unknown lr; did you mean optimizer.lr?"),
    ({"tensor_model_parallel_size": 2}, 1, "unknown tensor_model_parallel_size; did you mean parallel.tensor?"),
    ({"training": {"learning_rate": 1}}, 1, "unknown training.learning_rate; did you mean optimizer.lr?"),
    (
        {"training": {"sequence_length": 64}},
        1,
        "unknown training.sequence_length; did you mean data.sequence_length?",
    ),
    ({"training": {"sed": 1}}, 1, "unknown training.sed; did you mean training.seed?"),
    (
        {"zzz": {}},
        1,
        "unknown zzz; the parts are checkpoint, data, data_parallel, dpo, lora, model, optimizer, parallel, pipeline",
    ),
    ({"training": 3}, 1, "training is a part of a run, with fields of its own; give training.objective or others"),
    ({"training": {"train_steps": "abc"}}, 1, "training.train_steps='abc' is text, an integer is needed"),
    ({"training": {"train_steps": 1.5}}, 1, "training.train_steps=1.5 is a decimal number, an integer is needed"),
    ({"training": {"train_steps": 1e3}}, 1, "train_steps=1000.0 is a decimal number, an integer is needed; use 1000"),
    ({"training": {"train_steps": True}}, 1, "training.train_steps=True is true, an integer is needed"),
    ({"training": {"train_steps": None}}, 1, "training.train_steps=None is nothing, an integer is needed"),
    ({"optimizer": {"lr": "fast"}}, 1, "optimizer.lr='fast' is text, a number is needed"),
    ({"optimizer": {"lr": float("nan")}}, 1, "optimizer.lr=nan is not finite, a number is needed"),
    (
        {"parallel": {"sequence_parallel": "true"}},
        1,
        "sequence_parallel='true' is text, true or false (no quotes) is",
    ),
    ({"parallel": {"sequence_parallel": 1}}, 1, "sequence_parallel=1 is an integer, true or false (no quotes) is"),
    ({"data_parallel": {"bucket_size": "big"}}, 1, "bucket_size='big' is text, an integer or None is needed"),
    ({"model": {"style": 2}}, 1, "model.style=2 is an integer, a text or None is needed"),
    ({"data": {"train": 5}}, 1, "data.train=5 is an integer, a list of texts is needed"),
    ({"data": {"train": [True]}}, 1, "data.train=[True] is a list with True, a list of texts is needed"),
    (
        {"optimizer": {"lr_schedule_options": [1]}},
        1,
        "lr_schedule_options=[1] is a list, a table of texts and numbers (of a flag: NAME VALUE NAME VALUE ...)",
    ),
    ({"model": {"style": "bert"}}, 1, "model: unknown style 'bert'; known: llama, gpt2"),
    ({"model": {"bf16": True, "fp16": True}}, 1, "model: bf16 and fp16 are 2 dtypes for one model; give one of them"),
    ({"model": {"num_attention_heads": 0}}, 1, "num_attention_heads=0 must be at least 1"),
    ({"model": {"hidden_size": 100}}, 1, "hidden_size=100 does not divide by num_attention_heads=8; use 96 or 104"),
    ({"parallel": {"tensor": 0}}, 1, "parallel: tensor=0 must be at least 1"),
    ({"parallel": {"tensor": 3}}, 4, "world size 4 is not a multiple of tensor(3) x pipeline(1) x context(1) = 3"),
    (
        {"parallel": {"tensor": 16}},
        16,
        "num_attention_heads=8 does not divide over tensor_model_parallel_size=16; valid",
    ),
    ({"parallel": {"order": ["tp"]}}, 1, "parallel: order=('tp',) must name each of ('pp', 'dp', 'cp', 'tp') once"),
    ({"parallel": {"pipeline": 8}}, 8, "num_layers=4 cannot fill 8 pipeline stages; use at most 4"),
    ({"pipeline": {"schedule": "zbv"}}, 1, "pipeline: there is no schedule 'zbv': did you mean 'zb-v'"),
    ({"data_parallel": {"zero_stage": 4}}, 1, "data_parallel: zero_stage=4 is unknown; known: 0, 1, 2, 3"),
    (
        {"data": {"valid": "v"}},
        1,
        "data: valid is given and train has 0 prefixes: the default corpus has its own valid",
    ),
    (
        {"data": {"split": "1,x,3"}},
        1,
        "data: split='1,x,3' must be 3 numbers, of train, valid and test, as '969,30,1'",
    ),
    ({"data": {"split": "0,1,1"}}, 1, "data: split='0,1,1' must have shares of at least 0, the first one above 0"),
    ({"data": {"vocab_size": 100}}, 1, "data: vocab_size=100 cannot hold every byte; use 257 or more"),
    (
        {"training": {"recompute": "all"}},
        1,
        "training: unknown recompute 'all'; known: none, selective, layer, stage",
    ),
    ({"training": {"eval_batches": -1}}, 1, "training: eval_batches=-1 must not be negative"),
    ({"training": {"peak_tflops": 0}}, 1, "training: peak_tflops=0.0 must be above 0; leave it out to have it found"),
    ({"training": {"global_batch_size": 100}}, 8, "micro_batch_size=2 x data(8) = 16; use 96 or 112"),
    ({"optimizer": {"lr": 1e-4, "min_lr": 1e-3}}, 1, "min_lr=0.001 must be between 0 and lr=0.0001"),
    (
        COSINE | {"optimizer.lr_warmup_steps": 500},
        1,
        "must be more than warmup_steps=500 (optimizer.lr_decay_steps foll",
    ),
    (
        {"optimizer": {"optimizer": "muon"}, "data_parallel": {"offload": "optimizer"}},
        1,
        "optimizer=muon takes parameters as a whole where its states are, offload_fraction=1.0",
    ),
    (
        {"optimizer": {"main_params": False}},
        1,
        "main_params=False rounds weights to bfloat16 stochastically, these are",
    ),
    ({"checkpoint": {"every": 5}}, 1, "checkpoint: every=5 and resume=auto need a directory; give one, or every=0"),
    ({"checkpoint": {"keep_last": 0}}, 1, "checkpoint: keep_last=0 must be at least 1"),
]


LOADED = (gpt.llama_spec, gpt.gpt2_spec)  # their modules are imported at first use, which reads files


@contextmanager
def nothing_outside():
    """No file is opened, and torch.distributed is not asked, by this thread: others of this process may go on."""
    caller = threading.get_ident()

    def refused(own):
        def refuse(*args, **kwargs):
            if threading.get_ident() != caller:
                return own(*args, **kwargs)
            raise AssertionError(f"outside of the process: {args}")

        return refuse

    distributed = ("init_process_group", "new_group", "get_rank", "get_world_size", "is_initialized")
    files = ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"))
    with pytest.MonkeyPatch.context() as patch:
        for place, name in (*((torch.distributed, name) for name in distributed), *files):
            patch.setattr(place, name, refused(getattr(place, name)))
        yield


def calls_of(run):
    """(how many Python functions a call calls, the ValueError that it raises)."""
    count, error = 0, None

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        run()
    except ValueError as raised:
        error = raised
    finally:
        sys.setprofile(None)
    return count, error


@pytest.mark.parametrize("given, world, message", WRONG, ids=[message[:60] for _, _, message in WRONG])
def test_a_wrong_run_is_refused_without_files_and_processes(given, world, message):
    with nothing_outside():
        calls, error = calls_of(lambda: RunConfig.from_dict(given).check(world))
    assert str(error).startswith("this run: ") and message in str(error)
    assert "; " not in str(error).partition(message)[0], "nothing else is told"
    assert calls < 20_000, "a call takes less than half a microsecond: that is less than 10 ms"


def test_a_configuration_is_read_without_the_code_that_trains():
    heavy = "core.autograd core.models.gpt.gpt_model core.optimizer.sharded torch._dynamo tensorstore tyro"
    code = f"import sys, core.training.config; print([m for m in {heavy.split()} if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert said.stdout == "[]\n"


def test_forty_and_more():
    assert len(WRONG) >= 40 and len({message for _, _, message in WRONG}) == len(WRONG)


def test_names_from_elsewhere_lead_to_fields_and_are_none():
    keys = {field.key for field in known_fields().values()}
    assert set(ELSEWHERE.values()) <= known_fields().keys() and not ELSEWHERE.keys() & keys


def test_all_parts_are_told_at_once():
    given = {
        "optimizer": {"lrr": 1, "lr": -1.0},
        "training": {"train_steps": "many", "micro_batch_size": 0},
        "model": {"hidden_size": 100},
        "data": {"vocab_size": 3},
        "parallel": {"tensor": 3},
    }
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(given)
    told = {problem.text for problem in error.value.problems}
    assert "training.train_steps='many' is text, an integer is needed" in told
    assert "unknown optimizer.lrr; did you mean optimizer.lr?" in told
    assert "training: micro_batch_size=0 must be at least 1" in told
    assert "data: vocab_size=3 cannot hold every byte; use 257 or more" in told
    assert any("and lr=-1.0" in text for text in told)
    assert any("hidden_size=100 does not divide" in text for text in told), "rules between the parts that are right"
    assert len(told) == 6


def test_numbers_that_are_far_too_large_are_refused_as_quickly():
    for given in (
        {"pipeline.chunks": 10**12},
        {"parallel.pipeline": 10**12},
        {"model.ffn_hidden_size": 10**15 + 1, "parallel.tensor": 2},
        {"training.global_batch_size": 10**9 + 7},
        {"training.train_steps": 10**400, "optimizer.lr": 10**400} | COSINE,
        {"training.train_steps": 2**62 + 1, "optimizer.lr_decay_steps": 2**63} | COSINE,
    ):
        calls, error = calls_of(lambda given=given: RunConfig.from_dict(given).check(2))
        assert calls < 20_000 and str(error).startswith("this run: ")


def test_only_small_divisors_of_a_large_number_are_looked_for():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(1) == [1] and divisors(65521) == [1, 65521]
    assert divisors(65537 * 65539) == [1, 65537 * 65539], "a loop to the root of 10**17 takes minutes"
    assert divisors(2 * 65537**2) == [1, 2, 65537**2, 2 * 65537**2]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"optimizer.lr": 10**400}, "optimizer.lr=10**400 is not finite, a number is needed"),
        ({"training.train_steps": -(10**400)}, "train_steps=-10**400 is beyond 64 bits, an integer is needed"),
        ({"training.train_steps": 2**63} | COSINE, f"training: train_steps={2**63} must be at most 2**62"),
        ({"optimizer.lr_warmup_steps": 2**63}, f"optimizer: lr_warmup_steps={2**63} must be at most 2**62"),
        (
            {"optimizer.lr_schedule": "WarmupLR", "optimizer.lr_schedule_options": {"warmup_num_steps": "inf"}},
            "optimizer: WarmupLR: warmup_num_steps='inf' is not of the kind int",
        ),
    ],
)
def test_numbers_beyond_floats_are_mistakes_and_no_overflow(given, said):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(given)
    (problem,) = error.value.problems
    assert said in problem.text


def test_steps_beyond_floats_are_refused_by_the_part_itself():
    with pytest.raises(ValueError, match=r"lr_decay_steps=10+ must be at most"):
        OptimizerConfig(lr_schedule="cosine", lr_decay_steps=10**400)
    with pytest.raises(ValueError, match=r"train_steps=10+ must be at most"):
        TrainingConfig(train_steps=10**400)


@pytest.mark.parametrize("device", ["cpu:x", "cuda:", "cuda:01", "cuda:128", "cuda:-1", "CPU", "", "cuda 1"])
def test_a_device_that_cannot_be_one_is_told_with_the_rest(device):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict({"device": device, "model.style": "bert"})
    style, place = error.value.problems
    assert "bert" in style.text and place.name == "device"
    assert place.text.startswith(f"device={device!r} must be a kind, as cpu or cuda, or kind:index with an index")
    with pytest.raises(ValueError, match="RunConfig: device="):
        RunConfig(device=device)


def test_devices_of_every_maker():
    for device in ("cpu", "cuda:127", "npu:0", "xpu", "privateuse1:3"):
        assert RunConfig(device=device) == RunConfig.from_dict({"device": device})


def test_a_field_that_is_given_twice_is_told_with_both_values(tmp_path):
    said = 'optimizer.lr is given twice, as "optimizer.lr" = 0.25 and as optimizer.lr = 0.5; leave one out'
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict({"optimizer.lr": 0.25, "optimizer": {"lr": 0.5}, "model.style": "bert"})
    assert [problem.text[:40] for problem in error.value.problems] == [
        said[:40],
        "model: unknown style 'bert'; known: llam",
    ]
    assert error.value.problems[0].text == said
    path = tmp_path / "twice.toml"
    path.write_text('"optimizer.lr" = 0.25\n[optimizer]\nlr = 0.5\n')
    for read in (RunConfig.from_toml, lambda path: merge(["--config", str(path)]).loaded()):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {said}")):
            read(path)


def test_what_is_no_mapping():
    for nothing, kind in (([], "list"), ("optimizer.lr=1", "str"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=f"from_dict was given a {kind}, a mapping is needed"):
            RunConfig.from_dict(nothing)
    for given, said in (
        ({"": 3}, "unknown ''; the parts are"),
        ({"": {"model": {"seed": 1}}}, "unknown .model.seed;"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            RunConfig.from_dict(given)


def test_a_wrong_number_of_steps_makes_nothing_else_wrong():
    with pytest.raises(ConfigError) as error:
        RunConfig.from_dict(COSINE | {"training.train_steps": 0, "optimizer.lr_warmup_steps": 50})
    assert [problem.text for problem in error.value.problems] == ["training: train_steps=0 must be at least 1"]


def test_the_end_of_the_schedule_is_the_end_of_the_training():
    run = RunConfig.from_dict(COSINE | {"training.train_steps": 70})
    told = {"lr_schedule": "cosine", "lr_warmup_fraction": 0.1, "weight_decay": 0.1}  # a run's own defaults
    assert run.optimizer == OptimizerConfig(**told, lr_decay_steps=70)
    assert RunConfig.from_dict(COSINE | {"optimizer.lr_decay_steps": 50}).optimizer.lr_decay_steps == 50
    for endless in ("constant", "inverse_sqrt", "LRRangeTest"):
        told = {"lr_schedule": endless, "lr_warmup_fraction": 0}
        assert RunConfig.from_dict({"optimizer": told}).optimizer.lr_decay_steps is None
    share = RunConfig.from_dict({"optimizer.lr_schedule": "constant", "training.train_steps": 50}).optimizer
    assert share.learning_rate.at(4) == share.lr > share.learning_rate.at(3), "a share of the training"


def test_values_take_the_form_that_the_dataclass_has():
    given = {
        "optimizer": {"lr": 1, "lr_schedule": "OneCycle", "lr_schedule_options": OPTIONS},
        "data": {"train": [0.5, "a", 2, "b"], "valid": pathlib.Path("v"), "directory": pathlib.Path("d")},
        "model": {"ffn_hidden_size": "None"},
    }
    run = RunConfig.from_dict(given)
    assert isinstance(run.optimizer.lr, float)
    assert run.optimizer.lr_schedule_options == {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_momentum": "false"}
    assert run.data.train == ("0.5", "a", "2", "b") and run.data.valid == ("v",) and run.data.directory == "d"
    assert run.model.ffn_hidden_size is None


OPTIONS = {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_momentum": False}


def test_a_run_of_parts_and_a_part_that_is_none():
    run = RunConfig(training=TrainingConfig(train_steps=5), data=DataConfig(train="a"))
    assert run == RunConfig.from_dict({"training.train_steps": 5, "data.train": ["a"]})
    with pytest.raises(ValueError, match="RunConfig: data is a dict, a DataConfig is needed; RunConfig"):
        RunConfig(data={"train": "a"})


def test_a_run_that_fits_gets_its_data_size():
    run = RunConfig.from_dict({"parallel.tensor": 2}).check(4)
    assert run.parallel.data == 2 and run.flat()["parallel.data"] == 2
    assert run.check(4) == run
    with pytest.raises(ValueError, match="data=2 x 2 model ranks is not the world size 8"):
        run.check(8)


def test_toml_and_back(tmp_path):
    run = RunConfig.from_dict(
        {
            "training.output": 'a "b"\\\n\x7f\u00e9\U0001f600',
            "model.ffn_hidden_size": None,
            "data.train": ["0.5", "x"],
        }
        | {"optimizer.lr_schedule": "OneCycle", "optimizer.lr_schedule_options": OPTIONS, "device": "cpu"}
    )
    text = run.to_toml(tmp_path / "new" / "run.toml")
    assert RunConfig.from_toml(tmp_path / "new" / "run.toml") == run
    assert RunConfig.from_dict(tomllib.loads(text)) == run == RunConfig.from_dict(run.to_dict())
    assert tomllib.loads(text)["model"]["num_query_groups"] == "None", "nothing is left to somebody's defaults"


def test_the_digest_is_of_the_values():
    run = RunConfig()
    assert run.digest() == RunConfig.from_dict(run.to_dict()).digest() == RunConfig.from_dict({}).digest()
    others = [{"device": "cpu"}, {"training.output": "x"}, {"optimizer.lr": 2e-3}, {"data.train": ["a"]}]
    assert len({run.digest(), *(RunConfig.from_dict(other).digest() for other in others)}) == 5
    assert re.fullmatch(r"[0-9a-f]{64}", run.digest())


def test_files_that_are_none(tmp_path):
    with pytest.raises(
        ValueError, match=r"none\.toml does not exist; `python -m core.training.config --template .*none"
    ):
        RunConfig.from_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\nstyle = 3")
    with pytest.raises(ValueError, match=r"bad\.toml cannot be read as TOML: .*line 1"):
        RunConfig.from_toml(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml cannot be read as TOML: 'utf-8'"):
        RunConfig.from_toml(tmp_path / "binary.toml")
    (tmp_path / "deep.toml").write_text("lr = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match=r"deep\.toml cannot be read as TOML: it is nested too deeply"):
        RunConfig.from_toml(tmp_path / "deep.toml")
    with pytest.raises(ValueError, match=r"cannot be read as TOML: Is a directory"):
        RunConfig.from_toml(tmp_path)


def test_weights_of_a_blend_stand_before_every_prefix():
    for train, message in (
        (["0.7", "a", "b"], "0.7 a b names 1 weights and 2 files; write prefixes alone, or weight prefix"),
        (["0.7", "nowhere/a", "0.3", "nowhere/b"], "nowhere/a.bin does not exist"),
        (["nowhere/a", "nowhere/b"], "nowhere/a.bin does not exist"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            RunConfig.from_dict({"data": {"train": train}}).check(1)
