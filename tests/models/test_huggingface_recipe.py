"""docs/recipes/add_a_model.md adds a family in 40 lines or less, and it is transformers'."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.granite import modeling_granite

from core.models.gpt import GPTModel
from core.models.huggingface import FAMILIES, from_huggingface, load_huggingface
from core.models.huggingface.matching import matching_family
from core.parallel_state import ParallelState
from tests.models.huggingface import exactly, random_model
from tests.models.test_huggingface import COMMON

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "add_a_model.md"
MULTIPLIERS = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}


@pytest.fixture
def granite(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(code.splitlines()) <= 40
    monkeypatch.setitem(FAMILIES, "granite", None)  # put back as it was: not there
    exec(compile(code, str(PAGE), "exec"), {"__name__": "recipe"})
    yield transformers.GraniteConfig(**COMMON, **MULTIPLIERS)


def test_the_family_of_the_recipe_is_that_of_transformers(granite, monkeypatch):
    exactly(monkeypatch)
    llama = transformers.models.llama.modeling_llama
    monkeypatch.setattr(modeling_granite.GraniteRMSNorm, "forward", llama.LlamaRMSNorm.forward)
    monkeypatch.setattr(modeling_granite.GraniteRotaryEmbedding, "forward", llama.LlamaRotaryEmbedding.forward)
    theirs, tokens = random_model(granite), torch.randint(101, (2, 9))
    ours = from_huggingface(granite, params_dtype=torch.float64)
    model = GPTModel(**ours.arguments(), parallel=ParallelState.single("cpu"))
    load_huggingface(model, theirs.state_dict())
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-10, atol=1e-10)
    assert matching_family(ours)[0].architecture == "GraniteForCausalLM"


def test_what_the_recipe_refuses_is_refused(granite):
    granite.residual_multiplier = 0.2
    with pytest.raises(ValueError, match=r"residual_multiplier=0\.2 is not supported; 1\.0 is"):
        from_huggingface(granite)
