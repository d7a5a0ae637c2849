"""A data-parallel shard in one process: flat tensors cut as over `ranks` ranks, of which it is one."""

from types import SimpleNamespace

import torch

from core.data_parallel.agreement import Agreement
from core.parallel_state import ParallelState
from core.parallel_state.layout import layout_of
from core.parallel_state.modules import named_parameters

ALIGN = 64


class FakeShard:
    """One buffer per entry of `buckets` (lists of names; by default one of all parameters of a dtype)."""

    def __init__(self, module, *, zero_stage=0, ranks=1, rank=0, buckets=None, grad_dtype=None, ps=None):
        self.ps = ps or ParallelState.single("cpu")
        self.module, self.zero_stage = module, zero_stage
        self.finished = self.used = self.is_removed = False
        self.missing, self.copies = [], SimpleNamespace(send=lambda: None)
        self._names = {name: p for name, p in named_parameters(module) if p.requires_grad}
        if buckets is None:
            dtypes = dict.fromkeys(p.dtype for p in self._names.values())
            buckets = [[n for n, p in self._names.items() if p.dtype == dtype] for dtype in dtypes]
        self.published = 0
        self.buffers = [self._buffer(names, ranks, rank, grad_dtype) for names in buckets]
        self.agreement = Agreement(self.ps, self.buffers, len(self._names))

    def _buffer(self, names, ranks, rank, grad_dtype):
        parameters = [self._names[name] for name in names]
        size = -(-sum(p.numel() for p in parameters) // (ranks * ALIGN)) * ranks * ALIGN
        dtype = parameters[0].dtype
        flat = torch.zeros(size, dtype=dtype, device=self.ps.device)
        gradients = torch.zeros(
            size, dtype=grad_dtype or (torch.float32 if dtype.itemsize < 4 else dtype), device=self.ps.device
        )
        own = (rank * size // ranks, (rank + 1) * size // ranks)
        held = own if self.zero_stage else (0, size)
        segments, slots, at = [], [], 0
        for name, p in zip(names, parameters, strict=True):
            start, at = at, at + p.numel()
            slots.append(SimpleNamespace(name=name, start=start, stop=at))
            flat[start:at].copy_(p.detach().view(-1))
            p.data = flat[start:at].view(p.shape)
            p.main_grad = gradients[start:at].view(p.shape)
            first, last = max(start, held[0]), min(at, held[1])
            if first < last:
                segments.append(
                    SimpleNamespace(
                        name=name,
                        parameter=p,
                        interval=(first - start, last - start),
                        span=(first - held[0], last - held[0]),
                    )
                )
        counted = [
            (max(s.span[0], own[0] - held[0]), min(s.span[1], own[1] - held[0]))
            for s in segments
            if layout_of(s.parameter).owned_by(self.ps.coordinate)
        ]
        return SimpleNamespace(
            bucket=SimpleNamespace(slots=slots, size=size),
            parameters=parameters,
            ranks=None,
            stage=self.zero_stage,
            updated_interval=held,
            weights=flat[slice(*held)],
            gradients=gradients[slice(*held)],
            segments=tuple(segments),
            counted=[(a, b) for a, b in counted if a < b],
            whole=gradients,
            written=False,
            whole_for_program=False,
            unsharded=False,
            end_loan=lambda: None,
            free=lambda: None,
        )

    def finish(self):
        assert not self.finished
        self.finished = True

    def take_weights(self):
        pass

    def take_gradients(self):
        return torch.zeros((), dtype=torch.float64)

    @property
    def replicas(self):
        return self.ps.size("dp-cp")

    default_divisor = replicas

    def stepped(self):
        self.used = True

    def zero_grad(self, set_to_none=True):
        for buffer in self.buffers:
            buffer.whole.zero_()
        self.finished = self.used = self.is_removed = False

    def named_parameters(self):
        return self._names

    def publish(self):
        self.published += 1

    def wait(self):
        pass
