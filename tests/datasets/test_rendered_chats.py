"""Rows whose text a chat template has written already, and what rows say for the template beside their messages."""

import json
import shutil

import pytest

from core.datasets import load_tokenizer
from core.datasets.prepare import main as prepare
from tests.datasets.chats import CHATML
from tests.datasets.test_conversations import written

PROMPT = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]


def tokens_of(folder, rows, tmp_path):
    (tmp_path / "rows").mkdir(exist_ok=True)
    return written(tmp_path / "rows", rows, "--tokenizer", str(folder / "tokenizer.json")).document(0).tolist()


@pytest.mark.parametrize("answer", ["Four.<|im_end|>", "Four."])
def test_special_tokens_of_a_rendered_prompt_are_tokens(tmp_path, chat_folder, answer):
    """As TRL reads them: the ids are those of the messages, also where the answer's end is written in it."""
    tokenizer = load_tokenizer(chat_folder / "tokenizer.json")
    rendered = tokens_of(chat_folder, [{"prompt": PROMPT, "response": answer}], tmp_path)
    chat = tokens_of(chat_folder, [{"messages": MESSAGES}], tmp_path)
    start, end = tokenizer.encode_marked(["<|im_start|><|im_end|>"])[0]
    assert rendered.count(start) == chat.count(start) == 2
    assert rendered.count(end) == 2 and tokenizer.decode(rendered).startswith(PROMPT + "Four.")


def test_special_tokens_in_a_corpus_stay_text_and_are_told(tmp_path, chat_folder):
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": PROMPT}) + "\n" + json.dumps({"text": "Four."}) + "\n")
    arguments = ["--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "out")]
    with pytest.warns(UserWarning, match=r"1 texts spell out special tokens \(<\|im_start\|>\), which stay text"):
        prepare([*arguments, "--tokenizer", str(chat_folder / "tokenizer.json"), "--workers", "1"])


CALLS = "{% if tools %}{{ tools | length }} tools{% endif %}{{ style or '' }}"
CALLS += CHATML.replace("{{ m['content'] }}", "{{ m['content'] or '' }}{{ m.tool_calls or '' }}")


@pytest.mark.parametrize(
    ("row", "begin"),
    [
        ({"tools": '[{"name": "a"}, {"name": "b"}]'}, "2 tools"),
        ({"tools": [{"name": "a"}]}, "1 tools"),
        ({"chat_template_kwargs": {"style": "short"}}, "short"),
        ({"chat_template_kwargs": '{"style": "short"}'}, "short"),
        ({}, "<|im_start|>"),
    ],
)
def test_what_rows_give_to_the_template(tmp_path, chat_folder, row, begin):
    """A message that calls tools need not have a content, as in TRL's rows."""
    folder = tmp_path / "calls"
    shutil.copytree(chat_folder, folder)
    (folder / "chat_template.jinja").write_text(CALLS)
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "a"}}]}
    rows = [{"messages": [MESSAGES[0], called]} | row]
    tokens = tokens_of(folder, rows, tmp_path)
    text = load_tokenizer(folder / "tokenizer.json").decode(tokens)
    assert "'name': 'a'" in text and text.startswith(begin)


@pytest.mark.parametrize("row", [{"tools": "no JSON"}, {"chat_template_kwargs": [1]}])
def test_what_is_neither_is_skipped_and_counted(tmp_path, chat_folder, capsys, row):
    rows = [{"messages": MESSAGES} | row]
    assert written(tmp_path, rows, "--tokenizer", str(chat_folder / "tokenizer.json")) is None
    assert "skipped: 1 chats whose " in capsys.readouterr().err
