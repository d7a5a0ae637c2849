"""The command: text in, one token file out, the same bytes for any number of workers, nothing if interrupted."""

import gzip
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers as hf_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from core.datasets import inspect, prepare
from core.datasets.corpus import build as preparing
from core.datasets.corpus import documents, megatron_arguments, readers
from core.datasets.corpus.build import TextFiles, prepare_files
from core.datasets.splits import split_documents
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.any_tokenizer import tokenizer_of
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer
from core.datasets.tokenizers.trained import train_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def text(tmp_path):
    """A folder with a bit of everything."""
    root = tmp_path / "text"
    (root / "sub").mkdir(parents=True)
    for i in range(12):
        (root / f"sub/{i}.py").write_text(f"def f{i}(x):\n    return x * {i}\n\n\n# é\n" * (i + 1))
    (root / "more.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(40)))
    )
    (root / "latin.txt").write_bytes(b"\xff")
    (root / "picture.png").write_bytes(b"\0")
    return root


def run(*arguments):
    return prepare.main([str(argument) for argument in arguments])


def files(prefix):
    return {p.name.removeprefix(prefix.name): p.read_bytes() for p in prefix.parent.glob(f"{prefix.name}.*")}


def texts(prefix):
    file = TokenFile(prefix)
    tokenizer = tokenizer_of(file)
    assert {int(file.document(i)[-1]) for i in range(file.num_documents)} == {tokenizer.end_of_text}
    return [tokenizer.decode(file.document(i)[:-1].tolist()) for i in range(file.num_documents)]


def expected(root):
    found = [path.read_text() for path in (root / "sub").iterdir()]
    return sorted([*found, *(f"row {i}" for i in range(40))])


def test_bytes_of_a_folder(text, tmp_path, capsys):
    assert run("--input", text, "--output", tmp_path / "new/corpus") == 0
    assert sorted(texts(tmp_path / "new/corpus")) == expected(text)
    card = TokenFile(tmp_path / "new/corpus").card
    assert (card.tokenizer, card.vocab_size, card.end_of_text, card.documents) == ("bytes", 257, 256, 52)
    assert card.text_bytes == sum(len(t.encode()) for t in expected(text)) == card.tokens - 52
    assert card.skipped == {"files of another suffix": 1, "undecodable files": 1}
    out = capsys.readouterr().out
    assert "52 documents" in out and "skipped: 1 files of another suffix, 1 undecodable files" in out
    assert f"-m core.pretrain --data.train {tmp_path}/new/corpus" in out


def test_a_tokenizer_is_trained_and_stored_and_used_again(text, tmp_path, capsys):
    assert run("--input", text, "--output", tmp_path / "a", "--train-tokenizer", 270) == 0
    assert sorted(texts(tmp_path / "a")) == expected(text)
    assert TokenFile(tmp_path / "a").card.vocab_size == 270
    stored = tmp_path / "a.tokenizer.json"
    assert run("--input", text, "--output", tmp_path / "b", "--tokenizer", stored) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert run("--input", text, "--output", tmp_path / "c", "--train-tokenizer", 90_000) == 0
    assert "tokens to learn, not 90000" in capsys.readouterr().err


def test_documents_are_paragraphs_or_lines_if_asked(text, tmp_path):
    (text / "more.jsonl.gz").unlink()
    counts = {}
    for kind in ("file", "paragraph", "line"):
        assert run("--input", text, "--output", tmp_path / kind, "--documents", kind) == 0
        counts[kind] = TokenFile(tmp_path / kind).num_documents
    repeats = sum(range(1, 13))
    # "# é" of one repetition and "def" of the next are one paragraph
    assert counts == {"file": 12, "paragraph": repeats + 12, "line": 3 * repeats}
    assert split_documents(TokenFile(tmp_path / "line"), "969,30,1")[2] is not None


def test_without_end_of_text_other_key_and_globs(text, tmp_path):
    (text / "a.jsonl").write_text('{"body": "b"}\n{"text": "t"}')
    (text / "page.html").write_text("<p>")
    options = ("--no-append-eod", "--text-key", "body", "--glob", "*.html", "--glob", "*.none")
    assert run("--input", text / "a.jsonl", text / "page.html", "--output", tmp_path / "a", *options) == 0
    file = TokenFile(tmp_path / "a")
    assert sorted(bytes(file.document(i).tolist()) for i in range(2)) == [b"<p>", b"b"]
    assert file.card.end_of_text is None
    assert file.card.skipped == {"rows without a text 'body'": 1}


@pytest.fixture
def small_pieces(monkeypatch):
    """Many jobs of little text: order and continuation matter, as they do for large text."""
    for module in (documents, readers, preparing):  # of this process, which cuts: workers get what it cut
        monkeypatch.setattr(module, "CHUNK_BYTES", 200)


def test_any_number_of_workers_writes_the_same_bytes(text, tmp_path, small_pieces):
    tokenizer = train_tokenizer([path.read_text() for path in (text / "sub").iterdir()], 280)
    made = {}
    for workers in (1, 2, 3):
        prefix = tmp_path / str(workers) / "a"
        prefix_files = prepare_files(TextFiles(inputs=(str(text),)), prefix, tokenizer, workers=workers).files
        assert {path.name for path in prefix_files} == {"a.bin", "a.idx", "a.json", "a.tokenizer.json"}
        made[workers] = files(prefix)
    assert made[1] == made[2] == made[3]
    assert sorted(texts(tmp_path / "3/a")) == expected(text)
    TokenFile(tmp_path / "3/a").verify()


def test_documents_begin_as_the_tokenizer_begins_a_text(text, tmp_path, small_pieces, capsys):
    """As transformers and Megatron's tool have it: one `<|begin|>` for each document, also of one in many pieces."""
    learned = train_tokenizer([path.read_text() for path in (text / "sub").iterdir()], 280)
    inner = hf_tokenizers.Tokenizer.from_str(learned.to_text())
    inner.add_special_tokens(["<|begin|>"])
    inner.post_processor = TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 280)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (text / "long.txt").write_text("a word\n" * 400)
    assert run("--input", text, "--output", tmp_path / "a", "--tokenizer", tmp_path / "tokenizer.json") == 0
    assert (
        "documents begin with <|begin|> (token 280) and end with <|endoftext|> (token 0)" in capsys.readouterr().out
    )
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    file = TokenFile(tmp_path / "a")
    found = sorted(file.document(i).tolist() for i in range(file.num_documents))
    whole = [*expected(text), "a word\n" * 400]
    assert found == sorted([*theirs(document)["input_ids"], 0] for document in whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{text}/no", "--output", "{out}"], r"error: input .*/no does not exist; name files"),
        (["--input", "{text}/picture.png", "--output", "{out}"], r"error: 0 documents in 1 files, skipped: 1 binary"),
        (["--input", "{text}", "--output", "{out}.bin"], r"error: output .*/a\.bin is a prefix"),
        (["--input", "{text}", "--output", "{out}/"], r"error: output .*/a/ is a directory, .*; write .*/a/corpus$"),
        (["--input", "{text}", "--output", "{text}"], r"error: output .*/text is a directory, .*/text/corpus$"),
        (["--input", "{text}", "--output", "{out}", "--end-of-text", "x"], r"error: --end-of-text x: bytes have no"),
        (
            ["--input", "{text}", "--output", "{out}", "--end-of-text", "x", "--train-tokenizer", "300"],
            r"error: --end-of-text x: .* has one of its own; leave it out",
        ),
        (["--input", "{text}", "--output", "{out}", "--workers", "0"], r"error: workers=0 must be at least 1"),
        (["--input", "{text}", "--output", "{out}", "--tokenizer", "{text}/no"], r"error: --tokenizer .* is no file"),
        (
            ["--input", "{text}", "--output", "{out}", "--tokenizer", "{text}/sub/1.py"],
            r"error: .*is no tokenizer.json",
        ),
        (["--input", "{text}", "--output", "{out}", "--train-tokenizer", "9"], r"error: vocab_size=9 cannot hold"),
        (["--input", "{text}", "--output", "/proc/x/a"], r"error: .*/proc/x"),
    ],
)
def test_mistakes_are_told_in_a_line_and_leave_nothing(text, tmp_path, capsys, arguments, message):
    code = run(*(argument.format(text=text, out=tmp_path / "a") for argument in arguments))
    error = capsys.readouterr().err.splitlines()[-1]
    assert code == 1
    assert re.match(message, error), error
    assert not list(tmp_path.glob("a*"))


def test_megatrons_arguments_are_answered_at_once(text, tmp_path, capsys):
    theirs = ["--output-prefix", tmp_path / "a", "--tokenizer-type=GPT2BPETokenizer", "--json-keys", "text"]
    assert run("--input", text, *theirs, "--workers", 2, "--append-eod") == 2
    head, *answers = capsys.readouterr().err.splitlines()
    assert head == "error: these are Megatron's arguments:"
    assert [answer.split("; ")[0].strip() for answer in answers] == [
        "unknown --output-prefix",
        "unknown --tokenizer-type",
        "unknown --json-keys",
    ]
    for flag in re.findall(r"give (--[\w-]+)", " ".join(megatron_arguments.ANSWERS.values())):
        assert flag in prepare._parser().format_help()


def test_the_output_never_replaces_the_input(tmp_path, capsys):
    (tmp_path / "a.json").write_text('[{"text": "precious"}]')
    assert run("--input", tmp_path / "a.json", "--output", tmp_path / "a") == 1
    assert "a.json exists and is no card" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_while_another_process_writes_the_prefix_nothing_is_written(text, tmp_path, capsys):
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as other:
        assert run("--input", text, "--output", tmp_path / "a") == 1
        assert f"error: another process ({os.getpid()}) is writing {tmp_path}/a; wait" in capsys.readouterr().err
        other.add_document([1, 2])
    assert TokenFile(tmp_path / "a").num_tokens == 2


def test_a_worker_that_dies_is_told(text, tmp_path, small_pieces):
    class Fatal(ByteTokenizer):
        def __reduce__(self):
            return os._exit, (3,)  # what a worker does when it is handed this

    with pytest.raises(
        ChildProcessError, match="died with exit code 3, perhaps for lack of memory; use fewer --workers"
    ):
        prepare_files(TextFiles(inputs=(str(text),)), tmp_path / "a", Fatal(), workers=2)
    assert not list(tmp_path.glob("a.*"))


def command(text, prefix, *more):
    arguments = ["--input", str(text), "--output", str(prefix), *more]
    return [sys.executable, "-m", "core.datasets.prepare", *arguments]


def test_a_full_disk_is_told_and_leaves_nothing(text, tmp_path):
    (text / "large.txt").write_text("text " * 50_000)
    limited = subprocess.run(
        command(text, tmp_path / "a", "--workers", "1"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert limited.returncode == 1
    assert "no space for" in limited.stderr and "Traceback" not in limited.stderr
    assert not list(tmp_path.glob("a.*"))


def seconds_of_writing(text, prefix):
    """How long the same command writes here: what is killed is killed at a share of it, on a fast machine too."""
    process = subprocess.Popen(command(text, prefix, "--workers", "2"), cwd=ROOT, stdout=subprocess.DEVNULL)
    temporary = prefix.with_name(f"{prefix.name}.bin.{process.pid}.tmp")
    while not temporary.exists():
        assert process.poll() is None, "it ended before it wrote"
        time.sleep(0.005)
    began = time.monotonic()
    assert process.wait(timeout=120) == 0
    return time.monotonic() - began


def killed(text, prefix, after, number, allowed):
    """Prepare, send it a signal so many seconds after it began to write, and look at what is left."""
    process = subprocess.Popen(command(text, prefix, "--workers", "2"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    children, deadline = [], float("inf")
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    temporary = prefix.with_name(f"{prefix.name}.bin.{process.pid}.tmp")
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
        if deadline == float("inf") and temporary.exists():
            deadline = time.monotonic() + after
        children = listed.read_text().split() or children if process.poll() is None else children
    process.send_signal(number)
    error = process.communicate(timeout=20)[1]
    assert number == signal.SIGKILL or "Traceback" not in error, error
    left = {name: content for name, content in files(prefix).items() if not name.endswith(".tmp")}
    assert ".idx" not in left or left in allowed, "what opens is the old file or the new one"
    for _ in range(500):
        if not any(alive(child) for child in children):
            break
        time.sleep(0.02)
    else:
        raise AssertionError(f"workers {children} outlive their parent")
    if number != signal.SIGKILL:
        assert not list(prefix.parent.glob("*.tmp"))
    return process.returncode


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def large(directory):
    """A second of work for two processes."""
    for i in range(40):
        (directory / f"large{i}.txt").write_text(f"some words, number {i}\n" * 40_000)


def kill_at(text, tmp_path, points):
    """Kill runs at ``points``: (share of the seconds that writing takes, signal). Most must hit a writer."""
    large(text)
    prefix, whole = tmp_path / "a", tmp_path / "whole" / "a"
    with TokenFileWriter(prefix, vocab_size=257, tokenizer=ByteTokenizer()) as writer:
        writer.add_document([1, 2, 3])
    seconds = seconds_of_writing(text, whole)
    allowed = [files(prefix), files(whole)]
    codes = [killed(text, prefix, share * seconds, number, allowed) for share, number in points]
    assert sum(code < 0 or code > 100 for code in codes) > len(codes) // 3, f"most were faster: {codes}"
    assert run("--input", text, "--output", prefix) == 0
    assert files(prefix) == files(whole)
    assert not list(tmp_path.glob("*.tmp")), "the dead's temporary files are gone"


def test_killed_it_leaves_nothing_that_opens_half(text, tmp_path):
    kill_at(text, tmp_path, [(0.4, signal.SIGKILL), (0.02, signal.SIGTERM), (0.25, signal.SIGINT)])


@pytest.mark.full
def test_killed_at_many_points(text, tmp_path):
    rng = random.Random(5)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
    kill_at(text, tmp_path, [(rng.uniform(0, 0.8), signals[i % 3]) for i in range(10)])


def test_inspect_says_what_is_there(text, tmp_path, capsys):
    run("--input", text, "--output", tmp_path / "a")
    capsys.readouterr()
    assert inspect.main([str(tmp_path / "a"), "--verify", "--json", "--sample", "5"]) == 0
    found = json.loads(capsys.readouterr().out)
    file = TokenFile(tmp_path / "a")
    lengths = [len(file.document(i)) for i in range(52)]
    assert found["documents"] == 52
    assert found["document_tokens"] == {
        "looked_at": 52,
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": sum(lengths) / 52,
    }
    assert found["sample"] == bytes(file.tokens(0, 5).tolist()).decode()
    assert found["verified"] is True
    assert inspect.main([str(tmp_path / "a.bin")]) == 0
    out = capsys.readouterr().out
    assert "52 in 52 sequences" in out and "257 tokens, tokenizer bytes" in out and "1 undecodable files" in out


def test_inspect_of_what_does_not_open(text, tmp_path, capsys):
    assert inspect.main([str(tmp_path / "a")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    run("--input", text, "--output", tmp_path / "a")
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[9] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    assert inspect.main([str(tmp_path / "a")]) == 1
    assert "a.bin was changed" in capsys.readouterr().err


def test_inspect_of_a_text_says_that_it_is_one(tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text("{}\n")
    (tmp_path / "saved").mkdir()
    for name in ("chats.jsonl", "saved"):
        path = tmp_path / name
        assert inspect.main([str(path)]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert f"{path} itself is there, and not prepared: data.train={path} takes a text" in said


def test_inspect_of_a_hugging_face_folder(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert inspect.main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "is a Hugging Face folder (it has a config.json), not a token file: a run begins with it as" in told


def test_inspect_of_megatrons_own_file(tmp_path, capsys, monkeypatch):
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        for i in range(50):
            writer.add_document([1] * (i + 1))
    monkeypatch.setattr(inspect, "_MAX_SAMPLED", 10)
    assert inspect.main([str(tmp_path / "a"), "--verify"]) == 0
    out = capsys.readouterr().out
    assert "none: written by another program" in out and "both tables read and right" in out
    assert "shortest 1 (of 10 sampled), longest 50 (of 10 sampled), mean 25.5" in out
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34 + 40] ^= 1
    (tmp_path / "a.idx").write_bytes(index)
    assert inspect.main([str(tmp_path / "a"), "--verify"]) == 1
    assert "sequence 11 of 12 tokens" in capsys.readouterr().err
