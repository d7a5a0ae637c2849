"""docs/tutorial.md, block by block as it stands."""

import re
from pathlib import Path

import pytest

from tests.examples.test_continue_pretraining import ROOT, blocks, run_block

PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.full
def test_the_page(tmp_path):
    said = [run_block(language, text, tmp_path) for language, text in blocks(PAGE)]
    _, prepared, _, explained, trained, resumed, judged, tuned, exported = said
    assert "800" in prepared and "16 = micro_batch_size 4 x accumulation 2 x data 2" in explained
    losses = [float(loss) for loss in re.findall(r"\| loss (\S+) \|", trained)]
    assert losses[0] > 6.5 and losses[-1] < losses[0] - 0.8, "most of the way to the entropy of single tokens"
    assert "validation.ema" in trained
    assert re.search(r"resumed from \S*runs/first/checkpoints/step-00000040/?: step 40", resumed)
    assert "2-stage pipeline" in resumed
    assert "runs/averaged" in judged and "bits per byte" in judged
    assert "conversations: " in tuned and "the loss is of their answers" in tuned and "What is json?" in tuned
    answers = [float(loss) for loss in re.findall(r"\| loss (\S+) \|", tuned)]
    assert answers[-1] < answers[0]
    assert "AutoModelForCausalLM.from_pretrained loads it" in exported and Path(tmp_path / "hf").is_dir()
