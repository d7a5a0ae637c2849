"""A corpus and a model that take milliseconds."""

import json

from core.datasets import SourceFiles, prepare_default_corpus
from core.training import DataConfig, ModelConfig, TrainingConfig

VOCAB, S = 280, 16
MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48)


def prepared(directory, files=40):
    """`directory`/tokenizer.json, train and valid of some made-up sources, and what is known about them."""
    sources = directory / "sources"
    sources.mkdir()
    for i in range(files):
        lines = [f"def f{i}_{j}(x):\n    return x * {i * j % 7} + {j}\n\n" for j in range(6)]
        (sources / f"{i}.py").write_text("".join(lines))
    names = tuple(sorted(p.name for p in sources.iterdir()))
    return prepare_default_corpus(
        directory, vocab_size=VOCAB, valid_fraction=0.2, sources=SourceFiles(sources, names)
    )


def data_config(made, **more):
    paths = {"train": str(made.train), "valid": str(made.valid), "tokenizer": str(made.tokenizer)}
    return DataConfig(**paths | {"vocab_size": VOCAB, "sequence_length": S} | more)


def training_config(**more):
    return TrainingConfig(
        **{"train_steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "log_interval": 2} | more
    )


def rewrite_file(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
