"""A run that learns from preferences: what it tells, how it goes on with the same reference, what it refuses."""

import math
import re

import pytest
import torch

from core.pretrain import main as pretrain
from core.training import RunConfig, initialize
from core.training.config.texts import with_token_files
from core.training.evaluate import main as evaluate
from core.training.log.metrics import read_metrics
from core.training.log.validation import read_validations
from core.training.preferences.loss import NAMES
from core.training.preferences.rules import preferences_in
from tests.datasets.chats import lines

FIELDS = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "data.sequence_length": 32,
    "data.split": "80,20,0",
    "training.objective": "dpo",
    "training.train_steps": 6,
    "training.global_batch_size": 4,
    "training.micro_batch_size": 1,
    "optimizer.lr": 3e-3,
    "optimizer.lr_schedule": "constant",
    "device": "cpu",
}


def rows_of(tmp_path, name="pairs.jsonl", rows=30):
    pairs = [
        {"prompt": f"{i} + {j} =", "chosen": f" {i + j}.", "rejected": " Who knows?"}
        for i, j in (divmod(n, 6) for n in range(rows))
    ]
    return lines(tmp_path / name, pairs)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The fields of a run over prepared pairs, whose validation text is a part of them."""
    path = tmp_path_factory.mktemp("pairs")
    fields = FIELDS | {"data.train": rows_of(path), "data.directory": str(path / "prepared")}
    (prefix,) = with_token_files(RunConfig.from_dict(fields)).data.train
    return {"data.train": prefix, "data.directory": str(path / "prepared")}


def trained(data, **more):
    """The losses, and the rewards of the last step."""
    torch.set_default_dtype(torch.float32)  # a rank of the pool may have another
    fields = FIELDS | data | {name.replace("__", "."): value for name, value in more.items()}
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields))
    losses = [float(model.train_step(batch).loss) for batch in loader]
    rewards = model.loss_fn.rewards()
    model.close()
    return losses, rewards


def flags(fields):
    """As a command line has them."""
    words = []
    for name, value in fields.items():
        words += [f"--{name}", str(value)]
    return words


def test_a_run_tells_rewards_and_what_one_process_computes(data, tmp_path, capsys):
    more = {"training.output": str(tmp_path), "training.log_interval": 2, "training.eval_interval": 3}
    pretrain(flags(FIELDS | data | more | {"dpo.label_smoothing": 0.1, "optimizer.ema_decay": 0.5}))
    told = capsys.readouterr().out
    assert "preferences: 24 pairs of two rows of 32 tokens; the loss is DPO's (sigmoid), beta 0.1, label smoo" in told
    assert "reference: 30 pairs in " in told
    assert "first step here and in one process: loss 0.693147 and 0.693147" in told and "difference| 0.0e+00" in told
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 4, 6] and all(tuple(r.rewards) == NAMES for r in records)
    assert records[0].rewards["rewards/margins"] == 0 and records[-1].rewards["rewards/margins"] > 0.1
    assert records[-1].rewards["rewards/accuracies"] == 1 and records[-1].loss < 0.69
    assert re.search(
        r"step     6/6 \| loss 0\.\d+ \| rewards/chosen -?\d\.\d+ \| rewards/rejected -?\d\.\d+ \|", told
    )
    checked = read_validations(tmp_path / "metrics.jsonl")
    assert [(r.step, r.name, r.tokens) for r in checked] == [
        (step, name, 6) for step in (3, 6) for name in ("validation", "validation.ema")
    ]
    assert all(tuple(record.rewards) == NAMES and record.bits_per_byte is None for record in checked)
    assert checked[-2].rewards["rewards/margins"] > checked[0].rewards["rewards/margins"] > 0
    assert "step     6/6 | validation loss 0." in told and "bits per byte" not in told
    assert (tmp_path / "report.html").exists()


LAYOUTS = [
    (2, {"parallel__tensor": 2, "parallel__sequence_parallel": True, "lora__rank": 4, "lora__alpha": 64.0}),
    pytest.param(
        2,
        {"parallel__pipeline": 2, "pipeline__schedule": "zb-h1", "training__recompute": "stage"},
        marks=pytest.mark.full,
    ),
    pytest.param(2, {"data_parallel__zero_stage": 3}, marks=pytest.mark.full),
    pytest.param(4, {"parallel__tensor": 2, "data_parallel__zero_stage": 1}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_a_run_goes_on_with_its_reference_on_any_layout(ranks, data, tmp_path, world, layout):
    """Three steps elsewhere, then three of one process, of which the first weights are nowhere any more."""
    lora = {name: value for name, value in layout.items() if name.startswith("lora")}
    if lora:
        trained(
            data, training__objective="dpo", training__train_steps=1, checkpoint__directory=str(tmp_path / "base")
        )
        lora["checkpoint__weights"] = str(tmp_path / "base" / "step-00000001")
    unbroken, rewards = trained(data, **lora)
    kept = lora | {"checkpoint__directory": str(tmp_path / "kept")}
    per_rank = ranks(trained, data, world=world, **layout | kept, training__train_steps=3)
    for losses, _ in per_rank:
        assert losses == pytest.approx(unbroken[:3], abs=2e-6)
    more, told = trained(data, **kept)
    assert more == pytest.approx(unbroken[3:], abs=2e-6) and len(more) == 3
    assert told == pytest.approx(rewards, abs=2e-5) and abs(told["rewards/margins"]) > 0.01


def test_the_same_layout_goes_on_bit_for_bit(data, tmp_path):
    unbroken, rewards = trained(data)
    kept = {"checkpoint__directory": str(tmp_path)}
    first, _ = trained(data, **kept, training__train_steps=4)
    more, told = trained(data, **kept)
    assert first + more == unbroken and told == rewards
    # weights of it begin another run, whose reference is itself
    again, _ = trained(data, checkpoint__weights=str(tmp_path / "step-00000006"))
    assert again[0] == pytest.approx(0.693147, abs=1e-6)


def test_a_run_without_its_reference_is_refused(data, tmp_path):
    kept = {"checkpoint__directory": str(tmp_path / "kept"), "training__train_steps": 2}
    trained(data, **kept)
    more = kept | {"training__train_steps": 4}
    other = {"data.valid_sets": {"more": rows_of(tmp_path, rows=9)}}
    message = r"step-00000002/? holds the reference of 2 texts, 1 of the 3 of this run are not among them, and its we"
    with pytest.raises(ValueError, match=message):
        trained(data | other, **more)
    with pytest.raises(ValueError, match="2 texts, 2 of the 2 of this run"):
        trained(data, **more, data__sequence_length=24, checkpoint__change=["data"])
    (tmp_path / "text.txt").write_text("One line.\n\n" * 200)
    text = {"data.train": str(tmp_path / "text.txt"), "data.directory": str(tmp_path / "prepared")}
    with pytest.raises(ValueError, match="was trained with tokenizer=bytes"):
        trained(text, **more, training__objective="next_token", data__vocab_size=257)


def test_a_run_of_text_does_not_go_on_with_preferences(data, tmp_path):
    (tmp_path / "text.txt").write_text("One line.\n\n" * 200)
    text = {"data.train": str(tmp_path / "text.txt"), "data.directory": str(tmp_path / "prepared")}
    kept = {"checkpoint__directory": str(tmp_path / "kept"), "training__train_steps": 2}
    torch.set_default_dtype(torch.float32)
    fields = FIELDS | text | {name.replace("__", "."): value for name, value in kept.items()}
    fields |= {"training.objective": "next_token", "model.vocab_size": 4096}
    model, _, _, loader = initialize(config=RunConfig.from_dict(fields))
    for batch in loader:
        model.train_step(batch)
    model.close()
    allowed = {"checkpoint__change": ["data", "model"], "model__vocab_size": 4096, "training__train_steps": 4}
    with pytest.raises(ValueError, match="holds the reference of 0 texts"):
        trained(data, **kept | allowed)


def test_files_of_another_objective_are_named(data, tmp_path, capsys):
    pairs = rows_of(tmp_path)
    chats = lines(tmp_path / "chats.jsonl", [{"prompt": "a", "response": "b"}] * 9)
    fields = FIELDS | {"data.directory": str(tmp_path / "prepared")}

    def refused(**more):
        with pytest.raises(ValueError) as error:
            run = RunConfig.from_dict(fields | {name.replace("__", "."): v for name, v in more.items()})
            with_token_files(run.check(1))
        return str(error.value)

    assert refused(data__train=chats).startswith(f"{chats} holds no preferences, which training.objective=dpo learns")
    told = refused(data__train=pairs, training__objective="next_token")
    assert told.startswith(
        f"{pairs} holds preferences (chosen, rejected), which only training.objective=dpo learns fr"
    )
    told = refused(data__train=data["data.train"], training__objective="next_token")
    assert (
        f"data.train={data['data.train']} holds preferences (chosen, rejected), which only training.objecti" in told
    )
    text = with_token_files(RunConfig.from_dict(fields | {"data.train": chats, "training.objective": "next_token"}))
    told = refused(data__train=data["data.train"], data__valid=text.data.train)
    assert (
        f"data.valid={text.data.train[0]} holds no preferences, which training.objective=dpo learns from; pre" in told
    )
    kept = {"checkpoint__directory": str(tmp_path / "kept"), "training__train_steps": 1}
    trained(data, **kept)
    prefix = data["data.train"]
    for more, held in (([], prefix), (["--training.objective", "dpo"], prefix), (["--data", pairs], pairs)):
        with pytest.raises(ValueError) as error:
            evaluate([str(tmp_path / "kept"), "--device", "cpu", *more])
        assert str(error.value) == (
            f"{held} holds preferences (chosen, rejected): rewards are of a model beside its reference, which is in "
            "its run: its training.eval_interval tells them, and a checkpoint alone has none; give --data: text, "
            "chats, or prompts with a response"
        )


def test_dropout_is_told_beside_a_reference_without(data, capsys):
    losses, _ = trained(data, training__train_steps=1)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6) and "dropout" not in capsys.readouterr().out
    losses, _ = trained(data, training__train_steps=1, model__hidden_dropout=0.2)
    assert losses[0] != pytest.approx(math.log(2), abs=1e-4)
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "dropout" in line]
    assert told.startswith("note: model.hidden_dropout=0.2: rewards compare a model with dropout and a reference")
    assert "; --model.hidden-dropout 0 does that" in told
    trained(data, training__train_steps=1, lora__rank=2, lora__dropout=0.1)
    assert "note: lora.dropout=0.1: rewards" in capsys.readouterr().out


def test_rows_that_are_chats_as_well_are_chats(data, tmp_path):
    row = {"messages": [], "prompt": "a", "chosen": "b", "rejected": "c"}
    both = lines(tmp_path / "both.jsonl", [row])
    pairs = lines(tmp_path / "pairs.jsonl", [{name: row[name] for name in ("prompt", "chosen", "rejected")}])
    assert preferences_in([(both,), (str(tmp_path / "nowhere"),)]) is None
    assert preferences_in([(both,), (pairs,)]) == pairs
    assert preferences_in([(data["data.train"],)]) == data["data.train"]


def test_all_mistakes_are_told_at_once():
    fields = {
        "training.objective": "dpo",
        "training.rampup_batch_size": ["4", "4", "100"],
        "training.global_batch_size": 8,
        "parallel.context": 2,
        "checkpoint.keep_best": "validation.bits_per_byte",
        "model.num_moe_experts": 4,
        "model.moe_aux_loss_coeff": 0.01,
    }
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict(fields).check(2)
    for message in (
        "learns from pairs of responses, data.train names 0 files",
        "parallel.context=2 cuts sequences, training.objective=dpo sums over each of them; use context=1",
        "rampup_batch_size=4 4 100 cuts validation batches anywhere",
        "keep_best=validation.bits_per_byte is of text, training.objective=dpo has none; use keep_best=loss",
        "moe_aux_loss_coeff and moe_z_loss_coeff weigh losses per token, training.objective=dpo divides by pairs",
    ):
        assert message in str(error.value)
    own = {"dpo.beta": 0, "dpo.label_smoothing": 0.5, "dpo.loss_type": "ipo", "training.objective": "ppo"}
    with pytest.raises(ValueError) as error:
        RunConfig.from_dict(own)
    for message in (
        "beta=0",
        "label_smoothing=0.5 must be at least 0 and below 0.5",
        "loss_type=ipo has none",
        "ppo",
    ):
        assert message in str(error.value)


def test_a_loss_or_batches_of_ones_own_are_another_objective(data):
    run = RunConfig.from_dict(FIELDS | data)
    with pytest.raises(ValueError, match="2 losses for one run"):
        initialize(config=run, loss_fn=lambda output, batch: (output.sum(), 1))
    with pytest.raises(ValueError, match="this run has 0 texts; leave out `batches`"):
        initialize(config=run, batches=initialize(config=run).loader)
