"""docs/coming_from.md: our names are fields, theirs are what their programs know, and what is not here is said."""

import dataclasses
import re
from pathlib import Path

import pytest

from core.elsewhere import ELSEWHERE, REMARKS, TORCHTITAN
from core.interop.deepspeed import keys as deepspeed_keys
from core.training.config.run import PARTS, known_fields

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()
SECTIONS = {title: text for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)}


def rows(section):
    """(their names, our names) of a table."""
    found = re.findall(r"^\| (.*?) \| (.*) \|$", SECTIONS[section], re.M)
    return [(re.findall(r"`([^`]+)`", left), re.findall(r"`([^`]+)`", right)) for left, right in found[1:]]


@pytest.mark.parametrize("section", SECTIONS)
def test_our_names_are_fields(section):
    ours = [name for _, right in rows(section) for name in right]
    fields = [name for name in ours if name.partition(".")[0] in PARTS and re.fullmatch(r"\w+\.\w+", name)]
    assert len(fields) >= 10
    assert set(fields) <= known_fields().keys()


@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_not_here_is_said(section):
    assert re.search(r"^\| .* \| not here", SECTIONS[section], re.M)


def test_torchtitans_names_lead_where_a_run_says():
    """The table, and what a run answers to such a name, are one mapping."""
    for left, right in rows("torchtitan"):
        for name in left:
            if name in TORCHTITAN:
                assert TORCHTITAN[name] in right, name
    named = {name for left, _ in rows("torchtitan") for name in left}
    assert len(named & TORCHTITAN.keys()) > 20


def test_hugging_faces_names_are_training_arguments():
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    named = [name for left, _ in rows("Hugging Face: Trainer, Accelerate") for name in left]
    theirs = [name for name in named if re.fullmatch(r"[a-z_0-9]+", name)]
    not_arguments = {"messages", "prompt", "completion", "packing", "assistant_only_loss"}  # of TRL
    not_arguments |= {"chosen", "rejected", "beta", "label_smoothing", "loss_type", "max_length"}
    not_arguments |= {"precompute_ref_log_probs", "disable_dropout"}
    not_arguments |= {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora"}  # of PEFT
    not_arguments |= {name for name in theirs if re.match(r"(adamw|paged_adamw|lion)_", name)} | {
        "adafactor"
    }  # of optim
    assert len(theirs) > 25 and set(theirs) - not_arguments <= known


def test_deepspeeds_keys_are_those_of_its_configuration():
    named = [name for left, _ in rows("DeepSpeed") for name in left]
    keys = [name for name in named if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)?", name)]
    source = (Path(deepspeed_keys.__file__).parent / "sections.py").read_text()
    source += Path(deepspeed_keys.__file__).read_text()
    assert len(keys) > 12
    assert not [key for key in keys if key.split(".")[-1] not in source]


FEATURES = (Path(__file__).parents[1] / "docs" / "features.md").read_text()


def test_every_feature_that_works_names_a_proof_that_is_there_and_the_counts_are_right():
    features = re.findall(r"^\| ([WPM]) \| (.*?) \| (.*) \|$", FEATURES, re.M)
    assert len(features) == 61
    for state, feature, proof in features:
        paths = re.findall(r"`(tests/[^`]+)`", proof)
        assert all((Path(__file__).parents[1] / path).exists() for path in paths), feature
        fields = [name for name in re.findall(r"`(\w+\.\w+)", proof) if name.partition(".")[0] in PARTS]
        assert state != "W" or paths or fields, feature
        assert set(fields) <= known_fields().keys()
    counts = [sum(state == letter for state, *_ in features) for letter in "WPM"]
    assert f"Of 61 rows {counts[0]} work, {counts[1]} do partly, {counts[2]} are missing" in FEATURES


def test_names_of_lightnings_trainer_are_answered():
    """The page says that a run does; those of calls, `ModelCheckpoint(save_top_k)`, stand in brackets."""
    text = " ".join(name for left, _ in rows("Lightning") for name in left)
    named = {"gradient_clip_val", "log_every_n_steps", "strategy", "save_top_k", "monitor", "overfit_batches"}
    assert named <= set(re.findall(r"\w+", text))
    for name in named | {"limit_val_batches", "accumulate_grad_batches"}:
        assert ELSEWHERE.get(name) in known_fields() or name in REMARKS, name
