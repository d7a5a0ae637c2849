"""Text from a folder of Hugging Face's, and from a checkpoint of it, by command."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

from core.datasets import train_tokenizer
from core.models.huggingface.importing import import_huggingface
from core.training.generate import main
from tests import warm

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    texts = [path.read_text() for path in sorted((ROOT / "core" / "pipeline").rglob("*.py"))]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=tokenizer.vocab_size,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def test_a_folder_and_its_checkpoint_say_the_same(folder, tmp_path, capsys):
    words = ["--prompt", "import os", "--new-tokens", "20"]
    assert main([str(folder), *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("import os") and len(said) > len("import os\n")
    import_huggingface(folder, str(tmp_path / "ckpt"))
    assert main([str(tmp_path / "ckpt"), "--source", str(folder), *words]) == 0
    assert capsys.readouterr().out == said
    assert main([str(folder), *words, "--prompt", "def f("]) == 0
    both = capsys.readouterr().out
    assert both.startswith(said.rstrip("\n")) and "\n\ndef f(" in both


def test_what_does_not_fit_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"1 processes for --parallel.tensor 2; start as many: torchrun"):
        main([str(folder), "--prompt", "x", "--parallel.tensor", "2"])
    with pytest.raises(ValueError, match=r"top_p=2.0 must lie in"):
        main([str(folder), "--prompt", "x", "--temperature", "1", "--top-p", "2"])
    with pytest.raises(ValueError, match=r"draw nothing at temperature 0; give --temperature"):
        main([str(folder), "--prompt", "x", "--top-k", "2"])
    import_huggingface(folder, str(tmp_path / "steps" / "ckpt"))
    with pytest.raises(ValueError, match=r"says nothing of its tokenizer; give --tokenizer FILE"):
        main([str(tmp_path / "steps" / "ckpt"), "--prompt", "x"])
    with pytest.raises(ValueError, match=r"steps holds 1 checkpoints; give one, .*steps/ckpt"):
        main([str(tmp_path / "steps"), "--prompt", "x"])
    small = tmp_path / "small"
    config = transformers.LlamaConfig(vocab_size=100, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    config.save_pretrained(small)
    (small / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match=r"has \d+ tokens, its embedding 100 rows"):
        main([str(small), "--prompt", "x"])
    (small / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"small has no tokenizer.json; give --tokenizer FILE \("):
        main([str(small), "--prompt", "x"])


def test_the_last_position_is_told(folder, capsys):
    assert main([str(folder), "--prompt", "import os", "--new-tokens", "100"]) == 0
    assert capsys.readouterr().err == "stopped at position 64, the model's last\n"


@pytest.mark.full
def test_two_tensor_ranks_under_torchrun_say_the_same(folder, capsys):
    words = [str(folder), "--prompt", "import os", "--new-tokens", "20", "--temperature", "0.8", "--top-k", "50"]
    assert main(words) == 0
    said = capsys.readouterr().out
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "core.training.generate", *words, "--parallel.tensor", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
