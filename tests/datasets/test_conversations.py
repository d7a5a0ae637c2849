"""Chats and prompts as token files of which the answers are marked, and as rows that keep them apart."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import tokenizers as hf_tokenizers
import torch
from tokenizers.processors import TemplateProcessing

from core.datasets import ByteTokenizer, ConversationBatches, GPTBatches, TokenFile, load_tokenizer, split_documents
from core.datasets.answer_ends import answer_ends
from core.datasets.packing import IGNORED_LABEL
from core.datasets.prepare import main as prepare
from core.interop.megatron.datasets.indexed_dataset import IndexedDataset
from core.training import ModelConfig
from core.training.model.begin import build_stages
from tests.datasets.chats import CHATML, TALK, lines


def written(tmp_path, rows, *options):
    output = str(tmp_path / "chats")
    status = prepare(["--input", lines(tmp_path / "rows.jsonl", rows), "--output", output, *options])
    return TokenFile(output) if status == 0 else None


def test_a_chat_is_what_the_template_writes_and_answers_are_the_assistants(tmp_path, chat_folder):
    from transformers import AutoTokenizer

    file = written(tmp_path, [{"messages": TALK}], "--tokenizer", str(chat_folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(chat_folder)
    tokens, answers = file.document(0), file.answers(0, file.num_tokens)
    expected = theirs.apply_chat_template(TALK, tokenize=True)
    expected = expected if isinstance(expected, list) else expected["input_ids"]
    assert tokens.tolist() == [*expected, file.card.end_of_text]
    ours = load_tokenizer(chat_folder / "tokenizer.json")
    texts, inside = [], False
    for token, is_answer in zip(tokens.tolist(), answers, strict=True):
        if is_answer and not inside:
            texts.append([])
        if is_answer:
            texts[-1].append(token)
        inside = is_answer
    assert [ours.decode(text) for text in texts] == ["Four.<|im_end|>", "A cat — é.<|im_end|>"]
    file.verify()


def test_a_prompt_and_its_response_are_joined_and_the_end_is_learned(tmp_path):
    rows = [{"prompt": "1 + 1 =", "response": " 2"}, {"prompt": "é", "completion": "ü"}]
    file = written(tmp_path, rows)
    first, second = file.document(0), file.document(1)
    assert ByteTokenizer().decode(first.tolist()) == "1 + 1 = 2" and first[-1] == 256
    assert file.answers(0, len(first)).tolist() == [False] * 7 + [True] * 3
    assert file.answers(len(first), file.num_tokens).tolist() == [False] * 2 + [True] * 3
    assert second.tolist() == [*"éü".encode(), 256]
    prompts = [{"prompt": TALK[:2], "completion": TALK[2:3]}]
    assert written(tmp_path, prompts) is None  # bytes have no chat template


def test_a_prompt_begins_as_the_tokenizer_begins_a_text(tmp_path, chat_folder):
    inner = hf_tokenizers.Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    start = inner.token_to_id("<|im_start|>")
    inner.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", start)])
    inner.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "1 + 1 =", "response": " 2"}]
    file = written(tmp_path, rows, "--tokenizer", str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.starts == (start,) and load_tokenizer(chat_folder / "tokenizer.json").starts == ()
    prompt, answer = tokenizer.encode_batch(["1 + 1 =", " 2"])
    assert file.document(0).tolist() == [start, *prompt, *answer, file.card.end_of_text]
    assert not file.answers(0, 1).any()


def test_rows_of_tables_are_those_of_lines(tmp_path, chat_folder):
    """Fields that only some messages have are null in a table."""
    pyarrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    called = {"role": "assistant", "content": None, "name": "calls a tool"}
    rows = [
        {"messages": TALK, "id": 1},
        {"messages": [TALK[1], called, TALK[1], TALK[2] | {"name": "four"}], "id": 2},
    ]
    tokenizer = ("--tokenizer", str(chat_folder / "tokenizer.json"))
    expected = written(tmp_path, rows, *tokenizer)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("a.parquet", "saved"):
        output = str(tmp_path / f"{name}.out")
        assert prepare(["--input", str(tmp_path / name), "--output", output, *tokenizer]) == 0
        found = TokenFile(output)
        assert found.marks_answers and found.num_documents == 2
        for number in range(2):
            assert found.document(number).tolist() == expected.document(number).tolist()
    prompts = [{"prompt": "a", "response": "b"}]
    parquet.write_table(pyarrow.Table.from_pylist(prompts), tmp_path / "b.parquet")
    assert prepare(["--input", str(tmp_path / "b.parquet"), "--output", str(tmp_path / "b")]) == 0
    assert TokenFile(tmp_path / "b").document(0).tolist() == [*b"ab", 256]


def test_of_a_prompt_of_messages_only_the_completion_is_learned(tmp_path, chat_folder):
    row = {"prompt": TALK[:4], "completion": TALK[4:]}
    file = written(tmp_path, [row], "--tokenizer", str(chat_folder / "tokenizer.json"))
    learned = file.document(0)[file.answers(0, file.num_tokens)]
    assert load_tokenizer(chat_folder / "tokenizer.json").decode(learned.tolist()) == "A cat — é.<|im_end|>"


def test_a_chat_whose_template_rewrites_turns_is_a_document_for_each_answer(tmp_path, chat_folder):
    """As Qwen3's: the last answer begins with thoughts, earlier ones do not."""
    folder = tmp_path / "thinking"
    shutil.copytree(chat_folder, folder)
    template = CHATML.replace(
        "{{ m['content'] }}",
        "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}",
    )
    for path in folder.glob("chat_template*"):
        path.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    file = written(tmp_path, [{"messages": TALK}], "--tokenizer", str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    found = []
    for number in range(file.num_documents):
        tokens = file.document(number)
        learned = file.answers(file.document_start(number), file.document_start(number + 1))
        found.append((tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[learned].tolist())))
    assert [learned for _, learned in found] == [
        "<think></think>Four.<|im_end|>",
        "<think></think>A cat — é.<|im_end|>",
    ]
    assert "assistant\nFour." in found[1][0], "the earlier turn as it is then"


BAD = {
    "no roles": ({"messages": [{"content": "a"}]}, "1 chats whose messages lack a role or a content"),
    "no answer": ({"messages": TALK[:2]}, "1 chats without an answer of the assistant, whose roles are system, user"),
    "empty": ({"messages": []}, '1 rows without "messages", "conversations" or a "prompt" with its "response"'),
    "number": (
        {"prompt": 1, "response": "b"},
        '1 rows without "messages", "conversations" or a "prompt" with its "response"',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_that_cannot_be_used_are_counted(tmp_path, chat_folder, capsys, case):
    row, message = BAD[case]
    tokenizer = ["--tokenizer", str(chat_folder / "tokenizer.json")]
    assert written(tmp_path, [row], *tokenizer) is None
    assert f"0 chats or prompts in 1 files, skipped: {message}" in capsys.readouterr().err
    file = written(tmp_path, [row, {"prompt": "a", "response": "b"}, row], *tokenizer)
    assert file.num_documents == 1
    assert f"skipped: {message.replace('1', '2', 1)}" in capsys.readouterr().out


def test_what_is_refused(tmp_path, chat_folder, capsys):
    """A folder without a template, bytes, text beside chats, a vocabulary of one's own."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_bytes((chat_folder / "tokenizer.json").read_bytes())
    chat, text = lines(tmp_path / "chat.jsonl", [{"messages": TALK}]), lines(tmp_path / "t.jsonl", [{"text": "a"}])
    cases = {
        "none of tokenizer_config.json, chat_template.jinja": [
            chat,
            "--tokenizer",
            str(bare / "tokenizer.json"),
        ],
        "rows of messages need the tokenizer of a model with a chat template": [chat],
        "1 of 2 files hold chats or prompts": [chat, text],
        "--train-tokenizer 300: conversations fine-tune a model": [chat, "--train-tokenizer", "300"],
    }
    for message, words in cases.items():
        assert prepare(["--input", *words, "--output", str(tmp_path / "no")]) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("no*"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """100 prompts of many lengths."""
    directory = tmp_path_factory.mktemp("prompts")
    random = np.random.default_rng(5)
    rows = []
    for i in range(100):
        prompt, response = ("".join(map(chr, random.integers(97, 123, random.integers(1, 20)))) for _ in range(2))
        rows.append({"prompt": f"{i} {prompt}", "response": response})
    output = str(directory / "prompts")
    assert prepare(["--input", lines(directory / "rows.jsonl", rows), "--output", output]) == 0
    return TokenFile(output)


def batches(file, s=64, **more):
    return ConversationBatches(
        **{"token_file": file, "sequence_length": s, "global_batch_size": 4, "seed": 7, "end_of_text": 256} | more
    )


def test_rows_are_whole_conversations_and_labels_their_answers(file):
    made = batches(file)
    assert made.truncated == 0 and made.num_samples < 100
    seen, answers = [], []
    for batch in made.sequential(4):
        for tokens, labels, positions in zip(batch["tokens"], batch["labels"], batch["position_ids"], strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), 64]
            for start, stop in pairwise(starts):
                document, learned = tokens[start:stop], labels[start:stop]
                if (document == 0).all():  # what is left of a row
                    assert (learned == IGNORED_LABEL).all()
                    continue
                seen.append(document.tolist())
                # a label is the next token, and never of another document
                known = learned != IGNORED_LABEL
                assert torch.equal(learned[:-1][known[:-1]], document[1:][known[:-1]]) and not known[-1]
                answers.append(learned[known].tolist())
    assert seen == [file.document(i).tolist() for i in range(100)]
    for i, answer in enumerate(answers):
        start = file.document_start(i)
        tokens, marks = file.document(i), file.answers(start, file.document_start(i + 1))
        assert answer == tokens[marks].tolist()
    assert made.answer_tokens().tolist() == [token for answer in answers for token in answer]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_do_not_depend_on_the_ranks_and_an_epoch_has_each_row_once(file, size):
    made = batches(file)
    rows = []
    for step in range(-(-made.num_samples // 4)):
        parts = [made.batch(step, rank, size) for rank in range(size)]
        whole = made.batch(step)
        for name, tensor in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), tensor), name
        rows += [tuple(row) for row in whole["tokens"].tolist()]
    assert len(set(rows[: made.num_samples])) == made.num_samples
    again = made.rows(6, 4)
    assert torch.equal(again["tokens"][:2], made.batch(1)["tokens"][2:])


def test_a_conversation_longer_than_a_row_loses_its_end_and_is_counted(file):
    made = batches(file, s=16)
    lengths = [len(file.document(i)) for i in range(100)]
    assert made.truncated == sum(length > 16 for length in lengths) > 0
    row = next(made.sequential(4))["tokens"][0].tolist()
    assert row[: min(16, lengths[0])] == file.document(0)[:16].tolist()
    last = next(i for i, length in enumerate(lengths) if length > 16)
    firsts = made._first_documents
    labels = made._windows(range(firsts.index(last), firsts.index(last) + 1))["labels"][0]
    expected = file.document(last)[16] if file.answers(0, file.num_tokens)[file.document_start(last) + 16] else -100
    assert labels[-1] == expected, "its last token predicts the one that is cut off"


def test_text_and_conversations_are_not_taken_for_each_other(file, tmp_path):
    with pytest.raises(ValueError, match="marks answers, and all tokens would be learned alike; use Conversation"):
        GPTBatches(token_file=file, sequence_length=16, global_batch_size=4, seed=1)
    with pytest.raises(ValueError, match="100 conversations of which the answers are marked"):
        IndexedDataset(file.prefix)
    (tmp_path / "a.txt").write_text("some text\n\nmore of it")
    assert prepare(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "text")]) == 0
    with pytest.raises(ValueError, match="marks 0 answers; use GPTBatches"):
        batches(TokenFile(tmp_path / "text"))
    part, *_ = split_documents(file, "50,50,0")
    assert part.marks_answers and batches(part).num_samples < batches(file).num_samples


def test_packed_it_costs_what_each_conversation_costs_alone(file, single):
    """The loss of every answer token, beside a model that sees one conversation at a time."""
    torch.set_default_dtype(torch.float32)
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    from core.training import PipelineConfig

    model = build_stages(config, PipelineConfig(), 257, 64, single)[0].double().eval()
    batch = next(batches(file).sequential(4))
    packed = {name: tensor for name, tensor in batch.items() if name != "tokens"}
    with torch.no_grad():
        together = model(batch["tokens"], **packed).double()
    labels = batch["labels"]
    costs, alone = together[labels != IGNORED_LABEL].tolist(), []
    for i in range(sum(int((positions == 0).sum()) for positions in batch["position_ids"])):
        tokens = torch.from_numpy(file.document(i).astype(np.int64))
        marks = torch.from_numpy(file.answers(file.document_start(i), file.document_start(i + 1)).copy())
        with torch.no_grad():
            losses = model(tokens[None, :-1], labels=tokens[None, 1:])[0]
        alone += losses[marks[1:]].tolist()
        if len(alone) >= len(costs):
            break
    assert alone == pytest.approx(costs, rel=1e-9)


def test_an_answer_ends_with_the_eos_token_beside_the_tokenizer(tmp_path, chat_folder, capsys):
    """As TRL's; documents still end with <|endoftext|>, which nobody learns there."""
    tokenizer = ["--tokenizer", str(chat_folder / "tokenizer.json")]
    file = written(tmp_path, [{"prompt": "Two?", "completion": "Four."}], *tokenizer)
    told = capsys.readouterr().out
    assert "answers end with <|im_end|> (token 2), the tokenizer's eos_token; documents end with <|endo" in told
    assert file.document(0)[-2:].tolist() == [2, 0]
    assert file.answers(0, file.num_tokens)[-2:].tolist() == [True, False]
    # a token that is named ends both
    tokenizer_and_end = [*tokenizer, "--end-of-text", "<|endoftext|>"]
    file = written(tmp_path, [{"prompt": "Two?", "completion": "Four."}], *tokenizer_and_end)
    assert file.document(0)[-1] == 0 and 2 not in file.document(0) and file.answers(0, file.num_tokens)[-1]
    text = tmp_path / "text.txt"
    text.write_text("Two and two")
    assert prepare(["--input", str(text), "--output", str(tmp_path / "text"), *tokenizer]) == 0
    told = capsys.readouterr().out
    assert "documents end with <|endoftext|> (token 0), not with the tokenizer's eos_token, <|im_end|> (tok" in told


def test_the_next_command_names_the_folder_of_the_tokenizer(tmp_path, chat_folder, capsys):
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    (folder / "config.json").write_text("{}")
    tokenizer = ["--tokenizer", str(folder / "tokenizer.json")]
    written(tmp_path, [{"messages": TALK}], *tokenizer)
    assert capsys.readouterr().out.endswith(f"--data.train {tmp_path / 'chats'} --model.huggingface {folder}\n")
    written(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "c"}], *tokenizer)
    assert capsys.readouterr().out.endswith(f"--model.huggingface {folder} --training.objective dpo\n")
    (folder / "tokenizer.json").unlink()
    for name in (folder / "tokenizer.json", folder):
        assert written(tmp_path, [{"messages": TALK}], "--tokenizer", str(name)) is None
        said = f"error: {folder} has no tokenizer.json; give --tokenizer FILE (tokenizers' file; transformers' Au"
        assert said in capsys.readouterr().err


def test_a_tokenizer_may_be_named_by_its_folder(tmp_path, chat_folder, capsys):
    by_file = written(tmp_path, [{"messages": TALK}], "--tokenizer", str(chat_folder / "tokenizer.json")).document(0)
    told = capsys.readouterr().out
    by_folder = written(tmp_path, [{"messages": TALK}], "--tokenizer", str(chat_folder)).document(0)
    assert by_folder.tolist() == by_file.tolist() and capsys.readouterr().out.split()[0] == told.split()[0]


ROWS = {
    "messages": [{"messages": TALK}] * 2,
    "prompt": [{"prompt": "1 + 1 =", "response": " 2"}],
    "text": [{"text": "a"}, {"text": "b"}],
    "preferences": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_an_array_of_rows_is_prepared_as_lines_of_them_are(tmp_path, chat_folder, rows):
    array = tmp_path / "in/rows.json"
    array.parent.mkdir()
    array.write_text(json.dumps(rows, indent=1))
    options = ["--tokenizer", str(chat_folder / "tokenizer.json"), "--output"]
    for source, name in ((lines(tmp_path / "rows.jsonl", rows), "lines"), (array, "array"), (array.parent, "folder")):
        assert prepare(["--input", str(source), *options, str(tmp_path / name)]) == 0
    expected = (tmp_path / "lines.bin").read_bytes()
    assert (tmp_path / "array.bin").read_bytes() == (tmp_path / "folder.bin").read_bytes() == expected


def test_chats_in_sharegpts_form_are_those_of_messages(tmp_path, chat_folder):
    names = {"user": "human", "assistant": "gpt"}
    theirs = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in TALK]
    told = {"conversations": theirs[1:], "system": TALK[0]["content"]}
    rows = [{"messages": TALK}, {"conversations": theirs}, told, {"conversations": TALK}]
    rows += [{"conversations": 1}, {"conversations": [{"from": "human"}]}]
    file = written(tmp_path, rows, "--tokenizer", str(chat_folder / "tokenizer.json"))
    first, *others = (file.document(i).tolist() for i in range(4))
    assert others == [first] * 3
    assert file.card.skipped == {
        "chats whose messages lack a role or a content": 1,
        'rows without "messages", "conversations" or a "prompt" with its "response"': 1,
    }
    answers = file.answers(0, file.num_tokens).reshape(4, -1)
    assert answers.any() and (answers == answers[0]).all()


def test_rows_of_no_known_form_are_answered_with_their_keys(tmp_path, capsys):
    assert written(tmp_path, [{"instruction": "a", "input": "", "output": "b"}]) is None
    told = capsys.readouterr().err
    assert "1 rows without a text 'text'; the rows of " in told
    assert "rows.jsonl have 'instruction', 'input', 'output', wanted is {\"messages\": [...]}, {\"prompt\"" in told


@pytest.mark.parametrize("case", ["chats", "both", "no token", "text"])
def test_the_tokens_that_end_answers_are_found_and_told(tmp_path, chat_folder, capsys, case):
    """Where eos_token is another: of the template, of prompts, none."""
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    template = CHATML.replace("<|im_end|>", "") if case == "no token" else CHATML
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = {"both": [{"messages": TALK}, {"prompt": "a", "response": "b"}], "text": [{"text": "a"}]}
    name = str(folder / "tokenizer.json")
    file = written(tmp_path, rows.get(case, [{"messages": TALK}] * 3), "--tokenizer", name)
    expected = {"chats": [2], "both": [0, 2]}.get(case, [])
    assert answer_ends(file, load_tokenizer(name), name) == expected
    if case == "chats":
        later = split_documents(file, "1,2,0")[1]
        assert answer_ends(later, load_tokenizer(name), name) == expected
    said = "answers end with" in (told := capsys.readouterr().out)
    assert said == bool(expected)
    named = {"chats": "<|im_end|> (token 2)", "both": "<|endoftext|> (token 0) or <|im_end|> (token 2)"}
    assert not said or f"answers end with {named[case]}, where generate stops as well; documents end with" in told
