"""A run that begins as a Hugging Face folder: what is looked at before any process group exists."""

from collections.abc import Iterator
from pathlib import Path

import torch

from core.datasets import TokenFile, check_tokenizer, load_tokenizer, open_blend
from core.datasets.corpus.cached import is_text
from core.datasets.shards.manifest import is_list
from core.datasets.tokenizers.folder import TOKENIZER, without_tokenizer
from core.training.config.data import DataConfig
from core.training.model.config import ModelConfig


def tokenizer_in(folder: str | Path | None) -> str | None:
    """The tokenizer of a Hugging Face folder, if it has one in a file that is read here."""
    if folder is None:
        return None
    path = Path(folder).expanduser() / TOKENIZER
    if path.is_file():
        return str(path)
    return None


def corpus_rules(
    model: ModelConfig, data: DataConfig, reads_text: bool
) -> Iterator[tuple[bool, str]]:
    """The default corpus is not of the folder's tokenizer; nobody asks for it who gives batches."""
    if model.huggingface is None or not reads_text:
        return
    named = tokenizer_in(model.huggingface) or data.tokenizer or TOKENIZER
    yield (
        bool(data.train),
        f"model.huggingface={model.huggingface} has a vocabulary of its own, the default corpus another one; prepare "
        f"your text ({_prepare(named)}) and give data.train=PREFIX",
    )


def _prepare(tokenizer: str) -> str:
    return f"python -m core.datasets.prepare --input TEXT --output PREFIX --tokenizer {tokenizer}"


def text_rules(
    model: ModelConfig, train: tuple[str, ...], tokenizer: str | None
) -> Iterator[tuple[bool, str]]:
    """The text was prepared with the folder's tokenizer, which its embedding can hold."""
    folder = model.huggingface
    if folder is None:
        return
    own = tokenizer_in(folder)
    named = own or tokenizer or TOKENIZER
    remedy = _prepare(named)
    same = (
        own is None
        or tokenizer is None
        or Path(tokenizer).expanduser().resolve() == Path(own).resolve()
    )
    yield (
        same,
        f"data.tokenizer={tokenizer} is given beside model.huggingface={folder}, which has {TOKENIZER}; leave "
        "data.tokenizer out",
    )
    yield (
        own is not None
        or tokenizer is not None
        or not Path(folder).expanduser().is_dir()  # told elsewhere
        or not _first_is_text(train),
        f"model.huggingface={without_tokenizer(folder, 'data.tokenizer')}: without one a vocabulary would be learned "
        "from the text, which is not the model's",
    )
    path = own or tokenizer
    if path is None or not Path(path).is_file() or not train or not same:
        # told elsewhere, or the text's own tokenizer: looked at when the text is opened
        return
    try:
        # text becomes a token file of this tokenizer when the run starts
        prefixes = [
            prefix for _, prefix in open_blend(train) if not (is_text(prefix) or is_list(prefix))
        ]
        files = [TokenFile(prefix) for prefix in prefixes]
        card = files[0].card if files else None
        # with the end of text that the text was prepared with
        made = load_tokenizer(path, card.end_of_text if card is not None else None)
        model.vocabulary(made.vocab_size)
    except (ValueError, OSError) as error:
        yield False, str(error)
        return
    for file in files:
        try:
            check_tokenizer(file, made, is_fixed=own is not None)
        except ValueError as error:
            yield False, f"model.huggingface={folder}: {error} ({remedy})"


def _first_is_text(train: tuple[str, ...]) -> bool:
    """Whether the first of the training texts, whose tokenizer reads them all, is not prepared yet."""
    try:
        return bool(train) and is_text(open_blend(train)[0][1])
    except ValueError:  # told by the rules of the files
        return False


def weight_rules(model: ModelConfig, sequence_length: int) -> Iterator[tuple[bool, str]]:
    """The folder holds whole safetensors files of exactly this model; headers are read, no weights."""
    if model.huggingface is None:
        return
    # here, so that a configuration without a folder is read without the code that trains
    from core.models.gpt import GPTModel
    from core.models.huggingface.reading import open_weights
    from core.models.huggingface.sources import Folder
    from core.parallel_state import ParallelState

    try:
        arguments = model.arguments(1, sequence_length)
    except ValueError:  # told by the rules of the model
        return
    try:
        with torch.device("meta"):  # names and shapes
            whole = GPTModel(**arguments, parallel=ParallelState.single("cpu"), seed=0)
        # names and shapes are compared there; no weight is read
        open_weights(whole, Folder(model.huggingface))
    except (ValueError, ImportError) as error:
        prefix = f"model.huggingface={model.huggingface}: "
        yield False, prefix + str(error).removeprefix(prefix)


def export_rules(
    model: ModelConfig, sequence_length: int, folder: str
) -> Iterator[tuple[bool, str]]:
    """The model of a run can go to `folder` when the run ends."""
    # here, so that a configuration without an export is read without the code that trains
    from core.models.gpt.description import description_of
    from core.training.run import export

    described_as = None
    if model.build is None:
        try:
            described_as = description_of(**model.arguments(1, sequence_length))
        except ValueError:  # told by the rules of the model
            return
    yield from export.export_rules(folder, described_as, model.huggingface)
