"""Who is blamed, from what the ranks reported: a function of reports."""

from types import SimpleNamespace

import pytest
import torch

from core.parallel_state.collectives import groups
from core.parallel_state.collectives.failure import FailureReport, _verdict, check_answered


def test_two_ranks_on_one_accelerator_are_told_what_to_start():
    """As NCCL says it, at the first collective."""
    said = "NCCL error, invalid usage\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    group = SimpleNamespace(name="world", ranks=(0, 1), rank=0)
    with pytest.raises(ValueError, match=r"Duplicate GPU.*nproc-per-node.*--parallel.backend gloo"):
        check_answered(RuntimeError(said), "a gather", group)


def timed_out(rank, waits_for):
    return FailureReport(rank, "step 1", "", timed_out=True, waits_for=waits_for)


def closed(rank, waits_for):
    return FailureReport(rank, "step 1", "", waits_for=waits_for)


# the first report is that of whoever judges
CASES = {
    "its only peer closed": ([closed(0, (2,))], "rank 2 is gone"),
    "of three, all saw it close": ([closed(0, (1, 2)), closed(1, (0, 2))], "rank 2 is gone"),
    "it was waited for in vain": ([timed_out(0, (2,))], "rank 2 told nothing"),
    "its peer gave up first, and closed": ([closed(1, (0,)), timed_out(0, (2,))], "rank 2 told nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_silent_rank_is_gone_only_where_nobody_gave_up(case):
    reports, blame = CASES[case]
    verdict = _verdict(reports[0], {report.rank: report for report in reports}, {2})
    assert verdict.text.startswith(blame) and verdict.guilty == (2,)


def test_a_group_that_lacks_a_rank_says_where_to_look(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("[/pytorch/ProcessGroupGloo.cpp] Gloo connectFullMesh failed with timeout")

    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    message = (
        r"^the world was not connected: one of its ranks ended, or refused its arguments, .* own output says why"
    )
    with pytest.raises(RuntimeError, match=message):
        groups.init_world("gloo", 1.0)
