"""Activations that wait in host memory: the same gradients, what stays where it is, what is refused."""

import copy
import gc

import pytest
import torch
from torch import nn

from core.autograd import apply_recompute, offload_activations, recompute
from core.testing import live_bytes

N, H = 64, 32  # N x H float64 values are 16 KiB


class Layer(nn.Module):
    """Saves its input's product, and things that are no activations: a parameter's view, a buffer, a shared table."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(N, H))
        self.register_buffer("shift", torch.rand(N, H))
        self.linear = nn.Linear(H, H)

    def forward(self, x, table):
        y = torch.tanh(self.linear(x)) * self.scale.view(N, H) * table
        return x + (y * self.shift).sigmoid_()


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(4, H)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x, table):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, table)
        return x.square().sum()


def inputs():
    generator = torch.Generator().manual_seed(2)
    return torch.rand(N, 4, generator=generator), torch.rand(N, H, generator=generator)


def gradients(net):
    net.zero_grad()
    net(*inputs()).backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("policy", ["none", "layer", ["linear"]])
def test_gradients_are_the_same_bits_and_nothing_waits_afterwards(policy):
    want, net = gradients(Net()), Net()
    apply_recompute(net, policy)
    handle = offload_activations(net)
    assert handle.names == ["layers.0", "layers.1", "layers.2"]
    for _ in range(3):
        found = gradients(net)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert handle.host_bytes == 0
    loss = net(*inputs())
    assert handle.host_bytes > 0
    loss.backward(retain_graph=True)
    loss.backward()
    handle.remove()
    assert not net.layers[0].__dict__.get("forward") or policy != "none"
    net(*inputs())
    assert handle.host_bytes == 0


def test_what_lives_between_forward_and_backward_falls_by_what_waits_on_the_host():
    """Counted: all tensors that a forward leaves behind, with and without; those on the host are no device memory."""

    def left_behind(net, handle=None):
        arguments = inputs()
        with live_bytes(ignore=[*arguments, *net.parameters(), *net.buffers()]) as probe:
            loss = net(*arguments)
            gc.collect()
            held, on_host = probe.live, handle.host_bytes if handle is not None else 0
            loss.backward()
        return held - on_host, on_host

    plain, _ = left_behind(Net())
    size = 8 * N * H
    assert plain >= 9 * size
    held = {}
    for fraction in (0.0, 1 / 3, 1.0):
        net = Net()
        handle = offload_activations(net, fraction)
        held[fraction], on_host = left_behind(net, handle)
        count = round(3 * fraction)
        assert len(handle.names) == count
        # the linear's input, tanh's result (saved twice), sigmoid's result: not scale, shift or table
        assert on_host == count * 3 * size
    assert held[0.0] == plain
    assert plain - held[1.0] == 9 * size and plain - held[1 / 3] == 3 * size


def test_parameters_buffers_and_shared_inputs_stay():
    net, moved = Net(1), []
    handle = offload_activations(net)
    loss = net(*inputs())
    moved = [stored.host for stored in handle._copies.stored]
    for fixed in (net.layers[0].scale, net.layers[0].shift, net.layers[0].linear.weight, inputs()[1]):
        assert not any(torch.equal(tensor, fixed) for tensor in moved if tensor.shape == fixed.shape)
    assert moved and all(tensor.nbytes >= 1024 for tensor in moved)
    loss.backward()


def test_strides_come_back_and_later_writes_do_not_reach_the_host():
    class Written(nn.Module):
        def forward(self, x):
            y = x.t().exp()  # saves its result, a transposed matrix
            z = y * 2
            with torch.no_grad():
                y.zero_()  # refused without offload: the saved result is overwritten
            return z

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Written()])

        def forward(self, x):
            return self.layers[0](x * 1).sum()

    net = Holder()
    handle = offload_activations(net)
    x = torch.rand(32, 16, requires_grad=True)
    loss = net(x)
    (stored,) = handle._copies.stored
    assert stored.host.stride() == (1, 16)
    loss.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp())


class Chain(nn.Module):
    """Each result's memory is free as soon as it waits on the host, and the next one gets it."""

    def forward(self, x):
        for _ in range(20):
            x = torch.tanh(x)
        return x


class Overwritten(nn.Module):
    """Two operations save one memory, between which it was written; without offload torch refuses its backward."""

    def forward(self, x):
        y = torch.sigmoid(x)
        return y.tanh_()


@pytest.mark.parametrize("layer", [Chain, Overwritten])
def test_memory_that_is_used_again_is_another_tensor(layer):
    found = []
    for module in (nn.Sequential(layer()), None):
        x = torch.randn(N, H, generator=torch.Generator().manual_seed(3), requires_grad=True)
        if module is not None:
            handle = offload_activations(nn.ModuleDict({"layers": module}))
            y = module(x * 1)
            assert len(handle._copies.stored) == (20 if layer is Chain else 2)
        elif layer is Chain:
            y = layer()(x * 1)
        else:
            y = torch.tanh(torch.sigmoid(x * 1))
        y.sum().backward()
        found.append(x.grad)
        del y
    assert torch.equal(*found)


def test_a_second_run_moves_nothing():
    """Its activations are used at once."""
    net, moved = Net(), []
    handle = offload_activations(net)
    store = handle._copies.store
    handle._copies.store = lambda tensor: moved.append(tensor) or store(tensor)
    want = gradients(net)
    assert moved
    del moved[:]
    net.zero_grad()
    recompute(net, *inputs(), parameters=net.parameters()).backward()
    assert not moved and all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), want, strict=True))


def test_no_graph_moves_nothing_and_a_copy_of_the_model_has_its_own():
    net = Net()
    handle = offload_activations(net)
    with torch.no_grad():
        net(*inputs())
    assert handle.host_bytes == 0
    other = copy.deepcopy(net)
    loss = other(*inputs())
    assert handle.host_bytes == 0, "the copy's own"
    loss.backward()
    for p, q in zip(gradients(net), gradients(other), strict=True):
        assert torch.equal(p, q)


def test_what_cannot_be_offloaded_is_refused():
    with pytest.raises(ValueError, match=r"fraction=1.5 must be between 0 .* and 1"):
        offload_activations(Net(), 1.5)
    with pytest.raises(ValueError, match=r"offload_activations: 'layer' matches no module"):
        offload_activations(nn.Linear(2, 2))
    net = Net()
    offload_activations(net, 0.5)
    with pytest.raises(ValueError, match=r"layers.0 is offloaded already; remove\(\) that first"):
        offload_activations(net)
    with pytest.raises(ValueError, match=r"layers.0: its activations are offloaded already.*after the policy"):
        apply_recompute(net, "layer")
    whole = nn.Sequential(Net())
    apply_recompute(whole, [Net])
    with pytest.raises(ValueError, match=r"0.layers.0 lies inside 0 that is recomputed as one"):
        offload_activations(whole)
    compiled = Net()
    compiled.layers[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"layers.0 is compiled, and of the tensors"):
        offload_activations(compiled)
