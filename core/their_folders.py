"""Hugging Face's folders where a checkpoint or a token file is expected: what they are, and what reads them."""

from pathlib import Path


def is_huggingface(path: str | Path) -> bool:
    """Whether a folder has a config.json; of an URL False."""
    return (Path(path).expanduser() / "config.json").is_file()


def huggingface_told(path: str | Path, instead_of: str) -> str:
    """What is said of a Hugging Face folder in the place of `instead_of`, "a checkpoint"; empty: it is none."""
    if not is_huggingface(path):
        return ""
    return (
        f"{path} is a Hugging Face folder (it has a config.json), not {instead_of}: a run begins with it as "
        f"--model.huggingface {path}, python -m core.training.evaluate {path} --data TEXT and python -m "
        f"core.training.generate {path} --prompt TEXT read it, python -m core.models.huggingface import {path} CKPT "
        "makes a checkpoint of it"
    )
