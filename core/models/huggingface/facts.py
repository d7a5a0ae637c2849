"""The fields of a Hugging Face configuration, which remember who asked for them: none that counts is overlooked."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Fields that change no number of a forward or backward pass of a causal language model.
IRRELEVANT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "n_ctx",
        "original_max_position_embeddings",  # LongRoPE's, which is refused
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
    }
)


def no_folder(path: Path) -> str:
    """What is said of a path where no folder is; a name of the Hub's is none."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        fetch = f"; hf download {path} --local-dir DIR fetches one"
    else:
        fetch = ""
    return f"{path} is no folder; give the one that save_pretrained or the Hub made{fetch}"


def adapters_alone(folder: Path) -> str:
    """What is said of a folder of peft's, which has adapters and no model; empty: it is none."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        base = settings.get("base_model_name_or_path") or "BASE"
    except (OSError, ValueError, AttributeError):
        return ""
    return (
        f"{folder} has adapters of peft's alone; merge them into their base, PeftModel.from_pretrained(AutoModelFor"
        f"CausalLM.from_pretrained({base!r}), {str(folder)!r}).merge_and_unload().save_pretrained(DIR), copy its "
        "tokenizer.json there, and give DIR"
    )


def _what_it_is(folder: Path) -> str:
    """What a folder without `config.json` is taken for, and what to give instead."""
    if (folder / "manifest.json").is_file():
        return (
            f"it is a checkpoint of ours: checkpoint.weights={folder} begins a run with its weights"
        )
    if (folder / "run.toml").is_file():
        return (
            "it is the output of a run of ours: checkpoint.weights=DIRECTORY, the run's checkpoint.directory, begins "
            "with its weights"
        )
    # as transformers' Trainer leaves them
    below = max(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    if below is not None:
        return f"give {below.parent}, which has one"
    return adapters_alone(folder) or "give a folder that save_pretrained or the Hub made"


class Facts:
    """One configuration: a dict, a transformers configuration object, or what `config.json` of a folder says."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._asked = set[str]()

    @classmethod
    def of_folder(cls, folder: str | Path) -> "Facts":
        """Raises ValueError: no `config.json`, or none that can be read."""
        folder = Path(folder).expanduser()
        path = folder / "config.json"
        if not folder.is_dir():
            raise ValueError(no_folder(folder))
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist; {_what_it_is(folder)}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(
                f"{path} holds a {type(fields).__name__}, a configuration is an object; restore it"
            )
        return cls(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, `default` where the configuration does not say."""
        # also where the field is missing: who asked knows of it
        self._asked.add(name)
        if isinstance(self._source, Mapping):
            return self._source.get(name, default)
        return getattr(self._source, name, default)

    def __getitem__(self, name: str) -> Any:
        """A field that every configuration of the family has. Raises ValueError: this one has not."""
        # None is a value that a field may have
        missing = object()
        value = self.get(name, missing)
        if value is missing:
            raise ValueError(
                f"the configuration has no {name}, which its model type needs; restore it"
            )
        return value

    def overlooked(self) -> list[str]:
        """Fields that are set and that nobody asked for."""
        return sorted(
            name for name in self._names() if name not in self._asked and name not in IRRELEVANT
        )

    def _names(self) -> Iterator[str]:
        fields = self._source
        if hasattr(fields, "to_dict"):
            fields = fields.to_dict()
        if isinstance(fields, Mapping):
            # a switch that is off, or nothing, says that a model has not what nobody here knows
            yield from (
                name for name, value in fields.items() if value is not None and value is not False
            )
