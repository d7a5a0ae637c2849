"""A model in two halves, put together by hand on one process, is the whole model."""

import warnings

import pytest
import torch

from core.parallel_state import ParallelState, layout_of
from tests.models.gpt import B, S, batch, gpt
from tests.parity.whole import assert_same
from tests.states import state

HALVES = ((True, False, range(2)), (False, True, range(2, 4)))


def halves(style, tied, ps):
    facts = {"num_layers": 4}
    return gpt(style, tied=tied, facts=facts, parallel=ps), [
        gpt(style, tied=tied, facts=facts, parallel=ps, pre_process=pre, post_process=post, layers=layers)
        for pre, post, layers in HALVES
    ]


def summed(stages):
    """Gradients by global name: a table that two stages hold has the sum of both."""
    total = {}
    for stage in stages:
        for name, p in stage.named_parameters():
            total[name] = total[name] + p.grad if name in total else p.grad
    return total


def compare(style, tied, ps):
    whole, (first, last) = halves(style, tied, ps)
    tokens, labels = batch()
    positions = torch.stack((torch.arange(S), torch.arange(S) % 3))
    want = whole(tokens, positions, labels=labels)
    hidden = first(tokens, positions)
    assert hidden.shape == (S // (ps.size("tp") if ps.config.sequence_parallel else 1), B, 32)
    handed = hidden.detach().requires_grad_()  # what crosses a wall between processes
    loss = last(handed, positions, labels=labels)
    torch.testing.assert_close(loss, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(last(handed, positions), whole(tokens, positions), rtol=0, atol=1e-12)
    want.sum().backward()
    loss.sum().backward()
    hidden.backward(handed.grad)
    reference = {n: p.grad for n, p in whole.named_parameters()}
    assert_same(summed((first, last)), reference)
    with pytest.raises(ValueError, match=r"sequence length 32 is more than max_sequence_length=16"):
        last(hidden.detach().repeat(4, 1, 1), positions)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_two_halves_are_the_whole(style, tied):
    compare(style, tied, ParallelState.single("cpu"))


def compare_here(style, tied):
    compare(style, tied, state(tp=2, sp=True))


@pytest.mark.parametrize("style, tied", [("gpt2", True), ("llama", False)])
def test_two_halves_are_the_whole_over_sequence_shards(ranks, style, tied):
    ranks(compare_here, style, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_half_has_global_names_and_nothing_of_the_other(tied):
    whole, (first, last) = halves("gpt2", tied, ParallelState.single("cpu"))
    names = [{n for n, _ in half.named_parameters()} for half in (first, last)]
    assert names[0] | names[1] == {n for n, _ in whole.named_parameters()}
    table = "embedding.word_embeddings.weight"
    assert names[0] & names[1] == ({table} if tied else set())
    assert {n.split(".")[2] for n in names[1] if ".layers." in n} == {"2", "3"}
    assert "embedding.position_embeddings.weight" not in names[1] and "decoder.final_layernorm.weight" not in names[0]
    for half in (first, last):
        for name, p in half.named_parameters():
            assert torch.equal(p, whole.get_parameter(name)), f"{name}: initial values depend on the stage"
            assert ("embedding" in layout_of(p).partial) == (tied and name == table)


def pipeline_share():
    model = gpt(facts={"num_layers": 3}, parallel=state(pp=2), tied=True)
    return model.pre_process, model.post_process, list(model.decoder.layers.keys()), model.num_parameters()


def test_the_pipeline_rank_says_which_part(ranks):
    first, last = ranks(pipeline_share)
    assert first[:3] == (True, False, ["0"]) and last[:3] == (False, True, ["1", "2"])
    assert first[3] < last[3]


def said_of_layers(use):
    """What a rank of two hears of `use(layers)` of its four layers' half, twice."""
    model = gpt(facts={"num_layers": 4}, parallel=state(pp=2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            USES[use](model.decoder.layers)
    return [str(w.message) for w in told]


def last_of_a_list(layers):
    found = list(layers)
    return found[-1]


def values_of(layers):
    return layers.values()


def counted(layers):
    depth = 0
    for layer in layers.values():
        layer.depth = depth

        depth += 1
    return depth


def counted_before(layers):
    depth = 0
    depth += 1
    for layer in layers.values():
        layer.depth = depth
    depth += 1
    return depth


def last_number(layers):
    last = 0
    for name, _ in layers.named_parameters():
        last = max(last, int(name.split(".")[0]))
    return last


USES = {
    "counted": counted,
    "counted before": counted_before,
    "returned": lambda layers: [*enumerate(values_of(layers))],
    "without names": lambda layers: [layer for _, layer in layers.items()],
    "names and layers": lambda layers: [(number, layer) for number, layer in layers.items()],
    "flat": lambda layers: [layer for part in (layers,) for layer in part.values()],
    "len": lambda layers: len(layers),
    "enumerate": lambda layers: [i for i, layer in enumerate(layers.values())],
    "first": lambda layers: list(layers.values())[0],  # noqa: RUF015
    "list": lambda layers: list(layers),
    "enumerated in a loop": lambda layers: [i for i, layer in enumerate(layers)],
    "enumerated items": lambda layers: [i for i, (_, layer) in enumerate(layers.items())],
    "last item": lambda layers: list(layers.items())[-1],
    "last key": lambda layers: list(layers.keys())[-1],
    "last child": lambda layers: list(layers.children())[-1],
    "last named child": lambda layers: list(layers.named_children())[-1],
    "two lines": last_of_a_list,
    "items of two": lambda layers: [*zip(layers.items(), layers.items(), strict=True)],
    "applied": lambda layers: layers.apply(lambda module: None),
    "with others": lambda layers: [*zip(layers, range(9), strict=False)],
    "loop": lambda layers: [layer.eval() for layer in layers],
    "all": lambda layers: [layer.eval() for layer in layers.values()],
    "by number": lambda layers: {int(number): layer for number, layer in layers.items()},
    "modules": lambda layers: layers.to(torch.float64),
    "counted modules": lambda layers: sum(1 for part in layers.modules() if hasattr(part, "self_attention")),
    "counted parameters": lambda layers: len([p for p in layers.parameters() if p.dim() > 1]),
    "counted names": lambda layers: sum("linear_proj" in name for name, _ in layers.named_parameters()),
    "the layers beside": lambda layers: [str(int(n) + 2) in layers or str(int(n) - 2) in layers for n in ("0", "2")],
    "by a number and another": lambda layers: [str(begin + place) in layers for begin in (0, 2) for place in (0, 1)],
    "the widest name": lambda layers: max(name.count(".") for name, _ in layers.named_parameters()),
    "whether it is here": lambda layers: [str(n) in layers for n in range(4)],
    "the last number": lambda layers: max(int(name.split(".")[0]) for name, _ in layers.named_parameters()),
    "numbers in a loop": last_number,
    "modules in a loop": lambda layers: [part.train() for part in layers.modules()],
}


@pytest.mark.parametrize("use", USES)
def test_layers_that_are_taken_by_their_place_in_a_stage_are_told(ranks, use):
    """A decay by depth, an initial value by depth, the first layer frozen: on each stage they would begin again."""
    by_place = use not in (
        "counted before",
        "names and layers",
        "loop",
        "all",
        "by number",
        "modules",
        "applied",
        "items of two",
        "modules in a loop",
        "whether it is here",
        "by a number and another",
        "the widest name",
    )
    for rank, messages in enumerate(ranks(said_of_layers, use, world=2)):
        assert len(messages) == by_place
        if by_place:
            assert f"this stage has {2 * rank} to {2 * rank + 1} of 4 layers" in messages[0]
            assert "config.num_layers" in messages[0]


def test_layers_of_a_whole_model_are_as_many_as_it_has(single):
    layers = gpt(facts={"num_layers": 2}, parallel=single).decoder.layers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(layers) == 2 and [i for i, _ in enumerate(layers.values())] == [0, 1]
        assert [*layers] == [*layers.values()] == [layers[0], layers[-1]] == layers[:2] and layers[1:] == [
            layers["1"]
        ]
    for absent in (7, -3):
        with pytest.raises(KeyError, match=f"layer {absent}: this stage has 0 to 1 of 2 layers"):
            layers[absent]
