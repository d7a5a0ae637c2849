"""What every checkpoint of a run says of it, beside its numbers; and what is read from that."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from core.datasets import AnyTokenizer, load_tokenizer
from core.datasets.answer_ends import answer_ends
from core.datasets.card import recorded_tokenizer
from core.dist_checkpointing.reading.loading import open_stored
from core.models.gpt.description import described, description
from core.models.gpt.gpt_model import GPTModel
from core.models.lora.base import fingerprint
from core.training.config import RunConfig
from core.training.config.run import known_fields
from core.training.model.config import ModelConfig
from core.training.model.weights import model_settings
from core.training.run.data import Corpus


def facts_of_run(
    stages: Mapping[int, nn.Module], corpus: Corpus | None, run: RunConfig
) -> dict[str, Any]:
    """The run's settings by flat name, the model, where it is a GPT, its adapters, and the tokenizer of its text.

    JSON values, the same on every rank. A checkpoint can then be evaluated by itself. Of a model with adapters
    collective: what tells the frozen weights apart is a sum over all ranks.
    """
    facts: dict[str, Any] = {"settings": run.flat()}
    gpt = next((stage for stage in stages.values() if isinstance(stage, GPTModel)), None)
    if gpt is not None:
        facts["model"] = description(gpt)
        if gpt.lora is not None:
            facts["lora"] = gpt.lora.facts()
            if not gpt.lora.save_base:
                whole = {
                    number: stage for number, stage in stages.items() if isinstance(stage, GPTModel)
                }
                facts["lora"]["base"] = fingerprint(whole, gpt.parallel)
    if corpus is not None:
        tokenizer = corpus.tokenizer
        file = corpus.tokenizer_file
        facts["tokenizer"] = {
            "path": None if file is None else str(file),
            "identity": tokenizer.identity,
            "end_of_text": tokenizer.end_of_text,
        }
        ends = [answer_ends(source, tokenizer, file) for _, source in corpus.train_parts]
        if turns := sorted(set().union(*ends)):
            facts["tokenizer"]["answer_ends"] = turns
    return facts


def model_of_checkpoint(checkpoint: str | Path) -> dict[str, Any]:
    """The arguments of GPTModel. Raises ValueError: the checkpoint does not say them."""
    run = open_stored(checkpoint).run
    if "model" in run:
        return described(run["model"])
    own_settings: Any = run.get("settings", {})
    settings = {} if own_settings.get("model.build") else model_settings(str(checkpoint))
    if not settings:
        if build := own_settings.get("model.build"):
            raise ValueError(
                f"{checkpoint} is of a model of one's own (model.build = {build!r}), which this command cannot make; "
                "in a program, load it and call core.training.generate.generate(model, ...)"
            )
        raise ValueError(
            f"{checkpoint} says nothing of its model; give --source, the Hugging Face folder that it began as"
        )
    # of an import: what its own program said of it
    known = known_fields()
    values = {
        name.removeprefix("model."): known[name].read(value)
        for name, value in settings.items()
        if name in known
    }
    model = ModelConfig(**values)
    return model.arguments(model.vocab_size or 1, own_settings.get("data.sequence_length") or 1)


def tokenizer_file(checkpoint: str | Path, file: str | None = None) -> Path | None:
    """`file`, or the one that the run had; None: its tokens are bytes. Raises ValueError: it is not there."""
    saved: Any = open_stored(checkpoint).run.get("tokenizer", {})
    path = file if file is not None else saved.get("path")
    if file is None and path is not None:
        path = recorded_tokenizer(path, saved["identity"])
    if file is None and not saved:
        raise ValueError(f"{checkpoint} says nothing of its tokenizer; give --tokenizer FILE")
    if path is not None and not Path(path).is_file():
        raise ValueError(
            f"the tokenizer of {checkpoint}, {path}, is not there; give --tokenizer FILE"
        )
    return None if path is None else Path(path)


def tokenizer_of_checkpoint(
    checkpoint: str | Path, file: str | None = None, end_of_text: str | None = None
) -> AnyTokenizer:
    """The tokenizer of the run, or the one in `file`. Raises ValueError: it is not there, or is another one."""
    path = tokenizer_file(checkpoint, file)
    saved: Any = open_stored(checkpoint).run.get("tokenizer", {})
    tokenizer = load_tokenizer(
        path, end_of_text if end_of_text is not None else saved.get("end_of_text")
    )
    # another tokenizer would read other texts into the same numbers, without an error
    if saved and tokenizer.identity != saved["identity"]:
        raise ValueError(
            f"{path} is tokenizer {tokenizer.identity[:12]}, the run of {checkpoint} had {saved['identity'][:12]}; "
            "give that one: --tokenizer FILE"
        )
    return tokenizer
