"""Chats as others' files have them: answers of weight 0, messages in a text."""

import json

from core.datasets import load_tokenizer
from tests.datasets.chats import TALK
from tests.datasets.test_conversations import written


def test_an_answer_of_weight_0_is_read_and_not_learned(tmp_path, chat_folder):
    """OpenAI's files; null, where other rows of a table have a weight, is none."""
    tokenizer = str(chat_folder / "tokenizer.json")
    talk = [message | {"weight": 0 if message["content"] == "Four." else None} for message in TALK]
    file = written(tmp_path, [{"messages": talk}, {"messages": [*talk[:3]]}], "--tokenizer", tokenizer)
    (tmp_path / "plain").mkdir()
    plain = written(tmp_path / "plain", [{"messages": TALK}], "--tokenizer", tokenizer)
    assert file.num_documents == 1 and sum(file.card.skipped.values()) == 1, (
        "a chat without an answer that is learned"
    )
    assert file.document(0).tolist() == plain.document(0).tolist()
    learned = file.document(0)[file.answers(0, file.num_tokens)]
    assert load_tokenizer(tokenizer).decode(learned.tolist()) == "A cat — é.<|im_end|>"


def test_messages_may_be_json_in_a_text(tmp_path, chat_folder):
    rows = [{"messages": json.dumps(TALK)}, {"messages": TALK}, {"messages": "Two and two?"}]
    file = written(tmp_path, rows, "--tokenizer", str(chat_folder / "tokenizer.json"))
    assert file.document(0).tolist() == file.document(1).tolist() and file.num_documents == 2
    assert file.card.skipped == {"chats whose messages are a text that is no JSON": 1}
