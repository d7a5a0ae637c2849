"""Text from a Hugging Face folder, or from a checkpoint; `generate` and `generate_batch` for programs.

python -m core.training.generate HF_DIR --prompt "Once upon a time"
python -m core.training.generate RUN --prompt "..."           # a run or a checkpoint: it says its model and tokenizer
torchrun --nproc-per-node 2 -m core.training.generate CKPT --source HF_DIR --prompt "..." --parallel.tensor 2
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.datasets.corpus.conversations import ChatTemplate
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer, load_tokenizer
from core.datasets.tokenizers.folder import sampling_of, stop_tokens, without_tokenizer
from core.dist_checkpointing.publish.manifest import MANIFEST
from core.dist_checkpointing.reading.loading import load, open_stored
from core.dist_checkpointing.reading.newest import newest_checkpoint
from core.models.gpt import GPTModel
from core.models.huggingface import from_huggingface, load_huggingface
from core.models.huggingface.facts import adapters_alone
from core.models.huggingface.origin import origin
from core.models.lora.base import adapters_of, load_adapted
from core.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_model_parallel,
    launch,
)
from core.parallel_state.environment import started_processes
from core.their_folders import is_huggingface
from core.training.generation import generate as generate
from core.training.generation import generate_batch as generate_batch
from core.training.log.console import errors_as_one_line
from core.training.run.facts import model_of_checkpoint, tokenizer_file, tokenizer_of_checkpoint
from core.training.run.trained import no_model
from core.training.sampling import Sampling
from core.training.their_flags import parsed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core.training.generate", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "model",
        metavar="HF_DIR|RUN|CKPT",
        help="a Hugging Face folder, a step's own directory; of a run's output or a directory of steps the newest",
    )
    add(
        "--source",
        metavar="HF_DIR",
        help="configuration and tokenizer of a checkpoint; default: what its run said",
    )
    add("--tokenizer", metavar="FILE", help="a tokenizer.json; default: the folder's, or the run's")
    add("--prompt", action="append", required=True, help="given several times: a batch")
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message in the chat template, or a chat: a JSON list of "
        '{"role": ..., "content": ...}',
    )
    add("--system", metavar="TEXT", help="the system's message before it, with --chat")
    # Hugging Face's and Megatron's names beside ours
    add("--new-tokens", "--max-new-tokens", "--num-tokens-to-generate", type=int, default=100)
    add(
        "--temperature",
        type=float,
        default=0.0,
        help="0 (default) takes the likeliest token each time",
    )
    add("--top-k", type=int, help="draw from the k likeliest tokens")
    add(
        "--top-p",
        type=float,
        help="draw from the likeliest tokens that together have this probability",
    )
    add("--seed", type=int, default=0)
    add(
        "--end-of-text",
        help="the token that ends a text; default: eos_token_id of the folder, or what ended the run's documents",
    )
    add("--parallel.tensor", dest="tensor", type=int, default=1, help="ranks that share the model")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = parsed(_parser(), sys.argv[1:] if arguments is None else arguments)
    if not is_huggingface(options.model):
        options.model = newest_checkpoint(options.model) or options.model
    is_checkpoint = (Path(options.model) / MANIFEST).exists()
    if (started := started_processes()) != options.tensor:
        raise ValueError(
            f"{started} processes for --parallel.tensor {options.tensor}; start as many: torchrun --nproc-per-node"
        )
    # before anything is read, for its rules
    sampling = Sampling(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed
    )
    source = Path(options.source or options.model).expanduser()
    _check_paths(source, options, is_checkpoint=is_checkpoint)
    if is_checkpoint and options.source is None:
        arguments_of_model = model_of_checkpoint(options.model)
        tokenizer = tokenizer_of_checkpoint(options.model, options.tokenizer, options.end_of_text)
        file = tokenizer_file(options.model, options.tokenizer)
    else:
        arguments_of_model = from_huggingface(source).arguments()
        file = Path(options.tokenizer or source / "tokenizer.json")
        tokenizer = load_tokenizer(file, options.end_of_text)
    if not is_checkpoint or options.source:
        _tell_of_sampling(source, options)
    sampling = replace(sampling, vocab_size=tokenizer.vocab_size)
    stop = _stop(options, source if not is_checkpoint or options.source else None, tokenizer)
    prompts = _prompt_tokens(options, tokenizer, file)
    # the embedding may have more rows than the tokenizer tokens (padding), never fewer
    if tokenizer.vocab_size > (vocab_size := arguments_of_model["vocab_size"]):
        raise ValueError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} tokens, its embedding {vocab_size} rows; they are "
            "not of one model"
        )
    with launch():
        ps = initialize_model_parallel(options.tensor)
        model = GPTModel(**arguments_of_model, parallel=ps)
        if is_checkpoint and adapters_of(options.model) is not None:
            load_adapted({0: model}, options.model, ps, source=options.source)
        elif is_checkpoint:
            load({"model": model.sharded_state_dict()}, options.model, ps=ps, cast=True)
        else:
            load_huggingface(model, source)
        shown = [] if options.chat else options.prompt
        _print_texts(model, tokenizer, prompts, shown, options.new_tokens, sampling, stop, ps)
        ps.leave()
        destroy_model_parallel()
    return 0


def _tell_of_sampling(folder: Path, options: argparse.Namespace) -> None:
    """Of what generation_config.json says and the flags do not: nothing of it is read."""
    said = {k: v for k, v in sampling_of(folder).items() if not getattr(options, k, None)}
    if not said:
        return
    flags = " ".join(
        f"--{name.replace('_', '-')} {v}" for name, v in said.items() if hasattr(options, name)
    )
    others = ", ".join(name for name in said if not hasattr(options, name))
    remedies = [f"give {flags}"] if flags else []
    remedies += [f"{others}: not here"] if others else []
    values = ", ".join(f"{name}={value}" for name, value in said.items())
    print(
        f"note: generation_config.json says {values}, which is not read; {'; '.join(remedies)}",
        file=sys.stderr,
    )


def _stop(options: argparse.Namespace, folder: Path | None, tokenizer: AnyTokenizer) -> list[int]:
    """The tokens that end a text: the one that was named, or those at which transformers stops with this folder.

    folder: None of a run, which stops at what ended its documents and answers as well. Of folders that name none, the
    tokenizer's end of text.
    """
    end = [tokenizer.end_of_text]
    if options.end_of_text is not None:
        return end
    if folder is not None:
        return stop_tokens(folder) or end
    run = open_stored(options.model).run
    began, _ = origin(run)
    said: Any = run.get("tokenizer") or {}
    turns = said.get("answer_ends", [])
    return sorted({*end, *turns, *(stop_tokens(began) if began is not None else [])})


def _prompt_tokens(
    options: argparse.Namespace, tokenizer: AnyTokenizer, file: Path | None
) -> list[list[int]]:
    """Of each prompt, as transformers makes them.

    file: of the tokenizer; a chat template lies beside it. Raises ValueError: --chat without one.
    """
    if not options.chat:
        if options.system is not None:
            raise ValueError("--system is a message of a chat; give --chat too")
        prompts = [tokenizer.encode_prompt(prompt) for prompt in options.prompt]
        if not all(prompts):
            raise ValueError(
                "--prompt is empty, and this tokenizer begins a text with no token of its own: there is nothing to "
                "go on from; give some text"
            )
        return prompts
    if file is None:
        raise ValueError(
            "--chat needs a chat template, and this run had bytes for tokens; leave it out"
        )
    template = ChatTemplate(file.parent, otherwise="leave out --chat")
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [template.question([*system, *_messages(prompt)]) for prompt in options.prompt]


def _messages(prompt: str) -> list[dict[str, Any]]:
    """A user's message, or the chat that a JSON list of messages is. Raises ValueError: nothing is left to answer."""
    try:
        chat = json.loads(prompt) if prompt.lstrip().startswith("[") else None
    except ValueError:
        chat = None
    # other lists are texts that a user may write
    if not (isinstance(chat, list) and any(isinstance(m, dict) and "role" in m for m in chat)):
        return [{"role": "user", "content": prompt}]
    if not all(isinstance(m, dict) and m.keys() >= {"role", "content"} for m in chat):
        raise ValueError(
            '--prompt is a list of messages, and some lack a "role" or a "content"; give both in each'
        )
    if chat[-1]["role"] == "assistant":
        raise ValueError(
            "--prompt is a chat that ends with the assistant's message, and the model gives the next one; end with "
            "the user's"
        )
    return chat


def _check_paths(source: Path, options: argparse.Namespace, *, is_checkpoint: bool) -> None:
    """Raise ValueError for what is mistaken for a folder, and for one without a tokenizer."""
    steps = sorted(path.parent.name for path in Path(options.model).glob(f"*/{MANIFEST}"))
    if not is_checkpoint and steps:
        raise ValueError(
            f"{options.model} holds {len(steps)} checkpoints; give one, {Path(options.model, steps[-1])}"
        )
    from_folder = not is_checkpoint or options.source is not None
    if from_folder and not source.is_dir():
        raise ValueError(
            f"{source} is no folder; give a Hugging Face folder, a run's output or a checkpoint that is there"
        )
    if not is_checkpoint and not is_huggingface(options.model):
        raise ValueError(no_model(options.model))
    if from_folder and options.tokenizer is None and not (source / "tokenizer.json").is_file():
        told = adapters_alone(source)
        raise ValueError(told or without_tokenizer(source, "--tokenizer FILE"))
    if options.temperature == 0 and (options.top_k is not None or options.top_p is not None):
        raise ValueError(
            "--top-k and --top-p draw nothing at temperature 0; give --temperature, such as 0.8"
        )


def _print_texts(
    model: GPTModel,
    tokenizer: AnyTokenizer,
    tokens: list[list[int]],
    prompts: list[str],
    new_tokens: int,
    sampling: Sampling,
    stop: list[int],
    ps: ParallelState,
) -> None:
    """Prints each text; of a single prompt each token as soon as it is known.

    tokens: of each prompt. prompts: as they were given, shown before what follows; empty: only that is shown.
    """
    # which may differ from the prompt: some tokenizers change case or spaces
    shown = tokenizer.decode(tokens[0])
    new: list[int] = []

    def stream(row: int, token: int) -> None:
        nonlocal shown
        new.append(token)
        text = tokenizer.decode([*tokens[0], *new])
        # the bytes of one character may be several tokens: it is shown when it is complete
        if ps.rank == 0 and text.startswith(shown) and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    alone = len(tokens) == 1
    if alone and prompts and ps.rank == 0:
        print(prompts[0], end="", flush=True)
    texts = generate_batch(
        model,
        tokens,
        new_tokens=new_tokens,
        sampling=sampling,
        stop=stop,
        on_token=stream if alone else None,
    )
    if ps.rank == 0:
        told = []
        for number, (text, prompt) in enumerate(zip(texts, tokens, strict=True)):
            before = prompts[number] if prompts else ""
            told.append(before + tokenizer.decode(text)[len(tokenizer.decode(prompt)) :])
        if alone:
            # a character whose last bytes never came
            whole = tokenizer.decode(texts[0])
            print(whole[len(shown) :] if whole.startswith(shown) else "")
        else:
            print("\n\n".join(told))
        last = model.max_sequence_length
        if any(
            len(text) == last < len(prompt) + new_tokens
            for text, prompt in zip(texts, tokens, strict=True)
        ):
            print(f"stopped at position {last}, the model's last", file=sys.stderr)


def run() -> int:
    """`main`, with mistakes as one line."""
    with errors_as_one_line():
        return main()


if __name__ == "__main__":
    sys.exit(run())
