"""What a trained model pays for a text: loss, perplexity, bits per byte; in any layout, also under torchrun.

    python -m core.training.evaluate RUN_OR_CHECKPOINT                        # the run's own validation text
    python -m core.training.evaluate RUN_OR_CHECKPOINT --data corpus other    # texts that `prepare` made
    torchrun --nproc-per-node 4 -m core.training.evaluate CKPT --data corpus --parallel.tensor 2 --parallel.pipeline 2

RUN is a run's output directory, or its run.toml: its newest checkpoint is read. A Hugging Face folder does as well.
Every flag of a run can follow, as --training.micro-batch-size 8 or --data.sequence-length 2048.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.datasets import open_blend
from core.datasets.card import recorded_tokenizer, tokenizer_path
from core.datasets.corpus.cached import is_text, tokenizer_beside
from core.parallel_state import ParallelState, launch
from core.parallel_state.environment import started_processes
from core.training.config import Loaded, RunConfig, load_run, same_on_all_ranks
from core.training.config.sources import checked
from core.training.log.console import errors_as_one_line
from core.training.log.json_rows import json_number
from core.training.log.validation import MAIN, perplexity
from core.training.model.folder import tokenizer_in
from core.training.preferences.rules import preferences_in
from core.training.run.cut_answers import Cut, cut_answers
from core.training.run.data import Corpus, open_corpus
from core.training.run.evaluate import TextLoss, evaluate_texts
from core.training.run.trained import Trained, executor_of, find_trained


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "model",
        metavar="RUN_OR_CHECKPOINT",
        help="a run's output, a checkpoint, a directory of steps, a HF folder",
    )
    add(
        "--data",
        nargs="+",
        metavar="PREFIX",
        help="token files or text, each told by itself; default: the run's validation",
    )
    add(
        "--source",
        metavar="HF_DIR",
        help="of a checkpoint that was imported: the folder with its configuration",
    )
    add(
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="of each text its first documents, about N tokens",
    )
    add("--max-batches", type=int, default=0, metavar="N", help="of each text; default: all of it")
    add("--json", action="store_true", help="print one JSON object instead of lines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status. Raises ValueError, SystemExit: mistakes."""
    options, flags = _parser().parse_known_args(arguments)
    if options.max_batches < 0:
        raise ValueError(f"--max-batches {options.max_batches} must be at least 0 (all)")
    if options.max_tokens < 0 or (options.max_tokens and options.max_batches):
        raise ValueError(
            f"--max-tokens {options.max_tokens} beside --max-batches {options.max_batches}: give one of them, "
            "at least 0"
        )
    trained = find_trained(options.model, options.source, described="--config" in flags)
    if not (
        options.data or trained.is_checkpoint or any(flag.startswith("--data.") for flag in flags)
    ):
        raise ValueError(
            f"{options.model} is a model without a text: 0 texts to evaluate; give --data PREFIX"
        )
    # before its tokenizer is looked for
    _refuse_preferences([(name,) for name in options.data or ()])
    names, given = _texts_and_settings(options.data, trained)
    loaded = load_run(flags, defaults={**trained.settings, **given})
    texts = loaded.run.data
    _refuse_preferences(
        [texts.train, texts.valid, *[(name,) for name in texts.valid_sets.values()]],
        loaded.run.training.objective,
    )
    run = checked(
        replace(loaded, run=_with_small_batches(loaded, options.max_batches)), started_processes()
    )
    with launch(run.device, backend=run.parallel.backend) as device, errors_as_one_line():
        same_on_all_ranks(run)
        ps = ParallelState.build(run.parallel, device=device)
        corpus = open_corpus(run.data, run.training, ps)
        _refuse_other_tokenizer(trained, corpus)
        if options.max_tokens:
            corpus = corpus.shortened(options.max_tokens)
        if not corpus.validation_texts:
            raise ValueError("the run has 0 validation texts; give --data PREFIX")
        stages = trained.load(run, corpus.tokenizer.vocab_size, ps)
        cut = {names.get(name, name): lost for name, lost in cut_answers(corpus, run)}
        if ps.rank == 0:
            for name, lost in cut.items():
                # before the work, and apart from what a program reads
                print(f"note: {name}: {lost.note}", file=sys.stderr, flush=True)
        found = evaluate_texts(executor_of(stages, run, ps), corpus, ps)
        if ps.rank == 0:
            _print_losses(
                trained.url,
                {names.get(name, name): text for name, text in found.items()},
                cut,
                options.json,
                options.max_batches > 0,
            )
        ps.leave()
    return 0


def _texts_and_settings(
    prefixes: Sequence[str] | None, trained: Trained
) -> tuple[dict[str, str], dict[str, Any]]:
    """(name of a validation text -> the prefix as it was given, settings that make them the only texts)."""
    if not prefixes:
        return {}, {}
    first, *others = prefixes
    sets = {f"text{number}": prefix for number, prefix in enumerate(others, 2)}
    # the tokenizer is the one beside the first text, or of text that is to be prepared the run's
    tokenizer = None
    if any(map(is_text, prefixes)):
        tokenizer = _tokenizer_of_run(trained)
    settings = {
        "data.train": [first],
        "data.valid": [first],
        "data.valid_sets": sets,
        "data.tokenizer": tokenizer,
    }
    return {MAIN: first} | sets, settings


def _tokenizer_of_run(trained: Trained) -> str:
    """Raises ValueError: the run's tokenizer is not there, or it was bytes."""
    folder_setting = trained.settings.get("model.huggingface")
    folder = None if folder_setting == "None" else folder_setting
    if own := tokenizer_in(folder):
        return own
    tokenizer_setting = trained.settings.get("data.tokenizer")
    train = trained.settings.get("data.train") or ()
    if tokenizer_setting not in (None, "None"):
        return str(tokenizer_setting)
    prefixes = [prefix for _, prefix in open_blend(train)] if train else []
    beside = tokenizer_beside(prefixes[0]) if prefixes else None
    if prefixes and trained.tokenizer is not None:
        recorded = recorded_tokenizer(tokenizer_path(prefixes[0]), trained.tokenizer)
        beside = recorded if recorded.is_file() else beside
    if beside is None:
        cause = f"the tokenizer of {trained.url} lies beside its text, which is not here"
        raise ValueError(
            f"{cause if folder is None else f'{folder} has no tokenizer.json'}; prepare the text with it "
            "(python -m core.datasets.prepare --tokenizer FILE) and give --data PREFIX"
        )
    return str(beside)


def _refuse_preferences(blends: Iterable[tuple[str, ...]], objective: str = "next_token") -> None:
    """Raise ValueError for a text of pairs: what is learned from them is no property of a checkpoint."""
    pairs = preferences_in(blends)
    if pairs is None and objective != "dpo":
        return
    holds = "" if pairs is None else f"{pairs} holds preferences (chosen, rejected): "
    raise ValueError(
        f"{holds}rewards are of a model beside its reference, which is in its run: its training.eval_interval tells "
        "them, and a checkpoint alone has none; give --data: text, chats, or prompts with a response"
    )


def _with_small_batches(loaded: Loaded, max_batches: int) -> RunConfig:
    """The run with a batch of a few microbatches per rank, where no flag says otherwise."""
    run = loaded.run
    training = loaded.run.training
    if loaded.origin["training.global_batch_size"] in ("default", "script"):
        data_ranks = max(1, started_processes() // run.parallel.model_ranks)
        rows = training.micro_batch_size * data_ranks * run.parallel.pipeline
        training = replace(training, global_batch_size=rows)
    return replace(run, training=replace(training, eval_batches=max_batches))


def _refuse_other_tokenizer(trained: Trained, corpus: Corpus) -> None:
    identity = corpus.tokenizer.identity
    if trained.tokenizer is not None and trained.tokenizer != identity:
        raise ValueError(
            f"the text was made with the tokenizer {identity[:12]}, {trained.url} was trained with "
            f"{trained.tokenizer[:12]}; prepare the text with the tokenizer of the run"
        )


def _print_losses(
    url: str,
    losses: Mapping[str, TextLoss],
    cut: Mapping[str, Cut],
    as_json: bool,
    limited: bool,
) -> None:
    rows = {}
    for name, text in losses.items():
        values = {
            "loss": text.loss,
            "perplexity": perplexity(text.loss),
            "bits_per_byte": text.bits_per_byte,
        }
        rows[name] = {key: json_number(value) for key, value in values.items()}
        rows[name] |= {"tokens": text.tokens, "bytes": text.num_bytes}
        if name in cut:
            rows[name]["tokens_beyond_rows"] = cut[name].tokens
    if as_json:
        print(json.dumps({"model": url, "texts": rows}))
        return
    print(url)
    if limited and len({text.tokens for text in losses.values()}) > 1:
        print(
            "note: texts of different length, a batch is of one layout; --max-tokens takes as much of each"
        )
    for name, text in losses.items():
        print(
            f"{name}: loss {text.loss:.4f} nats per token, perplexity {perplexity(text.loss):.4g}, "
            f"{text.bits_per_byte:.4f} bits per byte ({text.tokens:,} tokens, {text.num_bytes:,} bytes)"
        )


def run() -> int:
    """`main`, with mistakes as one line."""
    with errors_as_one_line():
        return main()


if __name__ == "__main__":
    sys.exit(run())
