"""`python -m core.datasets.prepare --input DIR_OR_FILE... --output PREFIX`: text files to a token file, on all cores.

Reads .txt .md .rst .py (a document per file), .jsonl (a document per line), .json (an array of such rows, or lines),
all of them also as .gz and .zst, .parquet, directories that datasets.save_to_disk wrote, data sets of the Hugging
Face Hub by name (hf://datasets/ORG/NAME[@REVISION][/FILES]) and whatever --glob names. JSON lines of {"messages"} or
{"prompt", "response"} become conversations, of which only the answers are learned, those of {"prompt", "chosen",
"rejected"} pairs of them, for training.objective=dpo. What is no UTF-8 text is skipped and counted. Files are read in
the order of a hash of their relative path, so that any part of the result is a random part of the text, the same on
every machine.

Exit code 0: written; 1: an error; 2: wrong arguments; 130, 143: interrupted, nothing was written.
"""

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from core.datasets.answer_ends import answer_ends
from core.datasets.corpus.build import (
    DOCUMENTS,
    LEARNED_BYTES,
    CorpusFiles,
    TextFiles,
    checked_prefix,
    prepare_files,
    skipped_text,
)
from core.datasets.corpus.cached import tokenizer_beside
from core.datasets.corpus.conversations import are_conversations, prepare_conversations
from core.datasets.corpus.documents import Encoder
from core.datasets.corpus.hub import hub_files, is_hub_name
from core.datasets.corpus.megatron_arguments import answered
from core.datasets.corpus.preferences import are_preferences, prepare_preferences
from core.datasets.corpus.progress import progress
from core.datasets.corpus.sources import SUFFIXES
from core.datasets.corpus.workers import available_cores
from core.datasets.token_file import TokenFile
from core.datasets.tokenizers.any_tokenizer import AnyTokenizer, load_tokenizer, tokenizer_of
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.datasets.tokenizers.folder import (
    TOKENIZER,
    answer_end,
    ends_told,
    without_tokenizer,
)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core.datasets.prepare",
        description=__doc__.partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files and directories, read recursively; hf://datasets/ORG/NAME/FILES",
    )
    parser.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="PREFIX.bin, .idx, .json and .tokenizer.json are written",
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="a Hugging Face tokenizer.json, or its folder; default: bytes",
    )
    tokenizer.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help=f"learn a vocabulary of SIZE tokens from the first {LEARNED_BYTES >> 20} MiB of the text",
    )
    _add_document_options(parser)
    return parser


def _add_document_options(parser: argparse.ArgumentParser) -> None:
    """What is read as text, what a document is in it, and how it ends."""
    parser.add_argument(
        "--end-of-text",
        metavar="TOKEN",
        help="which token ends a document, where tokenizer.json does not tell",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="close documents with that token",
    )
    parser.add_argument(
        "--documents",
        choices=DOCUMENTS,
        default="file",
        help="what a document is in a text file (default: file)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="of JSON lines, or column of a table (default: text)",
    )
    parser.add_argument(
        "--glob",
        action="append",
        default=[],
        metavar="PATTERN",
        help="read these names as text too; repeatable",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=None,
        metavar="N",
        help=f"processes (default: cores, {available_cores()} here)",
    )


def _tokenizer(options: argparse.Namespace, text_files: TextFiles) -> AnyTokenizer:
    if options.train_tokenizer is None:
        if options.tokenizer is not None and not Path(options.tokenizer).is_file():
            raise ValueError(_no_tokenizer(Path(options.tokenizer)))
        tokenizer = load_tokenizer(options.tokenizer, options.end_of_text)
        if options.end_of_text is not None and isinstance(tokenizer, ByteTokenizer):
            raise ValueError(
                f"--end-of-text {options.end_of_text}: bytes have no such token, {tokenizer.end_of_text} ends their "
                "documents; leave it out, or name a --tokenizer"
            )
        return tokenizer
    if options.end_of_text is not None:
        raise ValueError(
            f"--end-of-text {options.end_of_text}: a tokenizer that is learned has one of its own; leave it out"
        )
    # needs an extra
    from core.datasets.tokenizers.trained import train_tokenizer

    print(f"learning {options.train_tokenizer} tokens", file=sys.stderr, flush=True)
    # only cuts the input into texts; its tokens are not used
    reader = Encoder(
        tokenizer=ByteTokenizer(),
        dtype=np.dtype("<u2"),
        end_of_text=None,
        text_key=text_files.text_key,
    )
    learned = train_tokenizer(text_files.texts(reader), options.train_tokenizer)
    if learned.vocab_size < options.train_tokenizer:
        print(
            f"the text has {learned.vocab_size} tokens to learn, not {options.train_tokenizer}",
            file=sys.stderr,
        )
    return learned


def _no_tokenizer(path: Path) -> str:
    """What is wrong with a name that is no file."""
    if path.is_dir() or (path.name == TOKENIZER and path.parent.is_dir()):
        folder = path if path.is_dir() else path.parent
        return without_tokenizer(folder, "--tokenizer FILE")
    return f"--tokenizer {path} is no file; name a tokenizer.json"


def _prepared(options: argparse.Namespace, text_files: TextFiles) -> CorpusFiles:
    """What is written; raises `ValueError`, `ImportError`, `OSError`."""
    chats = are_conversations(text_files.sources)
    pairs = not chats and are_preferences(text_files.sources)
    if (chats or pairs) and options.train_tokenizer is not None:
        raise ValueError(
            f"--train-tokenizer {options.train_tokenizer}: conversations fine-tune a model, whose tokenizer they "
            "need; give it by --tokenizer FOLDER/tokenizer.json, or leave both out for bytes"
        )
    tokenizer = _tokenizer(options, text_files)
    with progress("tokenising", text_files.num_bytes) as advance:
        if chats or pairs:
            if options.tokenizer is None:
                folder = None
            else:
                folder = Path(options.tokenizer).parent
            prepare = prepare_preferences if pairs else prepare_conversations
            # a token that was named ends answers as well
            named = options.end_of_text is not None
            return prepare(
                text_files,
                options.output,
                tokenizer,
                template_folder=folder,
                answer_end=None if named else answer_end(options.tokenizer, tokenizer),
                advance=advance,
            )
        return prepare_files(
            text_files,
            options.output,
            tokenizer,
            workers=options.workers,
            append_end_of_text=options.append_eod,
            advance=advance,
        )


def report(corpus: CorpusFiles, tokenizer_file: str | None, end_of_text: str | None) -> str:
    """What was written, in a few lines, and the command to type next."""
    card = corpus.card
    rate = card.text_bytes / 1e6 / corpus.seconds
    file = TokenFile(corpus.prefix)
    told = ""
    if card.end_of_text is not None:
        # a token that was named is nobody else's choice
        beside = tokenizer_file if end_of_text is None else None
        tokenizer = tokenizer_of(file)
        ends = answer_ends(file, tokenizer, tokenizer_beside(corpus.prefix))
        told = ends_told(tokenizer, beside, answers=file.marks_answers, ends=ends) + "\n"
    options = f"--data.train {corpus.prefix}"
    if tokenizer_file is not None and (Path(tokenizer_file).parent / "config.json").is_file():
        options += f" --model.huggingface {Path(tokenizer_file).parent}"
    if file.holds_preferences:
        options += " --training.objective dpo"
    sizes = ", ".join(f"{path} ({_size_text(path.stat().st_size)})" for path in corpus.files)
    return (
        f"{corpus.prefix}: {card.documents:,} documents, {card.tokens:,} tokens of {card.vocab_size:,} "
        f"({card.dtype}), {card.text_bytes / 1e6:.1f} MB of text, {card.text_bytes / card.tokens:.2f} bytes/token, "
        f"{rate:.1f} MB/s\n"
        f"skipped: {skipped_text(dict(card.skipped))}\n"
        f"{told}"
        f"files: {sizes}\n"
        f"next: torchrun --standalone --nproc-per-node 1 -m core.pretrain {options}"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _size_text(nbytes: int) -> str:
    if nbytes >= 1e5:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes} B"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    command_line = sys.argv[1:] if arguments is None else arguments
    if lines := answered(command_line):
        print("error: these are Megatron's arguments:", *lines, sep="\n  ", file=sys.stderr)
        return 2
    options = _parser().parse_args(command_line)
    if options.tokenizer is not None and (Path(options.tokenizer) / TOKENIZER).is_file():
        options.tokenizer = str(Path(options.tokenizer) / TOKENIZER)
    try:
        checked_prefix(options.output)  # before hours of learning
        for name in filter(is_hub_name, options.input):
            hub_files(name, SUFFIXES, _say)
        text = TextFiles(
            inputs=tuple(options.input),
            globs=tuple(options.glob),
            documents=options.documents,
            text_key=options.text_key,
        )
        corpus = _prepared(options, text)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno in _NO_SPACE:
            space = f" (no space for {options.output}; nothing was written)"
        else:
            space = ""
        print(f"error: {error}{space}", file=sys.stderr)
        return 1
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report(corpus, options.tokenizer, options.end_of_text))
    return 0


def _terminate(number: int, frame: object) -> NoReturn:
    # unwinds, which removes temporary files and workers
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
