"""Ranks that were told different runs say so, all of them, with the field and both values."""

import pytest
import torch.distributed as dist

from core.training import RunConfig
from core.training.config import same_on_all_ranks


def said_by(by_rank):
    """What this rank says when rank r was told `by_rank[r]`."""
    try:
        same_on_all_ranks(RunConfig.from_dict(by_rank.get(dist.get_rank(), {})))
    except ValueError as error:
        return str(error)
    return None


def test_the_same_run_says_nothing(ranks):
    assert ranks(said_by, {}, world=2) == [None, None]
    same_on_all_ranks(RunConfig())  # nobody else to ask


def test_a_differing_field_is_named_with_both_values_on_every_rank(ranks):
    first, second, third = ranks(said_by, {0: {"optimizer.lr": 1e-4}, 1: {"optimizer.lr": 3e-4}}, world=3)
    assert first == second == third
    assert first == (
        "rank 1 differs from rank 0: optimizer.lr 0.0003 != 0.0001; rank 2 differs from rank 0: "
        "optimizer.lr 0.001 != 0.0001. Give every rank the same files, flags and software"
    )


def test_texts_lists_and_nothing_differ_too_and_many_are_cut_short(ranks):
    given = {"checkpoint.load": "a", "data.train": ["x"], "parallel.sequence_parallel": True}
    (said, _) = ranks(said_by, {1: given}, world=2)
    assert "checkpoint.load 'a' != None" in said and "data.train ('x',) != ()" in said
    assert "parallel.sequence_parallel True != False" in said
    seeds = ["model.seed", "data.seed", "training.seed", "optimizer.rounding_seed", "training.train_steps"]
    sizes = ["training.log_interval", "model.num_layers", "checkpoint.keep_last", "checkpoint.keep_every"]
    (said, _) = ranks(said_by, {1: dict.fromkeys([*seeds, *sizes], 7)}, world=2)
    assert said.count("differs") == 8 and "; and 2 more. Give" in said


def other_version():
    """Rank 1 runs other software."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("core.training.config.across.__version__", "9.9")
            patch.setattr("torch.__version__", "0.0")
        return said_by({})


def test_other_software_differs_too(ranks):
    for said in ranks(other_version, world=2):
        assert "rank 1 differs from rank 0: paracore '9.9' != " in said
        assert "rank 1 differs from rank 0: torch '0.0' != " in said
