"""A run from defaults, files and flags: merged first and judged once, the same whichever way a value comes."""

import sys

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from core.extras import install
from core.interop.deepspeed import from_deepspeed
from core.training import RunConfig, load_run
from core.training.config import ConfigError
from core.training.config.explain import explained
from core.training.config.flags import COMMON, flag_of
from core.training.config.run import known_fields
from core.training.config.sources import merge

FILE = """\
device = "cpu"
data.sequence_length = 64
[training]
# seed = 5 \"\"\"
train_steps = 0   # no run
output = \"\"\"
micro_batch_size = 3
[optimizer]
\"\"\"
'seed' = 7
[ optimizer ] # its rates
lr = 3e-4
lr_schedule_options = { warmup_num_steps = 5 }
[parallel]
order = [
  "pp", "dp",
  "cp", "tp"]
[model]
"style" = "gpt2"
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "run.toml").write_text(FILE)
    return str(tmp_path / "run.toml")


def test_flags_repair_what_the_file_breaks(file):
    flags = ["--config", file, "--training.train-steps", "9", "--optimizer.lr-schedule=WarmupLR"]
    loaded = load_run(flags, defaults={"optimizer.lr": 1.0, "training.log_interval": 3})
    run = loaded.run
    assert (run.training.train_steps, run.optimizer.lr, run.training.log_interval) == (9, 3e-4, 3)
    assert run.training.micro_batch_size == 2 and run.training.seed == 7 and run.model.style == "gpt2"
    told = {name: where for name, where in loaded.origin.items() if where != "default"}
    assert told == {
        "device": f"{file}:1",
        "data.sequence_length": f"{file}:2",
        "training.train_steps": "--training.train-steps",
        "training.output": f"{file}:6",
        "training.seed": f"{file}:10",
        "optimizer.lr": f"{file}:12",
        "optimizer.lr_schedule_options": f"{file}:13",
        "optimizer.lr_schedule": "--optimizer.lr-schedule",
        "parallel.order": f"{file}:15",
        "model.style": f"{file}:19",
        "training.log_interval": "script",
    }
    assert loaded.origin.keys() == known_fields().keys()
    assert f"optimizer.lr = 0.0003  ({file}:12)" in loaded.lines() and len(loaded.lines()) == len(told)


def test_a_later_file_wins_and_what_follows_a_field_is_said(file, tmp_path):
    (tmp_path / "more.toml").write_text('optimizer = {lr_schedule = "cosine", lr_schedule_options = {}}\n')
    flags = ["--config", file, "--config", str(tmp_path / "more.toml"), "--training.train_steps", "12"]
    loaded = load_run(flags)
    assert loaded.run.optimizer.lr_decay_steps == 12, "flags win over files"
    assert loaded.origin["optimizer.lr_decay_steps"] == "training.train_steps"
    assert loaded.origin["optimizer.lr_schedule"] == f"{tmp_path}/more.toml:1", "the line of the table that holds it"


def test_all_mistakes_of_all_sources_are_told_once_with_their_origin(file, capsys):
    flags = ["stray", "--config", file, "--config", "nowhere.toml", "--optimizer.lrr", "3", "--model.bf16=True"]
    flags += ["--training.log-interval", "1.5", "--optimizer.no-lr", "--data-parallel.overlap", "maybe", "--device"]
    with pytest.raises(SystemExit) as end:
        load_run([*flags, "--parallel.tensor", "5", "--optimizer.momentum", "-x"], defaults={"training.sed": 1})
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    first, *lines = said.err.splitlines()
    assert first == f"error: this run has {len(lines)} mistakes:"
    assert {line.strip() for line in lines} == {
        "nowhere.toml does not exist; `python -m core.training.config --template nowhere.toml` writes one",
        "--model.bf16=True: a value is one word too many; use --model.bf16 or --model.no-bf16",
        "--optimizer.momentum has no value; give --optimizer.momentum VALUE",
        "--device has no value; give --device VALUE",
        "'stray' belongs to no flag; give --NAME stray",
        "unknown optimizer.lrr; did you mean optimizer.lr?",
        "unknown optimizer.no_lr; did you mean optimizer.min_lr?",
        "unknown training.sed; did you mean training.seed? (script)",
        "training.log_interval=1.5 is a decimal number, an integer is needed (--training.log-interval)",
        "data_parallel.overlap='maybe' is text, true or false (no quotes) or None is needed "
        "(--data-parallel.overlap)",
        f"training: train_steps=0 must be at least 1 (train_steps: {file}:5)",
        "optimizer: lr_schedule=cosine has its own fields and takes 0 lr_schedule_options, 1 given "
        "(warmup_num_steps); leave them out",
        "num_attention_heads=8 does not divide over tensor_model_parallel_size=5; valid: 1, 2, 4, 8",
        "num_query_groups=8 does not divide over tensor_model_parallel_size=5; valid: 1, 2, 4, 8",
        "ffn_hidden_size=512 does not divide over tensor_model_parallel_size=5; valid: 1, 2, 4, 8, 16, 32, 64",
    }


def test_one_mistake_is_one_line_and_other_ranks_are_silent(capsys, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        load_run(["--training.train-steps", "0"])
    said = capsys.readouterr().err
    assert said == "error: training: train_steps=0 must be at least 1 (train_steps: --training.train-steps)\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        load_run(["--training.train-steps", "0"])
    assert capsys.readouterr() == ("", "")


def test_the_flags_of_this_process_are_the_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--training.seed", "5"])
    assert load_run().run.training.seed == 5


def test_what_the_library_refuses_is_told_without_its_frame(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        print("╭─ Parsing error ─╮\n│ no such  thing │", file=sys.stderr)
        raise SystemExit(2)

    monkeypatch.setattr("tyro.cli", refuse)
    with pytest.raises(SystemExit, match="2"):
        load_run([])
    assert capsys.readouterr() == ("", "error: Parsing error no such thing\n")


def test_flags_of_every_kind():
    flags = ["--parallel.sequence-parallel", "--model.no-tie-embeddings", "--data-parallel.overlap", "true"]
    flags += [
        "--data.train",
        "0.5",
        "a",
        "0.5",
        "b",
        "--data.valid=v",
        "--optimizer.lr",
        "1e-3",
        "--optimizer.min-lr=0",
    ]
    flags += [
        "--model.ffn-hidden-size",
        "None",
        "--optimizer.lr-schedule",
        "OneCycle",
        "--checkpoint.keep-every",
        "-0",
    ]
    flags += ["--optimizer.lr-schedule-options", "cycle_min_lr", "0", "cycle_max_lr", "1", "cycle_momentum", "False"]
    run = load_run(flags).run
    assert run.parallel.sequence_parallel and not run.model.tie_embeddings and run.data_parallel.overlap is True
    assert run.data.train == ("0.5", "a", "0.5", "b") and run.data.valid == ("v",)
    assert run.model.ffn_hidden_size is None and run.optimizer.lr_schedule_options["cycle_max_lr"] == 1.0


def test_a_table_with_a_word_left_over():
    with pytest.raises(
        ConfigError, match=r"lr_schedule_options=\('a', '1', 'b'\) is a list, a table of texts and numbers"
    ):
        merge(["--optimizer.lr-schedule-options", "a", "1", "b"]).loaded()


@pytest.mark.parametrize("name, empty", [("data.train", ()), ("optimizer.lr_schedule_options", {})])
def test_a_list_or_table_without_words_is_a_mistake_and_an_empty_one_is_said(name, empty):
    flag = flag_of(name)
    for flags in ([flag], [flag, "--training.seed", "5"]):
        with pytest.raises(
            ConfigError, match=f"{flag} has no value; give {flag} VALUE ..., or {flag} None for an em"
        ):
            merge(flags).loaded()
    before = {"data.train": ["nowhere"], "optimizer.lr_schedule_options": {"a": 1}}
    assert merge([flag, "None"], defaults={name: before[name]}).loaded().run.flat()[name] == empty
    assert RunConfig.from_dict({name: empty}).flat()[name] == empty


def test_a_flag_is_told_as_it_was_typed():
    origin = merge(["--model.no-bf16", "--training.train_steps", "5", "--optimizer.lr=1"]).loaded().origin
    told = {origin[name] for name in ("model.bf16", "training.train_steps", "optimizer.lr")}
    assert told == {"--model.no-bf16", "--training.train_steps", "--optimizer.lr"}


def test_a_stray_dash_dash_is_told_and_the_flags_after_it_are_read():
    merged = merge(["--", "--optimizer.lr", "0.5"])
    with pytest.raises(ConfigError) as error:
        merged.loaded()
    assert [problem.text for problem in error.value.problems] == [
        "'--' is a stray word among the flags; leave it out"
    ]
    assert merged.draft.values["optimizer.lr"] == 0.5


def test_what_follows_a_field_still_follows_it_in_a_saved_file(tmp_path):
    loaded = load_run(["--optimizer.lr-schedule", "cosine", "--training.train-steps", "70", "--model.seed", "3"])
    text = loaded.to_toml(tmp_path / "new" / "run.toml")
    again = load_run(["--config", str(tmp_path / "new" / "run.toml")])
    assert again.run == loaded.run and again.to_toml() == text
    longer = load_run(["--config", str(tmp_path / "new" / "run.toml"), "--training.train-steps", "90"]).run
    assert longer.optimizer.lr_decay_steps == 90
    said = load_run(["--optimizer.lr-schedule", "cosine", "--optimizer.lr-decay-steps", "80"]).to_toml()
    assert "lr_decay_steps = 80" in said, "what somebody said stays"


def test_help_tells_every_field_with_its_docstring_and_the_scripts_default(capsys):
    with pytest.raises(SystemExit) as end:
        load_run(["--help-all"], defaults={"optimizer.lr": 0.125}, description="What this script does.")
    said = capsys.readouterr()
    text = " ".join(said.out.replace("│", " ").split())
    assert end.value.code == 0 and "What this script does." in text and not said.err
    for field in known_fields().values():
        assert field.help.endswith((".", "?")) and field.help in text, field.name
        assert flag_of(field.name) in text
    assert "(default: 0.125)" in text and "--parallel.sequence-parallel, --parallel.no-sequence-parallel" in text


def test_help_is_short_and_names_the_long_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        load_run(["--help"], defaults={"optimizer.lr": 0.125}, description="What this script does.")
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and lines[0] == "What this script does." and "--help-all" in lines[2]
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown == ["--config", *map(flag_of, COMMON)] and len(shown) <= 30 and max(map(len, lines)) <= 80
    assert "  --optimizer.lr NUMBER  (default: 0.125)" in lines
    assert any(line.startswith("      0: nothing is divided; 1: optimizer states; 2: ") for line in lines)


def test_without_tyro_files_still_work(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    with pytest.raises(SystemExit, match="2"):
        load_run([])
    assert capsys.readouterr().err == f"error: the command line needs tyro: {install('train')}\n"
    assert RunConfig.from_dict({"device": "cpu"}).device == "cpu"


def test_the_flags_of_a_ds_config_are_flags_of_a_run():
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    found = from_deepspeed(config, data_ranks=8)
    run = load_run(found.flags()).run
    made = {f"{part}.{name}": value for part, fields in found.fields.items() for name, value in fields.items()}
    assert run == RunConfig.from_dict(made) and run.data_parallel.zero_stage == 2 and run.model.bf16


# Values that a file, a command line and Python can all say, right and wrong ones.
WORD = st.text('abcxyz0.=/ é"\\', min_size=0, max_size=6)
VALUES = {
    "integer": st.one_of(st.integers(-2, 16), st.sampled_from([24, 48, 257, 10**6, 1.5, 64.0, "abc", "None", ""])),
    "number": st.one_of(st.integers(-1, 3), st.floats(-2, 2), st.sampled_from([1e-4, 1e-30, "abc", "None"])),
    "flag": st.booleans(),
    "text": WORD,
    "texts": st.lists(st.one_of(WORD, st.sampled_from(["0.5", "tp", "dp", "cp", "pp"])), max_size=4),
    "table": st.dictionaries(st.sampled_from(["warmup_num_steps", "a"]), st.floats(0, 2), max_size=2),
}


def values_of(field):
    """Mostly its choices where it has some; whether a flag may be None too."""
    usual = st.just(field.default)
    if field.choices:
        usual = st.sampled_from(field.choices)
    elif field.key == "lr_schedule":
        usual = st.sampled_from(["constant", "cosine", "wsd", "linear", "WarmupLR", "OneCycle"])
    elif field.key == "schedule":
        usual = st.sampled_from(["gpipe", "zb-v", "interleaved-1f1b", "auto"])
    value = st.one_of(usual, VALUES[field.kind])
    if field.kind == "flag" and field.optional:
        value = st.one_of(value, st.sampled_from(["None", "maybe"]))
    return value.map(lambda value: "None" if value is None else value)


def described(draw):
    """(flat name -> value of a few fields, those of them that flags give)."""
    names = draw(st.lists(st.sampled_from(sorted(known_fields())), max_size=8, unique=True))
    flags = draw(st.one_of(st.just(names), st.just([name for name in names if draw(st.booleans())])))
    return {name: draw(values_of(known_fields()[name])) for name in names}, flags


def nested(flat):
    made = {}
    for name, value in flat.items():
        part, _, key = name.rpartition(".")
        (made.setdefault(part, {}) if part else made)[key] = list(value) if isinstance(value, tuple) else value
    return made


def as_flags(flat):
    for name, value in flat.items():
        if isinstance(value, bool) and not known_fields()[name].optional:
            part, _, key = name.rpartition(".")
            yield flag_of(name if value else f"{part}.no_{key}")
        elif isinstance(value, dict):
            yield from (flag_of(name), *([str(word) for pair in value.items() for word in pair] or ["None"]))
        elif isinstance(value, list | tuple):
            yield from (flag_of(name), *(value or ["None"]))
        else:
            yield from (flag_of(name), str(value))


def outcome(read):
    """The run, or all that is said."""
    try:
        return read()
    except ConfigError as error:
        return sorted(problem.text for problem in error.problems)


def fits(run):
    """Whether it is a run, and one for two ranks."""
    if not isinstance(run, RunConfig):
        return False
    try:
        return run.check(2).parallel.data is not None
    except ValueError as error:
        assert str(error).startswith("this run: ")
        return False


def agree(flat, flags, path):
    """Python and a file, and a file for some and flags for the other fields, say the same."""
    path.write_text(tomli_w.dumps(nested(flat)), encoding="utf-8")
    python = outcome(lambda: RunConfig.from_dict(nested(flat)))
    assert outcome(lambda: RunConfig.from_toml(path)) == python
    path.write_text(tomli_w.dumps(nested({name: flat[name] for name in flat if name not in flags})), encoding="utf-8")
    merged = merge(["--config", str(path), *as_flags({name: flat[name] for name in flags})])
    assert outcome(lambda: merged.loaded().run) == python
    assert (explained(merged, 2)[1] == 0) == fits(python)
    if isinstance(python, RunConfig):
        path.write_text(python.to_toml(), encoding="utf-8")
        assert (
            RunConfig.from_toml(path) == python and RunConfig.from_dict(python.to_dict()).digest() == python.digest()
        )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "run.toml"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_python_files_and_flags_agree(data, path):
    agree(*described(data.draw), path)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_python_files_and_flags_agree_on_sixty_runs(data, path):
    agree(*described(data.draw), path)


@pytest.mark.full
@pytest.mark.product
@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_python_files_and_flags_agree_on_a_thousand_runs(data, path):
    agree(*described(data.draw), path)
