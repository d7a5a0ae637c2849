"""Settings that somebody gave and that change nothing beside the others: no mistake, but told."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from core.datasets.corpus.cached import is_text

_PIPELINE = "parallel.pipeline=1 has no stages that take turns"
_KEEP_BEST = "checkpoint.keep_best names no metric"


def unused(
    values: Mapping[str, Any], defaults: Mapping[str, Any], typed: Collection[str] = ()
) -> list[str]:
    """`pipeline.schedule=zb-v has no effect: ...` of each that differs from its default; by flat name.

    typed: names of the command line. Adapters that somebody means to have are told at the default's value, too.
    """
    reasons = _reasons_by_field(values)
    given = [
        name
        for name in reasons
        if values[name] != defaults[name] or (name in typed and name.startswith("lora."))
    ]
    return [f"{name}={values[name]} has no effect: {reasons[name]}" for name in given]


def _reasons_by_field(values: Mapping[str, Any]) -> dict[str, str]:
    """Field -> why it is not read, as the other values are."""
    reasons: dict[str, str] = {}
    if values["parallel.pipeline"] == 1:
        reasons |= dict.fromkeys(
            ("pipeline.schedule", "pipeline.chunks", "pipeline.memory_limit"), _PIPELINE
        )
    if values["parallel.tensor"] == 1 and values["parallel.sequence_parallel"]:
        reasons["parallel.sequence_parallel"] = (
            "parallel.tensor=1 leaves one rank with the whole sequence"
        )
    if values["parallel.pipeline"] > 1 and values["pipeline.schedule"] != "auto":
        reasons["pipeline.memory_limit"] = "only pipeline.schedule=auto searches below a limit"
    if values["data_parallel.offload"] == "none":
        reasons["data_parallel.offload_fraction"] = "data_parallel.offload=none"
    if not values["optimizer.skip_grad_norm_above"]:
        reasons["optimizer.skip_window"] = "optimizer.skip_grad_norm_above=0 skips no update"
    if values["optimizer.lr_warmup_steps"]:
        reasons["optimizer.lr_warmup_fraction"] = "optimizer.lr_warmup_steps is given"
    if values["data_parallel.zero_stage"] != 3:
        reasons["data_parallel.shard_units"] = "only zero_stage=3 gathers weights by units"
    if values["data.train"]:
        reasons |= _reasons_of_text(values)
    if values["data.train"] and values["data.valid"]:
        reasons["data.split"] = "data.valid is given"
    if values["checkpoint.keep_best"] is None:
        reasons |= dict.fromkeys(
            ("checkpoint.keep_best_count", "checkpoint.keep_best_mode"), _KEEP_BEST
        )
    if values["training.objective"] != "dpo":
        reasons |= dict.fromkeys(
            ("dpo.beta", "dpo.label_smoothing", "dpo.loss_type"),
            "training.objective=next_token learns from no preferences",
        )
    if values["lora.rank"] is None:
        reasons |= dict.fromkeys(
            ("lora.alpha", "lora.dropout", "lora.modules", "lora.rslora", "lora.save_base"),
            "without lora.rank there are no adapters, and all of the model is trained; give it, such as 8",
        )
    if values["checkpoint.directory"] is None:
        names = ("keep_last", "keep_every", "keep_hours", "keep_best", "asynchronous", "on_failure")
        reasons |= {
            f"checkpoint.{name}": "without checkpoint.directory nothing is saved" for name in names
        }
    return reasons


def _reasons_of_text(values: Mapping[str, Any]) -> dict[str, str]:
    """Of what only texts need that a run prepares by itself, the default corpus among them."""
    directory = Path(values["data.directory"])
    names = [*values["data.train"], *values["data.valid"], *values["data.valid_sets"].values()]
    # a run that has prepared its texts names the token files, which lie there
    if not any(is_text(name) or Path(name).is_relative_to(directory) for name in names):
        because = "data.train names token files"
        return {"data.directory": because, "data.vocab_size": f"{because}, and their tokenizer"}
    if values["data.tokenizer"] is not None:
        return {"data.vocab_size": f"data.tokenizer={values['data.tokenizer']} is given"}
    return {}
