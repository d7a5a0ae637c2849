"""Megatron's configuration says that sequences are split over tensor ranks, after the groups were made."""

import pytest
import torch

from core.interop.megatron import parallel_state as mpu
from core.interop.megatron.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from core.interop.megatron.models.gpt.gpt_model import GPTModel
from core.interop.megatron.transformer.transformer_config import TransformerConfig
from core.tensor_parallel import full_tensor

S, VOCAB = 16, 64
FACTS = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "params_dtype": torch.float64}


def trained(tp, in_config, in_state):
    """(losses of three steps, a whole weight after them, whether sequences were split)."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(tp, sequence_parallel=in_state)
    try:
        more = {} if in_config is None else {"sequence_parallel": in_config}
        config = TransformerConfig(**FACTS, hidden_dropout=0.0, attention_dropout=0.0, **more)
        torch.manual_seed(0)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=S)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for step in range(3):
            tokens = torch.randint(VOCAB, (2, S + 1), generator=torch.Generator().manual_seed(step))
            loss = model(tokens[:, :-1], None, None, labels=tokens[:, 1:]).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weight = model.decoder.layers["0"].mlp.linear_fc1.weight
        return losses, full_tensor(weight.detach(), like=weight), model.place.splits_sequence
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.parametrize("in_config, in_state", [(True, False), (None, True), (True, True)])
def test_either_says_it(ranks, in_config, in_state):
    ((want, whole, _),) = ranks(trained, 1, None, False, world=1)
    for losses, weight, is_split in ranks(trained, 2, in_config, in_state, world=2):
        assert is_split and losses == pytest.approx(want, rel=1e-10)
        torch.testing.assert_close(weight.view_as(whole), whole, rtol=1e-9, atol=1e-12)


def asks_for_its_stages():
    """As `pretrain_gpt.py` asks, after the configuration has turned it on."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2)
    try:
        TransformerConfig(**FACTS, sequence_parallel=True)
        return [mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage) for stage in (None, 0)]
    finally:
        mpu.destroy_model_parallel()


def test_the_number_of_virtual_stages_stays(ranks):
    assert ranks(asks_for_its_stages, world=2) == [[True, True]] * 2


def refused():
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(2, sequence_parallel=True)
    try:
        with pytest.raises(ValueError, match=r"sequence_parallel=False\), the state has True"):
            TransformerConfig(**FACTS, sequence_parallel=False)
    finally:
        mpu.destroy_model_parallel()
    for more, meant in (
        ({"use_sharp": True}, "use_sharp; leave them out"),
        ({"tensor_parallel_size": 2}, "did you mean tensor_model_parallel_size"),
    ):
        with pytest.raises(ValueError, match=meant):
            mpu.initialize_model_parallel(1, **more)


def test_what_contradicts_or_is_not_here_is_refused(ranks):
    ranks(refused, world=2)
