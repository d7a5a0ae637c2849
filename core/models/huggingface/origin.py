"""The Hugging Face folder that the model of a checkpoint began as, where it can still be asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.datasets.tokenizers.any_tokenizer import load_tokenizer
from core.datasets.tokenizers.folder import TOKENIZER
from core.models.huggingface.written import form_of_source


def began_as(run: Mapping[str, Any]) -> str | None:
    """The folder as the run was given it: relative to where that was started. None: it began otherwise."""
    found: Any = run.get("began_as") or {}
    folder: str | None = found.get("huggingface")
    return folder


def folder_of_form(run: Mapping[str, Any]) -> str | None:
    """The same, also of a run that began with weights of another one, which began as that folder."""
    found: Any = run.get("began_as") or {}
    folder: str | None = found.get("huggingface") or found.get("form")
    return folder


def origin(run: Mapping[str, Any]) -> tuple[Path | None, str]:
    """(the folder that the run began as, ""), or (None, why it cannot be asked, which is empty where there was none).

    run: what a checkpoint's manifest says of it. A folder of another model, or with another tokenizer than the
    run's, is not it.
    """
    given = folder_of_form(run)
    if given is None:
        return None, ""
    folder = Path(given).expanduser()
    if not (folder / "config.json").is_file():
        return None, f"{given}, which the model began as, is not there"
    try:
        form_of_source(folder, run.get("model"), "the checkpoint")
        tokenizer: Any = run.get("tokenizer")
        path = folder / TOKENIZER
        if tokenizer is not None and path.is_file():
            found = load_tokenizer(path, tokenizer["end_of_text"]).identity
            if found != tokenizer["identity"]:
                return (
                    None,
                    f"{given}, which the model began as, has another tokenizer than the run",
                )
    except (ValueError, OSError, ImportError) as error:
        return None, f"{given}, which the model began as, cannot be asked ({error})"
    return folder, ""
