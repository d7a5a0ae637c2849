"""Packages that some features need beside the core's own dependencies, and how they are installed."""

# extra of pyproject.toml -> {distribution: what it is for}
EXTRAS = {
    "train": {
        "tokenizers": "training and loading tokenizers; without it text is bytes",
        "tyro": "flags of the command line",
        "rich": "the progress bar",
        "matplotlib": "report.png",
        "jinja2": "report.html",
    },
    "data": {
        "pyarrow": "reading .parquet",
        "datasets": "reading Hugging Face data sets, and from the Hub by name",
        "zstandard": "reading .zst",
    },
    "huggingface": {"safetensors": "folders of Hugging Face's, in and out"},
    "log": {"tensorboard": "TensorBoard's curves", "wandb": "Weights & Biases, offline or not"},
    "deepspeed": {"hjson": "a ds_config.json with comments"},
    "sign": {"cryptography": "signatures of checkpoints"},
}


def install(extra: str) -> str:
    """The command that adds a whole extra, from a clone and beside a wheel alike: by the names of its packages."""
    return f"pip install {' '.join(EXTRAS[extra])}"
