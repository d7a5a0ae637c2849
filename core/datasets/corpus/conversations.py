"""Fine-tuning files: JSON lines of chats, or of prompts with their answers, as tokens of which the answers are known.

A chat is what its tokenizer's chat template makes of it, by transformers; prompt and answer are joined as they are.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.datasets.card import card_path, read_card, tokenizer_path
from core.datasets.corpus.build import CorpusFiles, TextFiles, checked_prefix, skipped_text
from core.datasets.corpus.sources import TextSource
from core.datasets.corpus.tables import all_hold
from core.datasets.token_file import file_paths
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer

ANSWERS = ("response", "completion")  # what stands beside "prompt"
_NEITHER = 'rows without "messages", "conversations" or a "prompt" with its "response"'
_NO_ROLES = "chats whose messages lack a role or a content"
_NO_ANSWER = "chats without an answer of the assistant"
_REWRITTEN = "chats of which the chat template rewrites earlier turns"
_OTHER_PARTS = "chats with parts that are no text, which the chat template does not write"
# a text that no template has of its own
_PROBE = "one part of a content"
# where a template may stand
_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


# ShareGPT's chats: messages of "from" and "value"
_CHATS = "conversations"
_THEIR_ROLES = {"human": "user", "gpt": "assistant"}


class Conversation(NamedTuple):
    """tokens: of all of it. answers: as many, True for what an answer is made of."""

    tokens: list[int]
    answers: list[bool]


class UnusableRowError(Exception):
    """Why a row is skipped."""


class _RewrittenTurnsError(UnusableRowError):
    """A chat template writes a turn otherwise once others follow it."""


class ChatTemplate:
    """The chat template that lies beside a `tokenizer.json`. otherwise: what to do without one, for the message.

    Raises ValueError: there is none. ImportError with the remedy: transformers is missing.
    """

    def __init__(self, folder: Path, otherwise: str = "give rows of prompt and response") -> None:
        if not any((folder / name).is_file() for name in _FILES):
            raise ValueError(
                f"{folder} holds none of {', '.join(_FILES)}, so no chat template for messages; copy the file "
                f"of the model whose tokenizer it is there, or {otherwise}"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                "chat templates need transformers: pip install transformers"
            ) from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {folder} has no chat template; put the model's chat_template.jinja beside it, "
                f"or {otherwise}"
            )

    def encode(
        self,
        messages: list[Mapping[str, Any]],
        given: Mapping[str, Any] | None = None,
        prompt: int = 0,
    ) -> Conversation:
        """A chat as the template writes it; answers are what it writes for the assistant after its header.

        given: to the template, beside the messages: tools. prompt: messages at the beginning that are no answers,
        whoever's they are.
        """
        messages = self._readable(messages)
        render = partial(self._tokenizer.apply_chat_template, tokenize=False, **(given or {}))
        text = render(messages)
        spans = []
        for number, message in enumerate(messages):
            if number < prompt or not _is_learned(message):
                continue
            before = render(messages[:number], add_generation_prompt=True)
            # the end of the turn is the answer's, the white space before the next header is not
            through = render(messages[: number + 1]).rstrip()
            if not (
                text.startswith(before) and text.startswith(through) and len(before) < len(through)
            ):
                raise _RewrittenTurnsError(_REWRITTEN)
            spans.append((len(before), len(through)))
        # the template has written the special tokens already
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # a token counts where all its characters lie in one answer
        answers = []
        for first, last in encoded["offset_mapping"]:
            answers.append(any(start <= first < last <= stop for start, stop in spans))
        return Conversation(encoded["input_ids"], answers)

    def question(self, messages: list[Mapping[str, Any]]) -> list[int]:
        """A chat as far as the header of the answer that is to come. Raises ValueError: parts that nothing writes."""
        try:
            messages = self._readable(messages)
        except UnusableRowError as error:
            raise ValueError(f"{error}; give texts") from None
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _readable(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Where contents are lists of parts and the template knows texts only: their texts, joined.

        transformers would write the list as Python does, or JSON, into what is learned.
        """
        if not any(isinstance(message["content"], list) for message in messages):
            return messages
        if self._writes_parts:
            return messages
        return [{**message, "content": _joined(message["content"])} for message in messages]

    @cached_property
    def _writes_parts(self) -> bool:
        """Whether the template loops over parts."""
        parts = [{"type": "text", "text": _PROBE}]
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False
            )
        except Exception:  # a template raises what it likes
            return False
        return _PROBE in text and str(parts) not in text and json.dumps(parts) not in text


def _joined(content: Any) -> Any:
    """The texts of a list of parts as one; what is no list stays. Raises `UnusableRowError`: other parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise UnusableRowError(_OTHER_PARTS)
    return "".join(map(str, texts))


def are_conversations(sources: list[TextSource] | tuple[TextSource, ...]) -> bool:
    """Whether the first row of each file is a chat, or a prompt with its answer.

    Raises ValueError: that is so for some of the files only.
    """
    return all_hold(sources, _is_conversation, "chats or prompts")


def _is_conversation(row: Any) -> bool:
    return isinstance(row, dict) and (
        "messages" in row
        or _CHATS in row
        or ("prompt" in row and any(key in row for key in ANSWERS))
    )


def given_to_template(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says for the template, beside its messages: `tools`, also as JSON, and `chat_template_kwargs`.

    Raises `UnusableRowError`: of another kind.
    """
    tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        more = json.loads(more) if isinstance(more, str) else more
    except ValueError:
        raise UnusableRowError("chats whose tools are a text that is no JSON") from None
    if not isinstance(more, Mapping):
        raise UnusableRowError("chats whose chat_template_kwargs are no object")
    return {"tools": tools or None, **more}


def _with_content(message: Any) -> Any:
    """A message that calls tools may have no content. Raises `UnusableRowError`: one without a role, or a content."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        if "content" in message:
            return message
        if message.get("tool_calls"):
            return {**message, "content": None}
    raise UnusableRowError(_NO_ROLES)


def _is_learned(message: Mapping[str, Any]) -> bool:
    """Answers are, but those of `weight` 0 (OpenAI's files)."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _of_sharegpt(row: dict[str, Any]) -> Any:
    """The messages of a row in ShareGPT's form; `system` beside them is the first of them."""
    messages = row[_CHATS]
    if not isinstance(messages, list):
        return messages
    ours = []
    if row.get("system"):
        ours.append({"role": "system", "content": row["system"]})
    for message in messages:
        if isinstance(message, dict) and "from" in message and "value" in message:
            role = message["from"]
            message = {"role": _THEIR_ROLES.get(role, role), "content": message["value"]}
        ours.append(message)
    return ours


class ConversationEncoder:
    """Rows as tokens. folder: where the chat template lies; it is read at the first row of messages.

    answer_end: the token that is learned behind a prompt's answer; default: the end of text.
    """

    def __init__(
        self, tokenizer: AnyTokenizer, folder: Path | None, answer_end: int | None = None
    ) -> None:
        self._answer_end = tokenizer.end_of_text if answer_end is None else answer_end
        self._tokenizer = tokenizer
        self._folder = folder
        self._template: ChatTemplate | None = None

    def encode(self, row: Any) -> list[Conversation]:
        """Each ends with the end of text; the end of a prompt's answer is learned. Raises `UnusableRowError`.

        One, but of a chat whose template rewrites earlier turns (thoughts that only the last answer keeps): one for
        each answer, as the model will have seen the chat when it gives that.
        """
        if isinstance(row, dict) and "messages" in row:
            return self._turns(row["messages"], given_to_template(row))
        if isinstance(row, dict) and _CHATS in row:
            return self._turns(_of_sharegpt(row), given_to_template(row))
        prompt = row.get("prompt") if isinstance(row, dict) else None
        answer = None
        if prompt is not None:
            answer = next((row[key] for key in ANSWERS if key in row), None)
        if isinstance(prompt, list) and isinstance(answer, list):
            return self._turns([*prompt, *answer], given_to_template(row), len(prompt))
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise UnusableRowError(_NEITHER)
        return [self.encode_answer(prompt, answer)]

    def _turns(
        self, messages: Any, given: Mapping[str, Any], prompt: int = 0
    ) -> list[Conversation]:
        try:
            messages = json.loads(messages) if isinstance(messages, str) else messages
        except ValueError:
            raise UnusableRowError("chats whose messages are a text that is no JSON") from None
        try:
            return [self.encode_chat(messages, given, prompt)]
        except _RewrittenTurnsError:
            answers = [
                number
                for number, message in enumerate(messages)
                if number >= prompt and _is_learned(message)
            ]
            return [self.encode_chat(messages[: n + 1], given, n) for n in answers]

    def encode_answer(self, prompt: str, answer: str) -> Conversation:
        """The two joined, behind what opens a text; with the answer's end, and the end of text, where that is another
        token."""
        # apart, so that no token is half prompt and half answer
        first, second = self._tokenizer.encode_marked([prompt, answer])
        starts = list(self._tokenizer.starts)
        # a template has written both already
        if first[: len(starts)] != starts:
            first = starts + first
        if second[-1:] != [self._answer_end]:
            second = [*second, self._answer_end]
        joined = Conversation(first + second, [False] * len(first) + [True] * len(second))
        return self._with_end_of_text(joined)

    def encode_chat(
        self, messages: Any, given: Mapping[str, Any] | None = None, prompt: int = 0
    ) -> Conversation:
        """As the template writes it, with the end of text. given, prompt: see `ChatTemplate.encode`."""
        if not isinstance(messages, list) or not messages:
            raise UnusableRowError(_NEITHER)
        messages = [_with_content(message) for message in messages]
        if not any(map(_is_learned, messages[prompt:])):
            roles = ", ".join(sorted({message["role"] for message in messages[prompt:]})[:4])
            raise UnusableRowError(f"{_NO_ANSWER}, whose roles are {roles}")
        if self._template is None:
            if self._folder is None:
                raise ValueError(
                    "rows of messages need the tokenizer of a model with a chat template, and tokens here are "
                    "learned, or bytes; give FOLDER/tokenizer.json (--tokenizer of prepare, data.tokenizer of a run)"
                )
            self._template = ChatTemplate(self._folder)
        try:
            return self._with_end_of_text(self._template.encode(messages, given, prompt))
        except UnusableRowError:
            raise
        except Exception as error:
            # a template raises what it likes about roles that it does not know
            raise UnusableRowError(
                f"chats that the chat template refuses ({' '.join(str(error).split())})"
            ) from None

    def _with_end_of_text(self, chat: Conversation) -> Conversation:
        """With the end of text behind it, where there is none yet; what is learned is the answer's own end."""
        end = self._tokenizer.end_of_text
        if chat.tokens and chat.tokens[-1] == end:
            return chat
        return Conversation([*chat.tokens, end], [*chat.answers, False])


def prepare_conversations(
    text: TextFiles,
    output: str | Path,
    tokenizer: AnyTokenizer,
    *,
    template_folder: Path | None = None,
    answer_end: int | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> CorpusFiles:
    """As `prepare_files`, of chats and prompts: a document per row, in the order of the rows; answers are marked.

    template_folder, answer_end: as of `ConversationEncoder`.
    Raises ValueError: no row that can be used; rows of messages without a chat template.
    """
    begin = time.perf_counter()
    prefix = checked_prefix(output)
    encoder = ConversationEncoder(tokenizer, template_folder, answer_end)
    end = tokenizer.end_of_text
    with TokenFileWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        end_of_text=end,
        sources=text.inputs,
        marks_answers=True,
    ) as writer:
        for chunk in text.chunks(writer.skipped, rows=True):
            for row in _parsed_rows(chunk.content, writer.skipped):
                try:
                    conversations = encoder.encode(row)
                except UnusableRowError as error:
                    writer.skipped[str(error)] += 1
                    continue
                for tokens, answers in conversations:
                    writer.add_conversation(np.array(tokens), np.array(answers))
            assert isinstance(chunk.content, bytes)
            writer.text_bytes += len(chunk.content)
            advance(chunk.size)
        if not writer.num_documents:
            raise ValueError(
                f"0 chats or prompts in {len(text.sources)} files, skipped: {skipped_text(writer.skipped)}"
            )
    card = read_card(prefix)
    assert card is not None
    files = [
        path
        for path in (*file_paths(prefix), card_path(prefix), tokenizer_path(prefix))
        if path.exists()
    ]
    return CorpusFiles(
        prefix=prefix, card=card, files=tuple(files), seconds=time.perf_counter() - begin
    )


def _parsed_rows(content: Any, skipped: Counter[str]) -> Iterator[Any]:
    for line in content.split(b"\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                skipped["lines that are no JSON"] += 1
