"""One step of a small GPT over context ranks and everything around them, and the same in one process."""

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist

from core.autograd import apply_recompute
from core.context_parallel import visible_mask
from core.data_parallel import DataParallel
from core.models.gpt import GPTModel, gpt2_spec, gpt_stages, llama_spec
from core.parallel_state import ParallelState, context_batch
from core.parallel_state.layout import layout_of, true_part
from core.pipeline import Pipeline, SingleStage
from core.pipeline.schedule import schedules as named
from core.training import next_token_loss
from core.transformer import TransformerConfig
from core.transformer.transformer_config import RotaryConfig, RotaryScaling
from tests.context_parallel.rows import documents
from tests.parity.shards import norm, whole_gradients
from tests.states import state

VOCAB, S, ROWS, LAYERS, SEED = 53, 24, 4, 4, 7
LLAMA = {
    "normalization": "RMSNorm",
    "activation_func": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_query_groups": 4,
}
SCALED = RotaryConfig(scaling=RotaryScaling(kind="linear", factor=2.0))
STYLES = {
    "llama": LLAMA,
    "gpt2": {},  # learned positions
    "windows": LLAMA
    | {
        "windows": (3, None, 7, 1000),
        "qk_layernorm": True,
        "rotary_per_layer": (RotaryConfig(), SCALED, None, SCALED),
    },
}
CUTS = [[3, 4, 17], [12], range(24), []]  # of the 4 rows: documents of one token, cuts on edges of chunks, none


@dataclass(frozen=True)
class Case:
    """How one step is laid out; the world is dp cp tp pp."""

    cp: int = 1
    kind: str = "all_gather"
    ulysses: int | None = None
    dp: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    keeps: str = "attention"
    zero: int = 1
    packed: bool = False
    masked: bool = False
    tied: bool = False
    style: str = "llama"
    loss_chunk: int | None = None

    @property
    def world(self):
        return self.dp * self.cp * self.tp * self.pp


def config(style):
    facts = {"num_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 8, "ffn_hidden_size": 20}
    facts |= {"init_method_std": 0.2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(**facts | STYLES[style], params_dtype=torch.float64)


def spec(style):
    return gpt2_spec() if style == "gpt2" else llama_spec()


def batch(packed, masked):
    """The global batch of whole sequences. masked: uneven labels; at cp 2 and 4 all of one rank's are ignored."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, ROWS, S), generator=generator)
    labels[0, ::3] = -100
    found = {"tokens": tokens, "labels": labels}
    if masked:
        labels[1] = -100
        labels[:, : S // 4] = labels[:, -S // 4 :] = -100
    if packed:
        begin = documents(S, CUTS)
        found |= {"document_begin": begin, "position_ids": torch.arange(S) - begin}
    return found


def build(case, ps, **more):
    """(stages of this rank, their data parallelism, executor)."""
    placement = named.placement(case.schedule, case.pp) if case.pp > 1 else (0,)
    facts = {"share_embeddings_and_output_weights": case.tied, "parallel": ps, "placement": placement, "seed": SEED}
    stages = gpt_stages(config(case.style), spec(case.style), VOCAB, S, **facts | more)
    for stage in stages.values():
        stage.loss_chunk = case.loss_chunk
    shard = DataParallel(stages, ps, zero_stage=case.zero)
    how = {"ps": ps, "grad_sync": shard, "seed": SEED, "num_microbatches": ROWS // case.dp}
    if case.pp > 1:
        return (
            stages,
            shard,
            Pipeline(stages, schedule=case.schedule, recompute=case.recompute, recompute_keeps=case.keeps, **how),
        )
    (model,) = stages.values()
    apply_recompute(model, case.recompute, stage=model.stage, keeps=case.keeps)
    return stages, shard, SingleStage(model, **how)


def local_rows(case, ps, whole):
    """This rank's part of the global batch."""
    rows = ROWS // case.dp
    return context_batch({k: v[ps.index("dp") * rows :][:rows] for k, v in whole.items()}, ps)


def step(case):
    """(whole gradients, loss, norm of the mean's gradient, tokens) of one step on this rank's part of the batch."""
    ps = state(tp=case.tp, pp=case.pp, cp=case.cp, sp=case.sp, cp_comm_type=case.kind, ulysses=case.ulysses)
    assert dist.get_world_size() == case.world
    _, shard, executor = build(case, ps)
    result = executor.step(local_rows(case, ps, batch(case.packed, case.masked)), next_token_loss)
    gradients = whole_gradients(shard)
    return gradients, result.loss.item(), norm(shard, result.num_tokens), result.num_tokens.item()


@cache
def _one_process(tied, style, packed, masked):
    ps = ParallelState.single("cpu")
    model = GPTModel(
        config(style), spec(style), VOCAB, S, share_embeddings_and_output_weights=tied, parallel=ps, seed=SEED
    )
    data = batch(packed, masked)
    begin = data.pop("document_begin", None)
    mask = None if begin is None else visible_mask(begin)
    loss = model(data["tokens"], data.get("position_ids"), mask, labels=data["labels"]).sum()
    loss.backward()
    tokens = (data["labels"] != -100).sum()
    gradients = {n: true_part(p.grad, layout_of(p), {}, {}) for n, p in model.named_parameters()}
    squares = torch.stack([g.square().sum() for g in gradients.values()])
    return gradients, (loss / tokens).item(), (squares.sum().sqrt() / tokens).item(), tokens.item()


def one_process(case):
    """The same in one process, in plain autograd and with a bool mask: no executor, no region, no block."""
    return _one_process(case.tied, case.style, case.packed, case.masked)


def differences(found, want):
    """What differs, as text; empty: nothing."""
    told = []
    if found[0].keys() != want[0].keys():
        told.append(f"names {found[0].keys() ^ want[0].keys()}")
    for name in found[0].keys() & want[0].keys():
        scale = want[0][name].abs().max().item()
        error = (found[0][name] - want[0][name]).abs().max().item()
        if not error <= 1e-10 * scale:
            told.append(f"{name}: error {error:.2e} of {scale:.2e}")
    for what, a, b in zip(("loss", "norm", "tokens"), found[1:], want[1:], strict=True):
        if not abs(a - b) <= 1e-10 * abs(b):
            told.append(f"{what} {a} != {b}")
    return told


def compare(cases):
    """case -> what differs, of each of these cases that does."""
    wrong = {}
    for case in cases:
        if told := differences(step(case), one_process(case)):
            wrong[case] = told
    return wrong


def variants(base, **choices):
    """`base` with each combination of choices in turn."""
    found = [base]
    for name, values in choices.items():
        found = [replace(case, **{name: value}) for case in found for value in values]
    return found
