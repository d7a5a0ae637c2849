"""The session-wide pool of ranks, and quick failures that name a rank."""

import gc
import json

import pytest
import torch

from core.parallel_state import ParallelState
from tests import slow
from tests.datasets.chats import CHATML
from tests.pool import Pool


@pytest.fixture(scope="session")
def _pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def ranks(_pool):
    """`ranks(fn, world=n, **kwargs)` runs `fn` on n gloo ranks; results come in rank order."""
    return _pool


@pytest.fixture
def single():
    """One process on the CPU, whatever the machine has."""
    return ParallelState.single("cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """How several workers share the tests. (`--dist loadgroup` groups nothing under pytest 9.2.)"""
    from tests.workers import OnePool

    return OnePool(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    slow.mark(items)


def pytest_collection_finish():
    """What was imported and collected lives to the end: no collection of garbage walks through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """The seed that the pool's ranks start from: a model takes its initial weights from it."""
    if slow.is_too_late(item):
        pytest.skip("not reached: TESTS_END has passed (.ci/run)")
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    """A tokenizer of 300 tokens with a chat template, as a model's folder has it."""
    import tokenizers

    folder = tmp_path_factory.mktemp("model")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["Two and two? Four. And a cat? user assistant system"] * 3, trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
