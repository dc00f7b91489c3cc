"""A model's own forward on its stages: data-dependent paths, writes in place, and values that cross boundaries."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline


class Branching(nn.Module):
    """Its path depends on values or on random numbers, or it calls layers in another order."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.a, self.b, self.path = nn.Linear(4, 4), nn.Linear(4, 4), path

    def forward(self, x: Tensor) -> Tensor:
        if (self.path == "input" and x.sum() > 0) or (self.path == "chance" and torch.rand(()) > 0.5):
            x = x * 2
        if self.path == "order":
            return self.a(self.b(x))
        y = self.a(x)
        if self.path == "layer" and y.sum() > 0:
            y = y * 2
        if self.path == "again":
            y = self.a(self.b(y))
        return self.b(y)


class CountingTrunk(nn.Module):
    """Counts its calls in a buffer, and scales the first layer's output if `is_scaled`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.is_scaled = nn.Linear(4, 4), nn.Linear(4, 4), False
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.a(x)
        if self.is_scaled:
            y = y * 2
        return self.b(y)


@on_ranks(2)
def test_recordings_keep_buffers_and_follow_flags(rank: int, world_size: int) -> None:
    """Recording a forward leaves buffers unchanged, and a flag that is set later leads to another recording."""
    torch.manual_seed(0)
    model = CountingTrunk()
    reference = copy.deepcopy(model)
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=2)
    x, calls = torch.randn(4, 4), 0
    for is_scaled in (False, True, False):
        model.is_scaled = reference.is_scaled = is_scaled
        loss = pipeline.step(x, lambda micro_batch: model(micro_batch).square().mean())
        calls += 2
        assert model.calls.item() == calls
        assert loss.item() == pytest.approx(reference(x).square().mean().item(), rel=1e-6)
    assert len(pipeline._recordings) == 2


@on_ranks(2)
def test_only_values_of_later_stages_cross(world_size: int) -> None:
    """Four stages: each boundary has the output of the layer before it, and none of earlier layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    mesh = init_device_mesh("cpu", (world_size,))
    pipeline = Pipeline(model, mesh, ["2", "4", "6"], schedule="interleaved", num_micro_batches=2)
    pipeline.step(torch.randn(4, 4), lambda x: model(x).sum())
    [[recording]] = pipeline._recordings.values()
    outputs = {event.name: recording.idx_of(event.output) for event in recording.events}
    assert recording.crossings == [[outputs[last]] for last in ("1", "3", "5")]


@on_ranks(2)
@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("layer", ValueError, "__bool__ between the layers reads values that layers compute, or makes a shape depend"),
        (
            "width",
            ValueError,
            "the layer 'a' raised RuntimeError (a and b must have same reduction dim",
        ),
        (
            "order",
            ValueError,
            "pass pipeline_cuts='auto' with an example of the inputs (to a Pipeline: layer_stages={'a': 1})",
        ),
        ("again", ValueError, "move the cuts, or give each stage its own module"),
    ],
)
def test_unrecordable_forwards_raise(world_size: int, path: str, error: type[Exception], message: str) -> None:
    """Every rank raises, before anything is sent."""
    model = Branching(path)
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=2)
    with pytest.raises(error, match=re.escape(message)):
        pipeline.step(torch.ones(4, 5 if path == "width" else 4), lambda x: model(x).sum())


@on_ranks(2)
def test_paths_by_input_values_match_one_device(world_size: int) -> None:
    """Micro-batches of the same shapes take two paths, in one step and from step to step."""
    torch.manual_seed(0)
    model, reference = Branching("input").double(), Branching("input").double()
    reference.load_state_dict(model.state_dict())
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=2)
    for signs in ((1, 1), (-1, 1), (1, -1), (-1, -1)):
        batch = torch.cat([sign * torch.ones(2, 4, dtype=torch.float64) for sign in signs])
        loss = pipeline.step(batch, lambda x: model(x).square().mean())
        losses = torch.stack([reference(x).square().mean() for x in batch.chunk(2)])
        losses.mean().backward()
        torch.testing.assert_close(loss, losses.mean().detach(), rtol=1e-12, atol=1e-12)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12)


@on_ranks(1)
def test_random_path_raises(world_size: int) -> None:
    model = Branching("chance")
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), [], num_micro_batches=2)
    with pytest.raises(RuntimeError, match="do not let random numbers choose the model's path"):
        for _ in range(20):
            pipeline.step(torch.ones(4, 4), lambda x: model(x).sum())


class Between(nn.Module):
    """Two layers; `body` is the forward, with code between or around the layers."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def write_into_new_tensor(model: nn.Module, x: Tensor, write: Callable[[Tensor, Tensor], Any]) -> Tensor:
    buffer = torch.zeros(len(x), 4, dtype=x.dtype)
    write(buffer, model.a(x))
    return model.b(buffer)


def view_changed_before_boundary(model: nn.Module, x: Tensor) -> Tensor:
    h = model.a(x)
    view = h.view(-1, 2, 2)
    h = torch.tanh(model.b(h.relu_()))
    return h + view.flatten(1)


def view_changed_after_boundary(model: nn.Module, x: Tensor) -> Tensor:
    h = model.a(x)
    view = h.view(-1, 2, 2)
    y = model.b(h)
    h.mul_(2)
    return y + view.flatten(1)


def checkpoint_between_layers(model: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(model.b, model.a(x), use_reentrant=False)


WRITES = {
    "add_": lambda buffer, h: buffer.add_(h),
    "copy_": lambda buffer, h: buffer.copy_(h),
    "setitem": lambda buffer, h: buffer.__setitem__((slice(None), slice(0, 4)), h),
    "mask": lambda buffer, h: buffer.masked_fill_(h > 0, 1.0),
    "out": lambda buffer, h: torch.mul(h, 2, out=buffer),
    "iadd": lambda buffer, h: buffer.__iadd__(h),
}


@on_ranks(2)
@pytest.mark.parametrize("write", WRITES)
def test_writes_of_layer_values_raise(world_size: int, write: str) -> None:
    model = Between(lambda model, x: write_into_new_tensor(model, x, WRITES[write]))
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=2)
    with pytest.raises(
        ValueError, match="writes a value that layers compute into a tensor that was made between the layers"
    ):
        pipeline.step(torch.ones(4, 4), lambda x: model(x).sum())


@on_ranks(2)
def test_views_changed_after_boundary_raise(world_size: int) -> None:
    """A change before the boundary is correct; a change after it, which its views would miss, raises ValueError."""
    torch.manual_seed(0)
    model = Between(view_changed_before_boundary).double()
    reference = Between(view_changed_before_boundary).double()
    reference.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.randn(4, 4, dtype=torch.float64)
    loss = Pipeline(model, mesh, ["b"], num_micro_batches=2).step(x, lambda x: model(x).square().mean())
    torch.testing.assert_close(loss, reference(x).square().mean().detach(), rtol=1e-12, atol=0)
    changing = Between(view_changed_after_boundary)
    with pytest.raises(
        ValueError, match="a view of it cross to stage 1 as separate tensors, and one of them is changed in place"
    ):
        Pipeline(changing, mesh, ["b"], num_micro_batches=2).step(x.float(), lambda x: changing(x).sum())


@on_ranks(1)
def test_checkpoints_between_layers_raise(world_size: int) -> None:
    """Two stages on one rank: the second one's recomputation would get a placeholder instead of a value."""
    model = Between(checkpoint_between_layers)
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], schedule="gpipe", num_micro_batches=1)
    with pytest.raises(RuntimeError, match="was called outside of the forward"):
        pipeline.step(torch.ones(4, 4), lambda x: model(x).sum())
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        pipeline.step(torch.ones(4, 4), lambda x: model(x).sum())


@on_ranks(2)
def test_isinstance_sees_class_of_absent_layers(world_size: int) -> None:
    """In a forward, isinstance sees the original class of a layer that is on another stage."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = x
        for layer in (model.a, model.b):
            h = layer(h).t() if isinstance(layer, nn.Linear) else h
        return h.t().contiguous().view(-1)

    torch.manual_seed(0)
    model, reference = Between(forward).double(), Between(forward).double()
    reference.load_state_dict(model.state_dict())
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=1)
    absent = model.b if pipeline.stages == (0,) else model.a
    assert not isinstance(absent, nn.Linear)
    x = torch.randn(4, 4, dtype=torch.float64)
    loss = pipeline.step(x, lambda x: model(x).square().mean())
    torch.testing.assert_close(loss, reference(x).square().mean().detach(), rtol=1e-12, atol=0)


@on_ranks(2)
def test_boundary_values_keep_strides(world_size: int) -> None:
    """The view after the boundary needs dense memory, as in the unsplit model."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = model.a(x).t()
        return model.b(h) + h.t().view(-1).view(4, 4)

    torch.manual_seed(0)
    model, reference = Between(forward).double(), Between(forward).double()
    reference.load_state_dict(model.state_dict())
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"], num_micro_batches=1)
    x = torch.randn(4, 4, dtype=torch.float64)
    loss = pipeline.step(x, lambda x: model(x).square().mean())
    torch.testing.assert_close(loss, reference(x).square().mean().detach(), rtol=1e-12, atol=0)


class Counting(nn.Module):
    """Returns its buffer, which it changes at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        return x * self.scale, self.count


@on_ranks(1, 2)
def test_buffer_crosses_with_value_at_call(world_size: int) -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h, count = model.a(x)
        return model.b(h) * count

    model = Between(forward).double()
    model.a = Counting()
    mesh = init_device_mesh("cpu", (world_size,))
    pipeline = Pipeline(model, mesh, ["b"], schedule="looped_bfs" if world_size == 1 else "gpipe", num_micro_batches=3)
    seen = []

    def loss_of(x: Tensor) -> Tensor:
        loss = model(x).mean()
        seen.append(loss.item())
        return loss

    pipeline.step(torch.ones(3, 4, dtype=torch.float64), loss_of)
    if pipeline.has_last_stage:
        assert seen == pytest.approx([seen[0], 2 * seen[0], 3 * seen[0]])


@on_ranks(1)
def test_number_of_recordings_is_bounded(world_size: int) -> None:
    """The code between the layers reads an input value that differs in every step."""
    model = Between(lambda model, x: model.b(model.a(x)) * float(x.sum()))
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["b"][:0], num_micro_batches=1)
    for step in range(40):
        pipeline.step(torch.full((2, 4), float(step)), lambda x: model(x).sum())
    [recordings] = pipeline._recordings.values()
    assert len(recordings) <= 16


class WithAuxiliary(nn.Module):
    """Returns one more tensor in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return (y, y.square()) if self.training else (y,)


class Inner(nn.Module):
    """A module of the trunk with dropout between its layers in training mode."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.a, self.b, self.p = WithAuxiliary(), nn.Linear(4, 4), p

    def forward(self, x: Tensor) -> Tensor:
        y, *more = self.a(x)
        return self.b(nn.functional.dropout(y + sum(more), self.p, self.training))


@on_ranks(2)
@pytest.mark.parametrize(("frozen", "p"), [("inner", 0.5), ("inner.a", 0.0)])
def test_mode_changes_of_submodules_take_effect(world_size: int, frozen: str, p: float) -> None:
    """A submodule changes to eval mode between steps, while the others stay in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("inner", Inner(p))
    model.add_module("head", nn.Linear(4, 4))
    model.double()
    reference = copy.deepcopy(model)
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["inner.b"], num_micro_batches=2)
    x = torch.randn(4, 4, dtype=torch.float64)
    pipeline.step(x, lambda x: model(x).square().mean())
    for each in (model, reference):
        each.get_submodule(frozen).eval()
    loss = pipeline.step(x, lambda x: model(x).square().mean())
    torch.testing.assert_close(loss, reference(x).square().mean().detach(), rtol=1e-12, atol=0)
    model.train()
    assert pipeline.step(x, lambda x: model(x).square().mean()) != loss


@on_ranks(2)
def test_encoder_matches_its_fast_path(world_size: int) -> None:
    """torch's encoder has a fast path for padded inputs without gradients, which fake tensors never take."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 4).eval()
    x = torch.randn(4, 4, 8)
    is_padding = torch.arange(4) >= torch.tensor([4, 3, 2, 1])[:, None]
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=is_padding)
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["layers.2"], num_micro_batches=2)
    outputs = pipeline.evaluate(
        (x, is_padding), lambda micro_batch: model(micro_batch[0], src_key_padding_mask=micro_batch[1])
    )
    assert torch.backends.mha.get_fastpath_enabled()
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs)[~is_padding], expected[~is_padding])
