"""Hugging Face folders in and out: `import HF_DIR CKPT`, `export CKPT HF_DIR`, `adapters CKPT DIR`, `families`."""

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from core.dist_checkpointing.reading.lazy import lazy_tensors
from core.dist_checkpointing.reading.loading import open_stored
from core.dist_checkpointing.reading.newest import newest_checkpoint
from core.dist_checkpointing.tools.console import progress, say, size_text
from core.dist_checkpointing.tools.export import DTYPES
from core.models.huggingface.exporting import export_huggingface
from core.models.huggingface.families import FAMILIES
from core.models.huggingface.family.others import OTHERS
from core.models.huggingface.importing import MODEL, import_huggingface
from core.models.huggingface.origin import folder_of_form, origin
from core.models.huggingface.sources import Folder
from core.models.lora.peft_folder import export_adapters

_WHICH = "a step's own directory; of a run's output, or of a directory of steps, the newest"


def _import(options: argparse.Namespace) -> int:
    with progress("importing", Folder(options.folder).nbytes) as done:
        imported = import_huggingface(options.folder, options.checkpoint, done)
    config = imported.model.config
    say(
        f"{options.checkpoint}: {imported.arrays} arrays, {size_text(imported.nbytes)}, verified; "
        f"{config.num_layers} layers, hidden size {config.hidden_size}, vocabulary {imported.model.vocab_size}"
    )
    return 0


def _export(options: argparse.Namespace) -> int:
    checkpoint = _checkpoint(options)
    stored = lazy_tensors(checkpoint)
    nbytes = sum(
        prod(t.shape) * t.dtype.itemsize for key, t in stored.items() if key.startswith(MODEL)
    )
    with progress("exporting", nbytes) as done:
        difference = export_huggingface(
            checkpoint,
            options.folder,
            options.source,
            dtype=DTYPES[options.dtype],
            check=options.check,
            progress=done,
        )
    say(f"{options.folder}: AutoModelForCausalLM.from_pretrained loads it")
    if difference is not None:
        say(f"max |logit difference| on 4 prompts: {difference:.2e}")
    if options.source is None:
        _say_origin(open_stored(checkpoint).run)
    return 0


def _adapters(options: argparse.Namespace) -> int:
    count = export_adapters(_checkpoint(options), options.folder, options.source)
    say(
        f"{options.folder}: {count} tensors; peft.PeftModel.from_pretrained(model, folder) loads them"
    )
    path = Path(options.folder).expanduser() / "adapter_config.json"
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None:
        say(
            "it names no base model: the run began as no folder; load the adapters onto the model that they are of"
        )
        return 0
    whose = "as --source gives it" if options.source else "as the run was given it"
    say(
        f"base_model_name_or_path is {base}, {whose}; tokenizer and chat template are that folder's"
    )
    return 0


def _checkpoint(options: argparse.Namespace) -> str:
    """What is exported: of a run or a directory of steps the newest one, which is told."""
    given: str = options.checkpoint
    # what is no checkpoint is told where it is opened
    found = newest_checkpoint(given) or given
    if found != given:
        say(f"the newest checkpoint of {given}: {found}")
    return found


def _say_origin(run: Mapping[str, Any]) -> None:
    """Of an export without --source: whose configuration, tokenizer and generation files it has."""
    folder, _ = origin(run)
    if folder is not None:
        say(
            f"configuration, tokenizer and generation files are those of {folder}, which the model began as"
        )
        return
    imported: Any = run.get("imported") or {}
    if name := folder_of_form(run) or imported.get("folder"):
        say(
            f"the model began as {name}: with --source its other fields (special tokens, the longest sequence) and "
            "files come along"
        )


def _families(options: argparse.Namespace) -> int:
    say(f"{kind:12} {family.architecture}" for kind, family in sorted(FAMILIES.items()))
    say(["", "known, and not supported:"])
    say(f"{kind:12} {reason}" for kind, reason in sorted(OTHERS.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core.models.huggingface", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "import", help="a folder of safetensors files as a checkpoint of ours"
    )
    command.add_argument("folder", metavar="HF_DIR")
    command.add_argument("checkpoint", metavar="CKPT", help="a directory that is to be made")
    command.set_defaults(run=_import)
    command = commands.add_parser(
        "export", help="the model of a checkpoint as a folder that transformers loads"
    )
    command.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_WHICH)
    command.add_argument("folder", metavar="HF_DIR", help="a directory that is to be made")
    command.add_argument(
        "--source",
        metavar="HF_DIR",
        help="the folder that the model began as: configuration and tokenizer are taken from it. Default: the one "
        "that the run names, if it is there, or what the run said of its model",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default="as-saved", help="of the parameters (default as-saved)"
    )
    command.add_argument("--check", action="store_true", help="logits within 1e-4 of transformers'")
    command.set_defaults(run=_export)
    command = commands.add_parser(
        "adapters", help="the adapters (LoRA) of a checkpoint as a folder that peft loads"
    )
    command.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help=_WHICH)
    command.add_argument("folder", metavar="PEFT_DIR", help="a directory that is to be made")
    command.add_argument("--source", metavar="HF_DIR", help="the folder that the model began as")
    command.set_defaults(run=_adapters)
    command = commands.add_parser("families", help="what is supported; of others, what differs")
    command.set_defaults(run=_families)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}", error=True)
            return int(options.run(options))
    except (ValueError, OSError, ImportError) as error:
        say(f"error: {' '.join(str(error).split())}", error=True)
    except KeyboardInterrupt:
        say("interrupted, nothing was written", error=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
