"""What is said about a mistake in the description of a run, word by word."""

import dataclasses
import re

import pytest

from core import __version__
from core.elsewhere import ELSEWHERE, REMARKS, TORCHTITAN
from core.training import DataConfig, RunConfig, TrainingConfig, load_run
from core.training.config import CheckpointConfig
from core.training.config.messages.deepspeed import AS_COMMAND, DEEPSPEED
from core.training.config.messages.huggingface import HUGGINGFACE
from core.training.config.messages.megatron import MEGATRON
from core.training.config.messages.names import unknown
from core.training.config.run import between, known_fields
from core.training.config.sources import checked, merge

IN_TOML = "a run is described in TOML: [optimizer], and below it lr = 3e-4"
FILES = {
    "a field twice": (
        "[optimizer]\nlr = 1e-3\nlr = 2e-3\n",
        "line 3: optimizer.lr is there twice, first in line 2; leave one out",
    ),
    "a part twice": (
        "[optimizer]\nlr = 1e-3\n[model]\nseed = 1\n[optimizer]\nclip_grad = 1\n",
        "line 5: [optimizer] is there twice, first in line 1; put its fields together",
    ),
    "a broken header": (
        "[optimizer\nlr = 1e-3\n",
        "line 1: [optimizer is no header of a part; write [optimizer], and its fields in the lines below",
    ),
    "None": (
        "[model]\nffn_hidden_size = None\n",
        'line 2: model.ffn_hidden_size = None: write "None" in quotes, or leave the line out',
    ),
    "null": ("device = null\n", 'line 1: device = null: write "None" in quotes, or leave the line out'),
    "True": (
        "[parallel]\nsequence_parallel = True  # as in Python\n",
        "line 2: parallel.sequence_parallel = True: write true, in small letters",
    ),
    "no quotes": (
        "[model]\nstyle = llama\n",
        'line 2: model.style = llama: a text stands in quotes; write "llama"',
    ),
    "JSON": ('{"optimizer": {"lr": 1e-3}}\n', f"it is JSON; {IN_TOML}"),
    "DeepSpeed's": (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}\n',
        f"it is DeepSpeed's; {AS_COMMAND}",
    ),
    "YAML": ("optimizer:\n  lr: 0.001\n", f"line 1: 'optimizer:' looks like YAML; {IN_TOML}"),
    "a word": ("hello\n", "line 1: 'hello' is no setting (name = value) and no header ([part])"),
    "half a text": ('[data]\ntrain = "corpus\n', "line 2: data.train = \"corpus: illegal character '\\n'"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_toml(case, tmp_path, capsys):
    text, message = FILES[case]
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        load_run(["--config", str(path)])
    assert capsys.readouterr().err == f"error: {path} cannot be read as TOML: {message}\n"


FLAGS = {
    "a value behind a switch": (
        ["--parallel.sequence-parallel", "True"],
        "--parallel.sequence-parallel takes no value, 'True' is one word too many; use --parallel.sequence-parallel "
        "or --parallel.no-sequence-parallel",
    ),
    "two values": (
        ["--optimizer.lr", "1", "2"],
        "--optimizer.lr takes one value, '2' is one too many; leave it out",
    ),
    "a flag twice": (["--optimizer.lr", "1", "--optimizer.lr", "2"], "--optimizer.lr is given twice; leave one out"),
    "two spellings": (
        ["--optimizer.min-lr=0", "--optimizer.min_lr=1e-5"],
        "--optimizer.min-lr and --optimizer.min_lr are both given; leave one out",
    ),
    "yes and no": (
        ["--model.bf16", "--model.no-bf16"],
        "--model.bf16 and --model.no-bf16 are both given; leave one out",
    ),
    "a list twice": (
        ["--data.train", "None", "--data.train", "None"],
        "--data.train is given twice; give all its values after one --data.train",
    ),
    "two files": (["--config", "a.toml", "b.toml"], "'b.toml' belongs to no flag; give --config b.toml"),
    "a file alone": (["run.toml"], "'run.toml' belongs to no flag; give --config run.toml"),
    "a word alone": (["stray"], "'stray' belongs to no flag; give --NAME stray"),
    "a device": (
        ["--device", "gpu"],
        "device='gpu': torch calls it cuda (NVIDIA, AMD), xpu (Intel) or npu; or leave it out (--device)",
    ),
    "an empty corpus": (
        ["--data.train", ""],
        "data: train has an empty prefix; give that of a .bin and .idx, or leave train out",
    ),
    "Megatron's full": (
        ["--training.recompute", "full"],
        "training: unknown recompute 'full'; known: none, selective, layer, stage; what Megatron calls full is layer "
        "here",
    ),
    "a dtype": (
        ["--model.dtype", "bf16"],
        "unknown model.dtype; give model.bf16 or model.fp16; without them weights are float32",
    ),
    "two dtypes": (
        ["--model.bf16", "--model.fp16"],
        "model: bf16 and fp16 are 2 dtypes for one model; give one of them",
    ),
    "no such field": (
        ["--training.new-field", "1"],
        "unknown training.new_field; `python -m core.training.config --template` lists the fields of training",
    ),
    "nearly a field": (
        ["--training.train-step", "1"],
        "unknown training.train_step; did you mean training.train_steps?",
    ),
}


def told(flags):
    merged = merge(flags)
    return [merged.with_origin(problem) for problem in (*merged.problems, *between(merged.draft.sections))]


@pytest.mark.parametrize("case", FLAGS)
def test_a_command_line(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("")
    flags, message = FLAGS[case]
    assert told(flags) == [message]


def test_names_from_elsewhere_lead_to_fields_that_exist():
    fields = known_fields()
    assert not [name for name in (*ELSEWHERE.values(), *TORCHTITAN.values()) if name not in fields]
    assert not {*ELSEWHERE, *REMARKS} & {field.key for field in fields.values()}
    assert not set(TORCHTITAN) & set(fields)
    assert not (MEGATRON.keys() & {*ELSEWHERE, *REMARKS}), "one answer to a name"
    assert not (HUGGINGFACE.keys() & {*ELSEWHERE, *REMARKS, *MEGATRON}), "one answer to a name"
    assert not (DEEPSPEED.keys() & {*ELSEWHERE, *REMARKS, *MEGATRON, *HUGGINGFACE}), "one answer to a name"
    answers = [*MEGATRON.values(), *HUGGINGFACE.values()]
    named = {name for answer in answers for name in re.findall(r"\b(\w+\.\w+)\b", answer)}
    parts = {name.partition(".")[0] for name in fields}
    assert not [name for name in named if name.partition(".")[0] in parts and name not in fields]


def test_every_argument_of_the_trainer_has_an_answer():
    """Of transformers' Trainer all; of TRL and peft, which are not installed here, those that users give."""
    transformers = pytest.importorskip("transformers")
    fields = known_fields()
    answered = {*ELSEWHERE, *REMARKS, *MEGATRON, *HUGGINGFACE, *(field.key for field in fields.values())}
    assert not {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - answered
    assert unknown("lora_r", fields) == "unknown lora_r; did you mean lora.rank?"
    assert unknown("lora.r", fields) == "unknown lora.r; did you mean lora.rank?"
    for name in ("beta", "loss_type"):
        assert unknown(name, fields) == f"unknown {name}; did you mean dpo.{name}?"
    assert unknown("max_seq_length", fields).endswith("give data.sequence_length")
    assert unknown("packing", fields).startswith("unknown packing; leave it out: conversations are packed")
    assert "model.seed" in unknown("seed", fields) and "checkpoint.load" in unknown("resume_from_checkpoint", fields)


# of SFTTrainer and its SFTConfig, beside what is the Trainer's
OF_TRL = (
    "args train_dataset eval_dataset processing_class peft_config data_collator formatting_func compute_metrics "
    "compute_loss_func optimizers callbacks shuffle_dataset max_length max_seq_length packing packing_strategy "
    "padding_free eval_packing completion_only_loss assistant_only_loss chat_template_path dataset_text_field "
    "dataset_kwargs dataset_num_proc eos_token pad_token pad_to_multiple_of activation_offloading model_init_kwargs "
    "neftune_noise_alpha use_liger_kernel response_template trust_remote_code resume_from_checkpoint"
)


@pytest.mark.parametrize("name", OF_TRL.split())
def test_every_argument_of_trls_trainer_has_an_answer_of_its_own(name):
    said = unknown(name, known_fields())
    assert "did you mean" not in said and "the parts are" not in said
    # in Python too, whichever part of a run it is given to
    for part in (TrainingConfig, DataConfig, CheckpointConfig, RunConfig):
        with pytest.raises(ValueError, match=rf"{part.__name__} has no {name} \((give|leave|not here)"):
            part(**{name: 1})


def test_a_configuration_of_deepspeeds_is_told_as_one():
    with pytest.raises(ValueError, match=r"configuration of DeepSpeed's; give .* from_deepspeed\(FILE, data_"):
        RunConfig.from_dict({"train_batch_size": 8, "bf16": {"enabled": True}})
    fields = known_fields()
    assert unknown("bf16.enabled", fields) == "unknown bf16.enabled; did you mean model.bf16?"
    assert unknown("zero_optimization.stage", fields).endswith("; give data_parallel.zero_stage")
    assert unknown("deepspeed_config", fields).startswith(
        "unknown deepspeed_config; python -m core.interop.deepspeed FILE"
    )


ANOTHER_MODEL = "not here, and a model without it is another one; model.build=package.module:function takes any model"
# as they are typed behind pretrain_gpt.py
MEGATRON_FLAGS = {
    "--load": "unknown load; give checkpoint.directory, as for save: a run goes on from its newest step there, and "
    "begins where there is none; checkpoint.load goes on from one checkpoint of another run, checkpoint.weights "
    "begins with one",
    "--checkpoint.lod": "unknown checkpoint.lod; did you mean checkpoint.load?",
    "--exit-interval": "give training.train_steps, and optimizer.lr_decay_steps where the schedule ends later",
    "--vocab-file": "give data.tokenizer, a tokenizer.json of Hugging Face's, which holds vocabulary and merges",
    "--mtp-num-layers": ANOTHER_MODEL,
    "--untie-embeddings-and-output-weights": "give model.tie_embeddings=false",
    "--disable-bias-linear": "give model.add_bias_linear=false; model.style=llama, the default, has none",
    "--model.disable-bias-linear": "give model.add_bias_linear=false; model.style=llama, the default, has none",
    "--use-distributed-optimizer": "leave it out: data_parallel.zero_stage=1 is the default",
    "--no-bias-gelu-fusion": "leave it out: torch's own operations are used",
    "--optimizer": "give optimizer.optimizer: adamw (their adam), sgd, muon, lion or lamb",
    "--rope-scaling-factor": "give model.rotary_scaling kind llama3 factor 8 ... (a table)",
    "--exit-signal-handler": "leave it out: a run saves at SIGTERM and ends, where checkpoint.directory is given",
}


@pytest.mark.parametrize("flag", MEGATRON_FLAGS)
def test_a_flag_of_megatron_s(flag):
    answers = told([flag, "3"])
    assert len(answers) == 1 and answers[0].endswith(MEGATRON_FLAGS[flag])


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("training.max_norm", "did you mean optimizer.clip_grad?"),
        ("training.dataset", "did you mean data.train?"),
        ("training.seq_len", "did you mean data.sequence_length?"),
        ("parallelism.pipeline_parallel_degree", "did you mean parallel.pipeline?"),
        ("parallelism.data_parallel_replicate_degree", "did you mean parallel.replicate?"),
        ("validation.steps", "did you mean training.eval_batches?"),
        ("training.steps", "did you mean training.train_steps?"),
        ("training.num_hidden_layers", "did you mean model.num_layers?"),
        (
            "training.gradient_accumulation_steps",
            "the batch sizes decide it; give global_batch_size and micro_batch_size",
        ),
        ("training.num_train_epochs", "a run is measured in updates; give training.train_steps"),
        ("model.fp8_format", "give model.fp8, e4m3 or hybrid"),
        (
            "profiling.enable_profiling",
            "give training.profile=10:12, steps from 0, the last one excluded",
        ),
        (
            "profiling.save_traces_folder",
            "the parts are checkpoint, data, data_parallel, dpo, lora, model, optimizer, parallel, pipeline, "
            "training",
        ),
    ],
)
def test_a_name_from_elsewhere_is_mapped_or_not_guessed(name, remedy):
    section, _, key = name.partition(".")
    assert told([f"--{section}.{key.replace('_', '-')}", "1"]) == [f"unknown {name}; {remedy}"]


SPELT_LIKE_ANOTHER_FIELD = {
    "legacy_tokenizer": "leave it out: data.tokenizer is a tokenizer.json of Hugging Face's",
    "hybrid_attention_ratio": ANOTHER_MODEL,
    "mamba_head_dim": ANOTHER_MODEL,
    "num_classes": ANOTHER_MODEL,
    "local_batch_size": "did you mean training.micro_batch_size?",
    "dataset": "did you mean data.train or data.valid?",
    "steps": "did you mean training.train_steps?",
    "out_dir": "give checkpoint.directory for checkpoints, training.output for records and reports",
    "init_from": "leave it out: a run goes on from its own checkpoint.directory; checkpoint.load names one of "
    "another run, model.huggingface weights to begin with",
    "wandb_log": "did you mean training.wandb_project?",
    "zero": "did you mean data_parallel.zero_stage?",
    "bias": "give model.add_bias_linear for those of linears; peft's: leave it out, adapters alone are trained",
    "traning.frobnicate": "did you mean the part training?",
    "eps": "did you mean optimizer.adam_eps?",
    "beta2": "did you mean optimizer.adam_beta2?",
    "betas": "give optimizer.adam_beta1 and optimizer.adam_beta2",
    "train_batch_size": "did you mean training.global_batch_size?",
    "sequence_parallel_size": "did you mean parallel.context?",
    "block_size": "did you mean data.sequence_length?",
    "scheduler": "did you mean optimizer.lr_schedule?",
    "log_every": "did you mean training.log_interval?",
    "save_every": "did you mean checkpoint.every?",
}


@pytest.mark.parametrize("name", SPELT_LIKE_ANOTHER_FIELD)
def test_a_name_from_elsewhere_is_not_answered_by_its_letters(name):
    assert unknown(name, known_fields()) == f"unknown {name}; {SPELT_LIKE_ANOTHER_FIELD[name]}"


def test_settings_without_effect_are_told():
    flags = ["--pipeline.schedule", "zb-v", "--parallel.sequence-parallel", "--checkpoint.keep-last", "9"]
    loaded = load_run([*flags, "--optimizer.lr", "1"])
    assert loaded.unused() == [
        "pipeline.schedule=zb-v has no effect: parallel.pipeline=1 has no stages that take turns",
        "parallel.sequence_parallel=True has no effect: parallel.tensor=1 leaves one rank with the whole sequence",
        "checkpoint.keep_last=9 has no effect: without checkpoint.directory nothing is saved",
    ]
    assert load_run(["--parallel.pipeline", "2", "--pipeline.schedule", "zb-v"]).unused() == []
    steps, share = ["--optimizer.lr-warmup-steps", "10"], ["--optimizer.lr-warmup-fraction", "0.3"]
    assert load_run([*steps, *share]).unused() == [
        "optimizer.lr_warmup_fraction=0.3 has no effect: optimizer.lr_warmup_steps is given"
    ]
    assert load_run(steps).unused() == load_run(share).unused() == []
    (told,) = load_run(["--lora.alpha", "32"]).unused()
    assert (
        told.startswith("lora.alpha=32.0 has no effect: without lora.rank") and "all of the model is trained" in told
    )
    (told,) = load_run(["--lora.alpha", "16"]).unused()
    assert told.startswith("lora.alpha=16.0 has no effect: without lora.rank"), "the default, typed"
    assert load_run(["--lora.alpha", "32", "--lora.rank", "8"]).unused() == []
    assert load_run([]).unused() == [] and load_run(["--checkpoint.keep-last", "3"]).unused() == [], "the default"


def test_what_text_needs_has_an_effect_beside_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text")
    flags = ["--data.vocab-size", "300", "--data.directory", "here"]
    # text, and the token file that it becomes
    assert load_run([*flags, "--data.train", "t.txt"]).unused() == []
    assert load_run([*flags, "--data.train", "here/t-0123"]).unused() == []
    assert load_run([*flags, "--data.train", "t.txt", "--data.tokenizer", "a.json"]).unused() == [
        "data.vocab_size=300 has no effect: data.tokenizer=a.json is given"
    ]
    assert load_run([*flags, "--data.train", "tokens"]).unused() == [
        "data.directory=here has no effect: data.train names token files",
        "data.vocab_size=300 has no effect: data.train names token files, and their tokenizer",
    ]


def test_a_written_file_tells_its_version(tmp_path):
    load_run([]).to_toml(tmp_path / "run.toml")
    assert (tmp_path / "run.toml").read_text().startswith(f"# written by paracore {__version__}\n")
    assert load_run(["--config", str(tmp_path / "run.toml")]).run == load_run([]).run


def test_what_several_rules_meet_is_one_mistake(tmp_path, capsys):
    with pytest.raises(SystemExit):
        checked(load_run(["--model.huggingface", str(tmp_path / "nowhere"), "--data.train", str(tmp_path / "x")]), 1)
    said = capsys.readouterr().err
    assert said.count("is no folder; give the one that save_pretrained or the Hub made") == 1
    (tmp_path / "x").write_text("text")
    with pytest.raises(SystemExit):
        checked(load_run(["--model.huggingface", str(tmp_path / "nowhere"), "--data.train", str(tmp_path / "x")]), 1)
    said = capsys.readouterr().err
    assert "is no folder" in said and "tokenizer.json" not in said, "no mistake but that one"
    assert said.count("model.huggingface=") == 1


SIZES = ["--num-layers", "12", "--hidden-size", "64", "--num-attention-heads", "4"]


@pytest.mark.parametrize("flags, is_told", [(SIZES, True), (SIZES[:4], False), (["--model.num-layers", "12"], False)])
def test_a_script_of_megatrons_is_told_which_defaults_differ(capsys, monkeypatch, flags, is_told):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        load_run([*flags, "--unknown", "1"])
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert ("--model.style gpt2 --model.ffn-hidden-size (4 x hidden_size)" in last) == is_told
