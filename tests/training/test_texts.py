"""Text and conversations that a run names directly: prepared once, waited for, trained on; what is told."""

import json
import os
import shutil
import threading
import time
from dataclasses import replace

import pytest

from core.datasets import TokenFile, load_tokenizer
from core.datasets.corpus import cached
from core.parallel_state import ParallelState
from core.training import RunConfig, initialize
from core.training.config import load_run
from core.training.config.texts import with_token_files
from core.training.evaluate import main as evaluate
from core.training.generate import main as generate
from core.training.run.data import open_corpus
from core.training.run.summary import note_on_padding, note_on_rate
from tests.datasets.chats import CHATML, TALK, lines
from tests.models.test_huggingface_families import saved

SIZES = {"model.num_layers": 1, "model.hidden_size": 32, "model.num_attention_heads": 4, "data.sequence_length": 32}
RUN = SIZES | {"training.train_steps": 12, "training.global_batch_size": 4, "device": "cpu", "optimizer.lr": 1e-2}


@pytest.fixture
def texts(tmp_path):
    directory = tmp_path / "texts"
    directory.mkdir()
    for i in range(6):
        (directory / f"{i}.txt").write_text("".join(f"Line {j} of text {i} says {i * j}.\n\n" for j in range(60)))
    return directory


def run_of(tmp_path, train, **more):
    fields = RUN | {"data.train": str(train), "data.directory": str(tmp_path / "prepared"), "data.vocab_size": 300}
    return RunConfig.from_dict(fields | {name.replace("__", "."): value for name, value in more.items()})


def test_a_folder_is_prepared_once_with_a_tokenizer_of_its_own(tmp_path, texts, capsys):
    run = with_token_files(run_of(tmp_path, texts))
    (prefix,) = run.data.train
    told = capsys.readouterr().err
    assert f"preparing {texts} (6 files, 0.0 MB) as {prefix}, once" in told and "learning 300 tokens" in told
    assert "prepared: 6 documents" in told
    assert with_token_files(run_of(tmp_path, texts)).data.train == (prefix,) and not capsys.readouterr().err
    written = os.stat(f"{prefix}.bin").st_mtime_ns
    # a text that has changed is another one, as is another vocabulary
    (texts / "0.txt").write_text("another text\n" * 99)
    others = {*with_token_files(run_of(tmp_path, texts)).data.train}
    others |= {*with_token_files(run_of(tmp_path, texts, data__vocab_size=310)).data.train}
    assert len({*others, prefix}) == 3 and os.stat(f"{prefix}.bin").st_mtime_ns == written


def test_a_single_file_is_cut_at_paragraphs_and_validation_gets_the_same_tokenizer(tmp_path, texts):
    fields = {"data__valid": str(texts / "1.txt"), "data__valid_sets": {"more": str(texts / "2.txt")}}
    data = with_token_files(run_of(tmp_path, texts / "0.txt", **fields)).data
    files = [TokenFile(prefix) for prefix in (*data.train, *data.valid, data.valid_sets["more"])]
    assert [file.num_documents for file in files] == [60, 60, 60]
    assert len({file.card.tokenizer for file in files}) == 1
    blend = run_of(tmp_path, texts / "0.txt").data
    blend = replace(blend, train=("0.7", str(texts / "0.txt"), "0.3", data.valid[0]))
    made = with_token_files(replace(run_of(tmp_path, texts), data=blend)).data.train
    assert made == ("0.7", data.train[0], "0.3", data.valid[0])


def test_a_process_waits_for_the_first_of_its_machine(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(cached, "_POLL_S", 0.01)
    found = {}

    def wait():
        found["waited"] = cached.prepared_text(
            str(texts), tmp_path / "p", tokenizer=None, vocab_size=300, writes=False, say=print
        )

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    told = []
    made = cached.prepared_text(
        str(texts), tmp_path / "p", tokenizer=None, vocab_size=300, writes=True, say=told.append
    )
    thread.join(20)
    assert found["waited"] == made and len(told) == 3
    monkeypatch.setattr(cached, "_PATIENCE_S", 0.05)
    with pytest.raises(
        ValueError, match=r"has waited 0 s in which nobody did; look at its message, or prepare the t"
    ):
        cached.prepared_text(str(texts), tmp_path / "q", tokenizer=None, vocab_size=300, writes=False, say=print)


def test_two_machines_with_one_disk_write_it_once(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(cached, "_POLL_S", 0.01)
    told, made = [], []

    def first_process_of_a_machine():
        made.append(
            cached.prepared_text(
                str(texts), tmp_path / "p", tokenizer=None, vocab_size=300, writes=True, say=told.append
            )
        )

    threads = [threading.Thread(target=first_process_of_a_machine) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 3 and len(set(made)) == 1
    assert sum(line.startswith("prepared:") for line in told) == 1


def trained(run):
    model, _, _, loader = initialize(config=run)
    losses = [float(model.train_step(batch).loss) for batch in loader]
    model.close()
    return losses


def test_a_folder_of_text_to_a_falling_loss_and_a_judgement_of_other_text(tmp_path, texts, capsys):
    kept = {"checkpoint__directory": str(tmp_path / "kept")}
    losses = trained(run_of(tmp_path, texts, **kept))
    assert losses[-1] < losses[0] - 0.5
    # other text is read with the run's tokenizer
    other = tmp_path / "other.txt"
    other.write_text("Line 7 of text 9 says 63.\n\n" * 40)
    words = [str(tmp_path / "kept"), "--data", str(other), "--data.directory", str(tmp_path / "prepared"), "--json"]
    assert evaluate([*words, "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["texts"][str(other)]
    assert found["bytes"] == 40 * len("Line 7 of text 9 says 63.") and found["loss"] < losses[0]


def tuned(rows, tmp_path, chat_folder, layout):
    fields = {"data__tokenizer": str(chat_folder / "tokenizer.json"), "data__split": "1,0,0"} | layout
    return trained(run_of(tmp_path, rows, training__train_steps=6, **fields))


LAYOUTS = [
    (2, {"parallel__tensor": 2, "parallel__sequence_parallel": True}),
    (2, {"parallel__pipeline": 2, "pipeline__schedule": "1f1b", "model__num_layers": 2}),
    (2, {"data_parallel__zero_stage": 3}),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_chats_fine_tune_with_the_same_losses_on_every_layout(ranks, tmp_path, chat_folder, world, layout):
    rows = lines(tmp_path / "chats.jsonl", [{"messages": TALK[: 3 + 2 * (i % 2)]} for i in range(40)])
    layout = {"data__sequence_length": 64} | layout
    size = {name: value for name, value in layout.items() if name.startswith(("data__", "model__"))}
    made = run_of(tmp_path, rows, data__tokenizer=str(chat_folder / "tokenizer.json"))
    (rows,) = with_token_files(made).data.train  # here, so that no rank of the pool has to import transformers
    (alone,) = ranks(tuned, rows, tmp_path, chat_folder, size, world=1)
    assert alone[-1] < alone[0]
    for losses in ranks(tuned, rows, tmp_path, chat_folder, layout, world=world):
        assert losses == pytest.approx(alone, abs=2e-5)


def test_what_cannot_be_prepared_is_told(tmp_path, texts):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="empty: 0 files to read"):
        with_token_files(run_of(tmp_path, empty))
    chats = lines(tmp_path / "chats.jsonl", [{"messages": TALK}])
    with pytest.raises(ValueError, match="rows of messages need the tokenizer of a model with a chat template"):
        with_token_files(run_of(tmp_path, chats))
    # a layout that does not fit is told before hours of preparing
    with pytest.raises(ValueError, match="tensor"):
        initialize(config=run_of(tmp_path, texts, parallel__tensor=3))
    assert not (tmp_path / "prepared").exists() or not list((tmp_path / "prepared").glob("*.bin"))
    assert load_tokenizer(None).vocab_size == 257


CHANGED = {
    "data": ({"data__sequence_length": 16}, r"was trained with sequence_length=32 \(here 16\)"),
    "batch": ({"training__global_batch_size": 8}, r"was trained with global_batch_size=4 \(here 8\)"),
    "size": (
        {"model__hidden_size": 64, "model__num_layers": 2},
        r"of a model with num_layers=1 \(now 2\), hid",
    ),
    "optimizer": (
        {"optimizer__optimizer": "sgd"},
        r"of another optimizer: it holds exp_avg, exp_avg_sq of each parameter, this run momentum_buffer; use the",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_another_run_than_the_checkpoints_is_told_before_a_model_is_built(tmp_path, texts, monkeypatch, case):
    kept = {"checkpoint__directory": str(tmp_path / "kept"), "training__train_steps": 1}
    trained(run_of(tmp_path, texts, **kept))
    monkeypatch.setattr("core.training.run.engine.initialize.begin", lambda *a, **k: pytest.fail("a model is built"))
    fields, message = CHANGED[case]
    with pytest.raises(ValueError, match=message):
        initialize(config=run_of(tmp_path, texts, **kept | fields))


def test_chats_are_prepared_anew_where_their_template_or_an_end_has_changed(tmp_path, chat_folder):
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    rows = lines(tmp_path / "chats.jsonl", [{"messages": TALK}])

    def prefix():
        return with_token_files(run_of(tmp_path, rows, data__tokenizer=str(folder / "tokenizer.json"))).data.train[0]

    def configured(**fields):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    first = prefix()
    assert prefix() == first
    configured(chat_template=CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    second = prefix()
    assert second != first and TokenFile(second).num_tokens < TokenFile(first).num_tokens
    (folder / "chat_template.jinja").write_text(CHATML)
    third = prefix()
    configured(eos_token="<|endoftext|>")
    assert len({first, second, third, prefix()}) == 4
    (folder / "chat_template.jinja").unlink()
    configured(chat_template=None)
    with pytest.raises(ValueError, match=r"has no chat template; put the model's chat_template.jinja beside it"):
        prefix()


def test_padding_that_only_ends_chats_is_not_told(tmp_path, chat_folder):
    """Nothing sees it there: its row has no gradient here either."""
    rows = lines(tmp_path / "chats.jsonl", [{"messages": TALK}] * 4)
    run = with_token_files(run_of(tmp_path, rows, data__tokenizer=str(chat_folder / "tokenizer.json")))
    corpus = open_corpus(run.data, run.training, ParallelState.single("cpu"))
    for token, told in ((0, False), (2, True)):
        (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": token}))
        assert bool(note_on_padding(str(tmp_path), corpus)) == told


def test_the_rate_of_new_weights_is_told_where_trained_ones_begin_with_it(tmp_path):
    _, folder = saved(tmp_path, "llama")

    def told(*flags):
        return note_on_rate(load_run(["--device", "cpu", "--data.sequence-length", "16", *flags]))

    trained = ["--model.huggingface", str(folder)]
    usual = "is the default, of weights that begin at random; for trained ones 5e-5 is usual: --optimizer.lr 5e-5"
    assert told(*trained) == f"optimizer.lr=0.001 {usual}"
    assert told(*trained, "--lora.rank", "2").endswith(
        "for trained ones and adapters 2e-4 is usual: --optimizer.lr 2e-4"
    )
    chosen = ["--optimizer.lr", "1e-3"]
    assert not told() and not told(*trained, *chosen) and not told(*trained, "--optimizer.optimizer", "lion")


def test_generate_stops_where_answers_of_the_run_end(tmp_path, chat_folder, monkeypatch):
    """`<|im_end|>` of the template, beside `<|endoftext|>`, which ends documents."""
    rows = lines(tmp_path / "chats.jsonl", [{"messages": TALK}] * 40)
    fields = {"data__tokenizer": str(chat_folder / "tokenizer.json"), "data__split": "1,0,0"}
    fields |= {"checkpoint__directory": str(tmp_path / "kept"), "training__train_steps": 1}
    trained(run_of(tmp_path, rows, **fields))
    stops = []
    monkeypatch.setattr(
        "core.training.generate.generate_batch", lambda model, tokens, stop, **_: stops.append(stop) or tokens
    )
    assert generate([str(tmp_path / "kept"), "--prompt", "Two?"]) == 0
    assert generate([str(tmp_path / "kept"), "--prompt", "Two?", "--end-of-text", "<|endoftext|>"]) == 0
    assert stops == [[0, 2], [0]]


def test_an_evaluation_of_a_folder_without_a_text_names_its_flag(tmp_path):
    _, folder = saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"is a model without a text: 0 texts to evaluate; give --data PREFIX"):
        evaluate([str(folder)])
