"""Preference files: JSON lines of a prompt with a chosen and a rejected response, in the forms that TRL reads.

A pair becomes two documents, as conversations become one each: prompt and chosen response, prompt and rejected one.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from core.datasets.card import card_path, read_card, tokenizer_path
from core.datasets.corpus.build import CorpusFiles, TextFiles, checked_prefix
from core.datasets.corpus.conversations import (
    Conversation,
    ConversationEncoder,
    UnusableRowError,
    given_to_template,
)
from core.datasets.corpus.sources import TextSource
from core.datasets.corpus.tables import all_hold, numbered_rows_of
from core.datasets.token_file import file_paths
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer

RESPONSES = ("chosen", "rejected")
_SAME = "pairs whose chosen and rejected response are the same"
_MOST_TOLD = 5


def are_preferences(sources: list[TextSource] | tuple[TextSource, ...]) -> bool:
    """Whether the first row of each file has a chosen or a rejected response.

    Raises ValueError: that is so for some of the files only.
    """
    return all_hold(sources, _is_pair, "preferences")


def _is_pair(row: Any) -> bool:
    return isinstance(row, dict) and any(name in row for name in RESPONSES)


def encode_pair(row: Any, encoder: ConversationEncoder) -> tuple[Conversation, Conversation]:
    """(prompt and chosen response, prompt and rejected response). Raises `UnusableRowError`: what is wrong."""
    if not isinstance(row, dict):
        raise UnusableRowError(f"is a {type(row).__name__}, no object")
    missing = [f'"{name}"' for name in RESPONSES if row.get(name) is None]
    if missing:
        raise UnusableRowError(f"lacks {' and '.join(missing)}")
    responses = [row[name] for name in RESPONSES]
    prompt = row.get("prompt")
    # a text beside whole conversations repeats how they begin (UltraFeedback); TRL reads these alone
    first, second = (r[:1] if isinstance(r, list) else [] for r in responses)
    are_whole = bool(first) and first == second
    if prompt is None or (isinstance(prompt, str) and are_whole):
        prompt, *responses = _common_prompt(*responses)
    kinds = {type(value) for value in (prompt, *responses)}
    if kinds == {str} and prompt:
        chosen, rejected = (encoder.encode_answer(prompt, response) for response in responses)
    elif kinds == {list} and prompt:
        given = given_to_template(row)
        chosen, rejected = (
            encoder.encode_chat([*prompt, *response], given, len(prompt)) for response in responses
        )
    elif len(kinds) > 1:
        told = ", ".join(f'"{name}" is a {type(row.get(name)).__name__}' for name in row_keys(row))
        raise UnusableRowError(f"mixes text and messages: {told}")
    else:
        raise UnusableRowError(
            f'has an empty "prompt", or one that is no text and no messages ({prompt!r})'
        )
    return chosen, rejected


def row_keys(row: dict[str, Any]) -> list[str]:
    """Those of prompt, chosen and rejected that are there."""
    return [name for name in ("prompt", *RESPONSES) if name in row]


def _common_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of two whole conversations or texts: they begin alike up to their responses."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise UnusableRowError('lacks "prompt"')
    shorter = min(len(chosen), len(rejected))
    same = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    if isinstance(chosen, str) and chosen[:same].endswith(" "):
        same -= 1  # as TRL: a word keeps its space
    if not chosen[:same]:
        raise UnusableRowError(
            'lacks "prompt", and "chosen" and "rejected" have 0 in common at their beginning'
        )
    return chosen[:same], chosen[same:], rejected[same:]


def prepare_preferences(
    text: TextFiles,
    output: str | Path,
    tokenizer: AnyTokenizer,
    *,
    template_folder: Path | None = None,
    answer_end: int | None = None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> CorpusFiles:
    """As `prepare_conversations`, of preferences: two documents per row, chosen and rejected.

    Pairs of two equal responses are skipped and counted. Raises ValueError: rows that are no pair, by file and line,
    with what is missing; no pair at all; rows of messages without a chat template.
    """
    begin = time.perf_counter()
    prefix = checked_prefix(output)
    encoder = ConversationEncoder(tokenizer, template_folder, answer_end)
    problems: list[str] = []
    with TokenFileWriter(
        prefix,
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer,
        end_of_text=tokenizer.end_of_text,
        sources=text.inputs,
        in_pairs=True,
    ) as writer:
        for source in text.sources:
            for number, line in numbered_rows_of(source):
                try:
                    pair = encode_pair(_parsed(line), encoder)
                except UnusableRowError as error:
                    problems.append(f"{source.path}:{number}: {error}")
                    continue
                if pair[0].tokens == pair[1].tokens:
                    writer.skipped[_SAME] += 1
                    continue
                for tokens, answers in pair:
                    writer.add_conversation(np.array(tokens), np.array(answers))
                writer.text_bytes += len(line)
            advance(source.size)
        _refuse(problems, text, writer)
    card = read_card(prefix)
    assert card is not None
    paths = (*file_paths(prefix), card_path(prefix), tokenizer_path(prefix))
    files = tuple(path for path in paths if path.exists())
    return CorpusFiles(prefix=prefix, card=card, files=files, seconds=time.perf_counter() - begin)


def _refuse(problems: list[str], text: TextFiles, writer: TokenFileWriter) -> None:
    """Raise ValueError where a row is no pair, or no row is one: training on the rest would be another training."""
    if problems:
        more = f"; and {len(problems) - _MOST_TOLD} more" if len(problems) > _MOST_TOLD else ""
        raise ValueError(
            f"{len(problems)} rows are no preferences: {'; '.join(problems[:_MOST_TOLD])}{more}. A row is "
            '{"prompt": ..., "chosen": ..., "rejected": ...}, all of them text, or all lists of messages'
        )
    if not writer.num_documents:
        raise ValueError(
            f"0 preferences in {len(text.sources)} files; {writer.skipped[_SAME]} {_SAME}"
        )


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableRowError("is no JSON") from None
