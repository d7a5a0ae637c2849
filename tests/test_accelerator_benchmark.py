"""The script that an accelerator is given runs as a whole: every check holds, with the CPU in its place."""

import json

import pytest
import torch

from benchmarks.accelerator.__main__ import PARTS, main
from benchmarks.accelerator.bench import Bench, close, same_bits
from tests import warm

ONLY_THERE = {  # what a CPU cannot show
    "no host read in a step",
    "one rank of the accelerator's backend",
    "ceiling: copies to the host",
    "step: host over device of ours_eager",
    "step: host over device of ours_compiled",
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_dry_run_holds_in_every_part(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHON_EXEC", warm.python())  # of the ranks that torchrun starts
    out = tmp_path / "figures.json"
    status = main(["--dry", "--device", "cpu", "--json", str(out)])
    torch.set_num_threads(1)
    text = capsys.readouterr().out
    assert status == 0, text
    for part in PARTS:
        assert f"--- {part}\n" in text
    assert "FAILED" not in text
    told = next(line for line in text.splitlines() if line.startswith("0 failed: none; not here: "))
    assert set(told.partition("not here: ")[2].split(", ")) == ONLY_THERE
    figures = json.loads(out.read_text())
    assert {
        "tflops_products",
        "tokens_s_ours_eager",
        "split_over_one_backward",
        "stall_over_copy",
        "ms_loss_chunk_2^12",
    } <= figures.keys()


def test_one_failure_ends_nothing_and_is_told(capsys):
    b = Bench(torch.device("cpu"), dry=True)

    def fails(bench):
        raise AssertionError("off by one")

    b.line("the first", fails)
    b.line("the second", lambda bench: "right")
    out = capsys.readouterr().out
    assert "the first" in out and "FAILED" in out and "AssertionError: off by one" in out and "ok" in out
    assert b.failed == ["the first"]


def test_nan_never_passes():
    x, nan = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, torch.nan])}
    for found, expected in ((nan, x), (x, nan), (nan, nan)):
        with pytest.raises(AssertionError):
            close(found, expected, 1.0, "gradients")
        with pytest.raises(AssertionError):
            same_bits(found, expected, "weights")
