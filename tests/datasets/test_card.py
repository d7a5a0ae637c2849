"""Cards: their bytes, and every file that is not as its card says refused at open."""

import hashlib
import json
import shutil

import pytest

from core.datasets import token_file
from core.datasets.card import BLOCK_BYTES, SAMPLED_BLOCKS, has_card, sampled_hash
from core.datasets.token_file import TokenFile
from core.datasets.token_file_writer import TokenFileWriter
from core.datasets.tokenizers.byte_tokenizer import ByteTokenizer

TEXTS = [b"one two", b"three"]


def write(prefix, texts=TEXTS, tokenizer=None, **kwargs):
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    with TokenFileWriter(prefix, vocab_size=257, tokenizer=tokenizer, end_of_text=256, **kwargs) as writer:
        for text in texts:
            writer.add_document([*text, 256])
            writer.text_bytes += len(text)
    return prefix


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_bytes_of_a_card(tmp_path):
    """Golden: a card that is written differently is another format."""
    write(tmp_path / "a", sources=["texts"])
    assert (tmp_path / "a.json").read_text() == "\n".join(
        [
            "{",
            '  "format": "paracore tokens 1",',
            '  "dtype": "uint16",',
            '  "documents": 2,',
            '  "tokens": 14,',
            '  "text_bytes": 12,',
            '  "skipped": {},',
            '  "vocab_size": 257,',
            '  "end_of_text": 256,',
            '  "tokenizer": "bytes",',
            '  "sources": [',
            '    "texts"',
            "  ],",
            '  "idx_bytes": 82,',
            '  "bin_bytes": 28,',
            f'  "idx_hash": "{hashlib.sha256(b"82" + (tmp_path / "a.idx").read_bytes()).hexdigest()}",',
            f'  "bin_hash": "{hashlib.sha256(b"28" + (tmp_path / "a.bin").read_bytes()).hexdigest()}",',
            f'  "bin_sha256": "{sha256(tmp_path / "a.bin")}",',
            f'  "idx_sha256": "{sha256(tmp_path / "a.idx")}"',
            "}\n",
        ]
    )
    assert not (tmp_path / "a.tokenizer.json").exists(), "bytes need none"
    card = TokenFile(tmp_path / "a").card
    assert (card.documents, card.text_bytes, card.sources) == (2, 12, ("texts",))
    TokenFile(tmp_path / "a").verify()


def test_files_without_a_card_open_and_have_none(tmp_path):
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([1, 2])
    assert TokenFile(tmp_path / "a").card is None
    (tmp_path / "a.json").write_text('{"text": "what was tokenised"}')
    assert TokenFile(tmp_path / "a").card is None, "somebody's JSON"


@pytest.mark.parametrize(("kind", "offset"), [("bin", 0), ("bin", 27), ("idx", 34), ("idx", 44), ("idx", 70)])
def test_a_changed_byte_is_refused_at_open(tmp_path, kind, offset):
    write(tmp_path / "a")
    content = bytearray((tmp_path / f"a.{kind}").read_bytes())
    content[offset] ^= 1
    (tmp_path / f"a.{kind}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.{kind} was changed: its sampled hash is .* prepare it again"):
        TokenFile(tmp_path / "a")


def test_the_files_of_another_card_are_refused(tmp_path):
    write(tmp_path / "a"), write(tmp_path / "b", [b"another text"])
    for kind in ("bin", "idx"):
        shutil.copy(tmp_path / f"b.{kind}", tmp_path / f"a.{kind}")
    with pytest.raises(
        ValueError, match=r"a\.bin has 26 bytes, its card says 28; .*a\.idx has 62 bytes, its card says 82"
    ):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "is damaged"),
        (lambda text: text.replace("tokens 1", "tokens 4"), "has format 'paracore tokens 4', this reads"),
        (lambda text: text.replace("tokens 1", "tokens 2"), "dtype is 'uint16', and marks of answers need int32"),
        (lambda text: text.replace('  "dtype": "uint16",\n', ""), r"\['dtype'\] are missing or too many"),
    ],
)
def test_a_damaged_card_is_refused(tmp_path, change, message):
    write(tmp_path / "a")
    path = tmp_path / "a.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        TokenFile(tmp_path / "a")
    path.unlink()
    assert TokenFile(tmp_path / "a").card is None, "the remedy"


def test_verify_finds_what_no_sampled_block_sees(tmp_path):
    write(tmp_path / "a", [bytes(range(256)) * 4096])
    content = bytearray((tmp_path / "a.bin").read_bytes())
    gap = (len(content) - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)
    content[BLOCK_BYTES + (gap - BLOCK_BYTES) // 2] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    file = TokenFile(tmp_path / "a")
    with pytest.raises(ValueError, match=r"a\.bin: the hash of all its bytes is"):
        file.verify()


def test_the_sampled_hash_reads_both_ends_and_little_else(tmp_path):
    size = 3 << 20
    path = tmp_path / "a"
    hashes = set()
    for offset in (None, 0, BLOCK_BYTES - 1, size - BLOCK_BYTES, size - 1):
        content = bytearray(size)
        if offset is not None:
            content[offset] = 1
        path.write_bytes(content)
        hashes.add(sampled_hash(path))
    path.write_bytes(bytes(size + 1))
    assert len(hashes | {sampled_hash(path)}) == 6
    gap = (size - BLOCK_BYTES) // (SAMPLED_BLOCKS - 1)
    blocks = b"".join(bytes(BLOCK_BYTES) for _ in range(SAMPLED_BLOCKS))
    path.write_bytes(bytes(BLOCK_BYTES) + b"x" * (gap - BLOCK_BYTES) + bytes(size - gap))
    assert sampled_hash(path) == hashlib.sha256(str(size).encode() + blocks).hexdigest(), "the gap is not read"


def test_writing_over_a_file_leaves_no_card_of_the_old_one(tmp_path):
    write(tmp_path / "a")
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([1, 2])
    assert TokenFile(tmp_path / "a").card is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_a_card_never_replaces_a_foreign_file(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "the input"}))
    with pytest.raises(ValueError, match=r"a\.json exists and is no card"):
        write(tmp_path / "a")
    with TokenFileWriter(tmp_path / "a", vocab_size=9) as writer:
        writer.add_document([1, 2])
    assert (tmp_path / "a.json").exists()


def rewritten(prefix, change=lambda card: None, **style):
    """The card as another program would write it, changed."""
    path = prefix.parent / f"{prefix.name}.json"
    card = json.loads(path.read_text())
    change(card)
    path.write_text(json.dumps(card, **style))


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": "\t", "sort_keys": True}])
def test_a_card_with_other_spaces_is_a_card(tmp_path, style):
    write(tmp_path / "a")
    card = TokenFile(tmp_path / "a").card
    rewritten(tmp_path / "a", **style)
    assert TokenFile(tmp_path / "a").card == card
    path = tmp_path / "a.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValueError, match=r"a\.json of \d+ bytes is damaged"):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize(
    "content", ["", "[1]", "[" * 10**5, '{"format": 5}', '{"text": "a\\"format\\": \\"paracore tokens"']
)
def test_other_json_is_no_card(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    assert not has_card(tmp_path / "a")


def test_a_large_file_is_no_card(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.write(b'{"format": "paracore tokens 1"')
        file.truncate(1 << 30)
    assert not has_card(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sources", None, "sources is None, not a list of text"),
        ("sources", [1], r"sources is \[1\], not a list"),
        ("tokenizer", None, "tokenizer is None, not text"),
        ("bin_hash", None, "bin_hash is None, not text"),
        ("bin_sha256", 5, "bin_sha256 is 5, not text"),
        ("idx_sha256", None, "idx_sha256 is None, not text"),
        ("text_bytes", "x", "text_bytes is 'x', not a number from 0 on"),
        ("tokens", True, "tokens is True, not a number"),
        ("end_of_text", "x", "end_of_text is 'x', not a token or null"),
        ("skipped", {"a": "b"}, "skipped is {'a': 'b'}, not numbers by reason"),
    ],
)
def test_a_value_of_another_type_is_told(tmp_path, field, value, message):
    write(tmp_path / "a")
    rewritten(tmp_path / "a", lambda card: card.update({field: value}))
    with pytest.raises(ValueError, match=rf"a\.json is damaged: {message}"):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokens": 13, "documents": 3},
            "documents: the card says 3, the files 2; tokens: the card says 13, the files 14",
        ),
        ({"dtype": "int32"}, "dtype: the card says int32, the files uint16"),
        ({"vocab_size": 256}, "vocab_size: the card says 256, the files hold tokens 95 to 256"),
    ],
)
def test_verify_compares_the_numbers_of_the_card(tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(token_file, "_BLOCK", 5)
    write(tmp_path / "a", [b"one_two", b"three"])
    TokenFile(tmp_path / "a").verify()
    rewritten(tmp_path / "a", lambda card: card.update(change))
    with pytest.raises(ValueError, match=message):
        TokenFile(tmp_path / "a").verify()
