"""A plain PyTorch Llama: the peer that torch's own tensor parallelism is applied to."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Shape:
    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    ffn: int = 1408
    seq: int = 256
    vocab: int = 8192


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


def rotate(x, cos, sin):  # [b, s, a, d]
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.d, self.grouped = c.hidden // c.heads, c.heads != c.kv_heads
        self.wq = nn.Linear(c.hidden, c.heads * self.d, bias=False)
        self.wk = nn.Linear(c.hidden, c.kv_heads * self.d, bias=False)
        self.wv = nn.Linear(c.hidden, c.kv_heads * self.d, bias=False)
        self.wo = nn.Linear(c.heads * self.d, c.hidden, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        b, s = q.shape[:2]
        q = rotate(q.view(b, s, -1, self.d), cos, sin).transpose(1, 2)
        k = rotate(k.view(b, s, -1, self.d), cos, sin).transpose(1, 2)
        v = v.view(b, s, -1, self.d).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.wo(o.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1 = nn.Linear(c.hidden, c.ffn, bias=False)
        self.w2 = nn.Linear(c.ffn, c.hidden, bias=False)
        self.w3 = nn.Linear(c.hidden, c.ffn, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(c.hidden), RMSNorm(c.hidden)
        self.attn, self.ffn = Attention(c), FeedForward(c)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens [b, s] -> logits [b, s, v]."""

    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.layers)})
        self.norm = RMSNorm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        d = c.hidden // c.heads
        angle = torch.outer(
            torch.arange(c.seq).double(), 10000.0 ** (-torch.arange(0, d, 2).double() / d)
        )
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos().float(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin().float(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


NAMES = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "layers.": "model.layers.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attn.w": ".self_attn.",
    ".ffn.w1": ".mlp.gate_proj",
    ".ffn.w2": ".mlp.down_proj",
    ".ffn.w3": ".mlp.up_proj",
}


def huggingface_names(state):
    """The weights under Hugging Face's names, which our model loads."""
    renamed = {}
    for name, tensor in state.items():
        new = "model." + name if name.startswith("norm.") else name
        for theirs, ours in NAMES.items():
            new = new.replace(theirs, ours)
        head, dot, kind = new.rpartition(".self_attn.")
        renamed[f"{head}{dot}{kind[0]}_proj.weight" if dot else new] = tensor
    return renamed


def tensor_parallel(model, mesh, *, sequence=False):
    """torch's tensor parallelism with its best plan (21 all-reduces a step at 4 layers, not 33)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    act = Shard(1) if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=act),
        "head": ColwiseParallel(
            input_layouts=act, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    layer = {
        **{
            name: ColwiseParallel()
            for name in ("attn.wq", "attn.wk", "attn.wv", "ffn.w1", "ffn.w3")
        },
        **{name: RowwiseParallel(output_layouts=act) for name in ("attn.wo", "ffn.w2")},
        "attn": PrepareModuleInput(
            input_layouts=(act, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "ffn": PrepareModuleInput(input_layouts=(act,), desired_input_layouts=(Replicate(),)),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
        layer |= {"attn_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        parallelize_module(block, mesh, layer)
    return model
