"""What every checkpoint of a run says of it, beside its numbers: so that others can read the model."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from core.models.gpt.description import description
from core.models.gpt.gpt_model import GPTModel
from core.training.config import RunConfig
from core.training.run.data import Corpus


def facts_of_run(stages: Mapping[int, nn.Module], corpus: Corpus | None, run: RunConfig) -> dict[str, Any]:
    """The run's settings by flat name, the model, where it is a GPT, and the tokenizer of its text, as JSON values.

    The same on every rank. A checkpoint can then be evaluated by itself.
    """
    facts: dict[str, Any] = {"settings": run.flat()}
    gpt = next((stage for stage in stages.values() if isinstance(stage, GPTModel)), None)
    if gpt is not None:
        facts["model"] = description(gpt)
    if corpus is not None:
        tokenizer, file = corpus.tokenizer, corpus.tokenizer_file
        facts["tokenizer"] = {
            "path": None if file is None else str(file),
            "identity": tokenizer.identity,
            "end_of_text": tokenizer.end_of_text,
        }
    return facts
