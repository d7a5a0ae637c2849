"""Chats whose contents are lists of parts, by templates that loop over parts and templates that know texts only."""

import shutil

import pytest

from core.datasets import load_tokenizer
from core.datasets.corpus.conversations import ChatTemplate
from tests.datasets.chats import CHATML, TALK
from tests.datasets.test_conversations import written

IN_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "and two?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Four."}]},
]
LOOPS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}<{{ p['type'] }}>{{ p['text'] }}{% endfor %}{% endif %}",
)
STRINGS = "{% if m['content'] is string %}{{ m['content'] }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "first"),
    [
        (CHATML, "Two and two?"),
        (CHATML.replace("m['content']", "m['content'] | trim"), "Two and two?"),
        (CHATML.replace("m['content']", "'' + m['content']"), "Two and two?"),
        (
            CHATML.replace("m['content']", "m['content'] | tojson if m['content'] is not string else m['content']"),
            "Two and two?",
        ),
        (CHATML.replace("{{ m['content'] }}", STRINGS), "Two and two?"),
        (LOOPS, "<text>Two <text>and two?"),
    ],
    ids=["as it is", "trim", "joined", "tojson", "nothing", "loop"],
)
def test_contents_in_parts_are_their_texts(tmp_path, chat_folder, template, first):
    """A template that loops over parts writes them; others would write a list as Python does, or fail."""
    folder = tmp_path / "parts"
    shutil.copytree(chat_folder, folder)
    (folder / "chat_template.jinja").write_text(template)
    file = written(tmp_path, [{"messages": IN_PARTS}], "--tokenizer", str(folder / "tokenizer.json"))
    text = load_tokenizer(folder / "tokenizer.json").decode(file.document(0).tolist())
    assert text.startswith(f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n") and "{" not in text
    question = ChatTemplate(folder).question(IN_PARTS[:1])
    assert question == file.document(0)[: len(question)].tolist()


def test_parts_that_are_no_text_are_skipped_and_counted(tmp_path, chat_folder, capsys):
    image = [{"role": "user", "content": [{"type": "image"}]}, TALK[2]]
    assert written(tmp_path, [{"messages": image}], "--tokenizer", str(chat_folder / "tokenizer.json")) is None
    said = "skipped: 1 chats with parts that are no text, which the chat template does not write"
    assert said in capsys.readouterr().err
    with pytest.raises(
        ValueError, match="parts that are no text, which the chat template does not write; give texts"
    ):
        ChatTemplate(chat_folder).question(image[:1])
