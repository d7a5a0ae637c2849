"""Text from a folder of Hugging Face's, and from a checkpoint of it, by command."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import tokenizers as hf_tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from core.datasets import load_tokenizer, train_tokenizer
from core.datasets.tokenizers.folder import stop_tokens
from core.dist_checkpointing import save
from core.models.huggingface import from_huggingface
from core.models.huggingface.importing import import_huggingface
from core.parallel_state import ParallelState
from core.training.generate import _messages, main
from core.training.run.trained import find_trained
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
    for more in ([], ["--tokenizer", str(folder / "tokenizer.json")]):
        with pytest.raises(
            ValueError, match=r"^no-such-run is no folder; give a Hugging Face folder, a run's output"
        ):
            main(["no-such-run", "--prompt", "x", *more])
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


def test_adapters_of_peft_alone_are_told(folder, tmp_path):
    alone = tmp_path / "adapters"
    alone.mkdir()
    (alone / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "hf"}')
    said = rf"{alone} has adapters of peft's alone; merge them into their base, .*from_pretrained\('hf'\), '{alone}'"
    with pytest.raises(ValueError, match=rf"^{said}"):
        main([str(alone), "--prompt", "x"])
    with pytest.raises(ValueError, match=rf"^{said}"):
        find_trained(str(alone))
    with pytest.raises(ValueError, match=rf"adapters/config.json does not exist; {said}"):
        from_huggingface(alone)


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
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == said


def test_a_text_ends_where_the_folder_says(folder, tmp_path, capsys):
    """At any id of generation_config.json, before config.json's; a token that is named comes before both."""
    words = ["--prompt", "import os", "--new-tokens", "8"]
    prompt = load_tokenizer(folder / "tokenizer.json").encode("import os")
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([prompt])
    new = hf.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
    said = {}
    for name, end in {"whole": [0], "first": [0, new[0]], "named": [new[0]]}.items():
        told = tmp_path / name
        shutil.copytree(folder, told)
        (told / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        named = ["--end-of-text", "<|endoftext|>"] if name == "named" else []
        assert main([str(told), *words, *named]) == 0
        said[name] = capsys.readouterr().out
    assert said["named"] == said["whole"] and len(said["first"]) < len(said["whole"])
    assert stop_tokens(tmp_path / "first") == [0, new[0]]
    (tmp_path / "first" / "generation_config.json").unlink()
    (tmp_path / "first" / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_tokens(tmp_path / "first") == [7]
    (tmp_path / "first" / "config.json").unlink()
    assert stop_tokens(tmp_path / "first") == []


def test_sampling_of_the_folder_that_is_not_read_is_told(folder, tmp_path, capsys):
    told = tmp_path / "told"
    shutil.copytree(folder, told)
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05, "eos_token_id": 0}
    words = [str(told), "--prompt", "import os", "--new-tokens", "1"]
    (told / "generation_config.json").write_text(json.dumps(said))
    assert main([*words, "--top-p", "0.9", "--temperature", "1.0"]) == 0
    message = capsys.readouterr().err
    assert "says repetition_penalty=1.05, which is not read; repetition_penalty: not here" in message
    assert main(words) == 0
    assert "give --temperature 0.6 --top-p 0.9; repetition_penalty: not here" in capsys.readouterr().err
    (told / "generation_config.json").write_text(json.dumps(said | {"do_sample": False, "repetition_penalty": 1.0}))
    assert main(words) == 0
    assert "generation_config" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def chatty(folder, tmp_path_factory):
    """The folder with a token before each text, and a chat template whose turns are special tokens."""
    chatty = tmp_path_factory.mktemp("chatty")
    shutil.copytree(folder, chatty, dirs_exist_ok=True)
    inner = hf_tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ["<|begin|>", "<|turn|>", "<|endoftext|>"]
    inner.add_special_tokens(names)
    begin = inner.token_to_id("<|begin|>")
    inner.post_processor = TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=names[0], eos_token=names[2])
    fast.chat_template = (
        "<|begin|>{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
    )
    fast.save_pretrained(chatty)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vocab_size = len(fast)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(chatty)
    return chatty


def greedy(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]


def test_prompts_are_read_as_transformers_reads_them(chatty, tmp_path, capsys):
    """What begins a text, special tokens that a prompt spells out, and the chat template."""
    hf = transformers.AutoTokenizer.from_pretrained(chatty)
    import_huggingface(chatty, str(tmp_path / "ckpt"))
    for prompt in ("import os", "<|begin|><|turn|>user x\n<|turn|>assistant "):
        expected = prompt + hf.decode(greedy(chatty, hf(prompt)["input_ids"])) + "\n"
        assert main([str(chatty), "--prompt", prompt, "--max-new-tokens", "8"]) == 0
        assert capsys.readouterr().out == expected
        assert main([str(tmp_path / "ckpt"), "--source", str(chatty), "--prompt", prompt, "--new-tokens", "8"]) == 0
        assert capsys.readouterr().out == expected
    for system in ([], ["short"]):
        chat = [{"role": "system", "content": text} for text in system] + [{"role": "user", "content": "def f("}]
        ids = hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        words = [word for text in system for word in ("--system", text)]
        assert main([str(chatty), "--chat", *words, "--prompt", "def f(", "--new-tokens", "8"]) == 0
        assert capsys.readouterr().out == hf.decode(greedy(chatty, ids)) + "\n", "the answer alone"


def test_a_prompt_may_be_a_chat(chatty, capsys):
    hf = transformers.AutoTokenizer.from_pretrained(chatty)
    chat = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    for system in ([], [{"role": "system", "content": "short"}]):
        ids = hf.apply_chat_template([*system, *chat], add_generation_prompt=True, return_dict=True)["input_ids"]
        words = ["--system", "short"] if system else []
        assert main([str(chatty), "--chat", *words, "--prompt", json.dumps(chat), "--new-tokens", "8"]) == 0
        assert capsys.readouterr().out == hf.decode(greedy(chatty, ids)) + "\n"
    with pytest.raises(ValueError, match="a chat that ends with the assistant's message, and the model gives"):
        main([str(chatty), "--chat", "--prompt", json.dumps(chat[:2])])
    with pytest.raises(ValueError, match='list of messages, and some lack a "role" or a "content"; give'):
        main([str(chatty), "--chat", "--prompt", '[{"role": "user"}]'])
    for text in ('[{"id": 1}]', "[1, 2", "[]"):  # what a user may ask about
        assert _messages(text) == [{"role": "user", "content": text}]


def test_an_empty_prompt(folder, chatty, capsys):
    """There is something to go on from where the tokenizer begins each text."""
    with pytest.raises(ValueError, match=r"^--prompt is empty, and this tokenizer begins a text with no token of it"):
        main([str(folder), "--prompt", "x", "--prompt", ""])
    assert main([str(chatty), "--prompt", "", "--new-tokens", "2"]) == 0


def test_a_folder_without_a_model(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    told = rf"^{tmp_path} is no run \(it has no run.toml\), no checkpoint \(no manifest.json\), no directory of"
    with pytest.raises(ValueError, match=told):
        main([str(tmp_path), "--prompt", "x"])
    with pytest.raises(ValueError, match=told):
        find_trained(str(tmp_path))


def test_a_chat_needs_its_template(folder):
    with pytest.raises(ValueError, match=r"so no chat template for messages; copy the file .*, or leave out --chat$"):
        main([str(folder), "--chat", "--prompt", "x"])
    with pytest.raises(ValueError, match="--system is a message of a chat; give --chat too"):
        main([str(folder), "--system", "short", "--prompt", "x"])


def test_flags_of_other_programs_are_read_or_answered(folder, capsys):
    words = [str(folder), "--prompt", "a cat", "--seed", "3"]
    assert main([*words, "--max_new_tokens=4", "--temperature", "0.8", "--top_k", "5"]) == 0
    theirs = capsys.readouterr().out
    assert main([*words, "--new-tokens", "4", "--temperature", "0.8", "--top-k", "5"]) == 0
    assert theirs == capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main([*words, "--do_sample", "--num-beams", "4"])
    told = capsys.readouterr().err
    assert left.value.code == 2 and "unknown --do_sample; give --temperature T above 0" in told
    assert "unknown --num-beams; not here" in told
    with pytest.raises(SystemExit):
        main(["--model", str(folder), "--prompt", "a"])
    assert "unknown --model; it is the first word, without a flag" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_a_model_of_ones_own_is_told(tmp_path):
    state = {"w": torch.ones(2)}
    save(state, tmp_path / "own", ps=ParallelState.single("cpu"), run={"settings": {"model.build": "mine:build"}})
    with pytest.raises(
        ValueError, match=r"own is of a model of one's own \(model.build = 'mine:build'\), which this"
    ):
        main([str(tmp_path / "own"), "--prompt", "x"])
