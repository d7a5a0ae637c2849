"""`eos_token` of the tokenizer_config.json beside a `tokenizer.json`; needs no library."""

import json
from pathlib import Path


def eos_token_beside(path: Path) -> str | None:
    """What transformers' tokenizer_config.json in the same folder calls the end of text, if it is there."""
    try:
        config = json.loads((path.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    token = config.get("eos_token") if isinstance(config, dict) else None
    # older files hold the token with its settings
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
