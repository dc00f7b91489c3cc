"""The division of a model into stages, the placeholders of layers of other stages, and errors of steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks
from weft.strategy.pipeline import Pipeline, Schedule
from weft.strategy.pipeline.stages import ANY_STAGE, find_layers

ARGS = LlamaArgs(n_layers=3)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_layers_follow_registration_order():
    layers = find_layers(Llama(ARGS), ["layers.1", "norm"])
    assert layers.num_stages == 3 and layers.trunk == ("", "layers")
    assert layers.stage_of == {
        "tok_embeddings": 0,
        "layers.0": 0,
        "layers.1": 1,
        "layers.2": 1,
        "norm": 2,
        "output": 2,
    }
    moved = find_layers(Llama(ARGS), ["layers.1", "output"], {"norm": 2})
    assert (layers.stage_of["norm"], moved.stage_of["norm"], moved.stage_of["output"]) == (2, 2, 2)


def test_layers_without_parameters_have_any_stage_unless_cut():
    assert find_layers(chain(), ["2"]).stage_of == {"0": 0, "1": ANY_STAGE, "2": 1, "3": ANY_STAGE, "4": 1}
    assert find_layers(chain(), ["1"]).stage_of == {"0": 0, "1": 1, "2": 1, "3": ANY_STAGE, "4": 1}


def test_module_lists_are_no_layers():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
            self.offset = nn.Parameter(torch.zeros(()))

    layers = find_layers(Heads(), ["heads.b"])
    assert layers.stage_of == {"body": 0, "heads.a": 0, "heads.b": 1} and layers.parameter_stages == {"offset": 0}
    assert find_layers(Heads(), ["heads.b"], {"offset": 1}).parameter_stages == {"offset": 1}


@pytest.mark.parametrize(
    ("cuts", "layer_stages", "message"),
    [
        (
            ["layers.9"],
            None,
            "stage 1 is to begin at 'layers.9', which is not a module of the model; the nearest name is 'l",
        ),
        (
            ["layer.2"],
            None,
            "stage 1 is to begin at 'layer.2', which is not a module of the model; the nearest name is 'layers.2'",
        ),
        (["?"], None, "which is not a module of the model; use one of its names, such as 'tok_embeddings', 'layers'"),
        ([""], None, "stage 1 is to begin at ''"),
        (["norm", "norm"], None, "two stages are to begin at 'norm'"),
        (["norm", "layers.1"], None, "are not in the order in which the model has these modules"),
        (["tok_embeddings"], None, "stage 0, from the model's beginning on, would have no parameters"),
        (["norm"], {"layers.0": 2}, "layer_stages puts 'layers.0' on stage 2"),
        (["norm"], {"layers.0.attention": 1}, "layer_stages puts 'layers.0.attention' on stage 1"),
    ],
)
def test_invalid_cuts_raise(cuts, layer_stages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        find_layers(Llama(ARGS), cuts, layer_stages)


@on_ranks(2)
def test_absent_parameters_raise_with_stage(rank: int, world_size: int) -> None:
    model = Llama(ARGS)
    expected = dict(model.named_parameters())
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["layers.1"])
    names = {name for name, _ in model.named_parameters()}
    first = {name for name in expected if name.startswith(("tok_embeddings", "layers.0"))}
    assert names == (first if rank == 0 else set(expected) - first) == set(model.state_dict())
    assert pipeline.stages == (rank,) and pipeline.has_last_stage == (rank == 1) and pipeline.model is model
    absent, attribute = (model.output, "weight") if rank == 0 else (model.tok_embeddings, "weight")
    with pytest.raises(AttributeError, match=f"is on stage {1 - rank}, and its 'weight' was read"):
        getattr(absent, attribute)
    assert not hasattr(absent, "weight") and not hasattr(absent, "no_such_attribute")
    assert (model.output.in_features, model.tok_embeddings.embedding_dim, len(model.layers)) == (16, 16, 3)
    with pytest.raises(RuntimeError, match=r"it was called outside of the model's forward .*; call the full model"):
        absent(torch.zeros(1, 16))
    assert f"of stage {1 - rank}" in repr(model)


@on_ranks(2)
def test_results_follow_batch_order(world_size: int) -> None:
    model = chain()
    schedule = Schedule.parse("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n")
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["2"], schedule=schedule)
    x = torch.arange(16.0).reshape(4, 4)
    outputs = pipeline.evaluate(x, model)
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs), chain()(x).detach())


@on_ranks(2)
def test_custom_schedule_matches_one_device_on_short_batches(world_size: int) -> None:
    model, reference = chain().double(), chain().double()
    schedule = Schedule.parse("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n")
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["2"], schedule=schedule)
    for num_samples in (6, 2, 1):
        x = torch.arange(4.0 * num_samples, dtype=torch.float64).reshape(num_samples, 4)
        loss = pipeline.step(x, lambda x: model(x).square().mean())
        expected_loss = reference(x).square().mean()
        expected_loss.backward()
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
        assert len(pipeline.trace) == 2 * min(3, num_samples)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="for 2 ranks and 3 micro-batches, and the pipeline has 2 ranks and 4"):
        pipeline.schedule(4)


@on_ranks(2)
def test_custom_split_and_weights_match_one_device(world_size: int) -> None:
    """The weights are counts of targets. The last micro-batch has no target: its mean is nan, and its weight zero."""
    model, reference = chain().double(), chain().double()
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), ["2"], num_micro_batches=3)
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, -100, -100, -100])

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def split(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, Tensor]]:
        assert count == 3
        return [(batch[0][i : i + 2], batch[1][i : i + 2]) for i in (0, 2, 4)]

    loss = pipeline.step(
        (x, y),
        lambda micro_batch: loss_of(model, micro_batch),
        split=split,
        weight=lambda micro_batch: int((micro_batch[1] >= 0).sum()),
    )
    expected_loss = loss_of(reference, (x, y))
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_micro_batch_shares_set_sizes(world_size: int) -> None:
    """A batch with too few samples for the shares has one sample per micro-batch."""
    model, reference = chain().double(), chain().double()
    mesh = init_device_mesh("cpu", (world_size,))
    pipeline = Pipeline(model, mesh, ["2"], schedule="zero_bubble", micro_batch_shares=[1, 2.0, 1])
    assert pipeline.num_micro_batches == 3
    sizes: list[int] = []

    def loss_of(x: Tensor) -> Tensor:
        if pipeline.runs_last_stage:
            sizes.append(len(x))
        return model(x).square().mean()

    expected = dict(reference.named_parameters())
    for num_samples, expected_sizes in ((8, [2, 4, 2]), (9, [2, 5, 2]), (3, [1, 1, 1]), (2, [1, 1])):
        x = torch.randn(num_samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        sizes.clear()
        loss = pipeline.step(x, loss_of)
        assert sizes == (expected_sizes if pipeline.has_last_stage else [])
        expected_loss = reference(x).square().mean()
        expected_loss.backward()
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-10, atol=1e-12)
    pipeline.num_micro_batches = 2
    assert [len(micro_batch) for micro_batch in pipeline.split(torch.ones(8, 4))] == [4, 4]
    pipeline.micro_batch_shares = [3, 1]
    assert pipeline.micro_batch_shares == (3, 1) and pipeline.num_micro_batches == 2
    assert [len(micro_batch) for micro_batch in pipeline.split(torch.ones(8, 4))] == [6, 2]


@on_ranks(2)
def test_second_pipeline_of_model_raises(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = chain()
    Pipeline(model, mesh, ["2"])
    with pytest.raises(ValueError, match="is in stages already"):
        Pipeline(model, mesh, ["2"])
    with pytest.raises(TypeError, match="the cuts are the text '2'; pass a list of names, or 'auto'"):
        Pipeline(chain(), mesh, "2")
    shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shared.append(shared[0])
    with pytest.raises(ValueError, match="'0' and '2' are one module, on the stages 0 and 1; give each a module"):
        Pipeline(shared, mesh, ["1"])


STEPS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], type[Exception], str]] = {
    "twice": (lambda model, x: model(model(x)).sum(), RuntimeError, "calls the model in stages twice"),
    "never": (lambda model, x: x.sum(), RuntimeError, "called the model in stages 0 times"),
    "vector": (lambda model, x: model(x), TypeError, "the step returned a Tensor as loss; return a tensor of"),
}


@on_ranks(1)
@pytest.mark.parametrize("step", STEPS)
def test_invalid_steps_raise(world_size: int, step: str) -> None:
    model = chain()
    pipeline = Pipeline(model, init_device_mesh("cpu", (world_size,)), [], num_micro_batches=2)
    function, error, message = STEPS[step]
    with pytest.raises(error, match=re.escape(message)):
        pipeline.step(torch.ones(4, 4), lambda x: function(model, x))


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("cuts", (["2"], ["4"]), r"rank 0 got the cuts ['2'] and rank 1 ['4']; choose them on one rank and broad"),
        ("schedule", ("gpipe", "1f1b"), "rank 0 got the schedule 'gpipe' and rank 1 '1f1b'"),
        ("num_micro_batches", (1, 2), "rank 0 got the micro_batch_shares (1.0,) and rank 1 (1.0, 1.0)"),
    ],
)
def test_different_arguments_on_ranks_raise(
    rank: int, world_size: int, name: str, values: tuple[Any, Any], message: str
) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(ValueError, match=re.escape(message)):
        Pipeline(chain(), mesh, **{"cuts": ["2"], name: values[rank]})


@on_ranks(2)
def test_invalid_arguments_raise(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(ValueError, match="2 cuts make 3 stages for 2 ranks; pass cuts for 2 stages or a multiple"):
        Pipeline(chain(), mesh, ["2", "4"])
    with pytest.raises(ValueError, match="num_micro_batches is 0"):
        Pipeline(chain(), mesh, ["2"], num_micro_batches=0)
    with pytest.raises(ValueError, match="num_micro_batches=2 and micro_batch_shares="):
        Pipeline(chain(), mesh, ["2"], num_micro_batches=2, micro_batch_shares=[1, 2])
    for shares in ([], [1, 0], [1, float("nan")], [1, "b"], 3, [10**400]):
        with pytest.raises(ValueError, match=r"micro_batch_shares is .*; pass numbers above 0, such as \[1, 2, 1\]"):
            Pipeline(chain(), mesh, ["2"], micro_batch_shares=shares)
    with pytest.raises(
        ValueError, match="the schedule is for 2 ranks and 2 micro-batches, and the pipeline has 2 ranks and 3"
    ):
        Pipeline(chain(), mesh, ["2"], schedule=Schedule.generate("gpipe", 2, 2), micro_batch_shares=[1, 2, 1])
    with pytest.raises(ValueError, match="unknown schedule '2f2b'"):
        Pipeline(chain(), mesh, ["2"], schedule="2f2b")
    with pytest.raises(
        ValueError, match="the schedule is for 4 ranks and 2 micro-batches, and the pipeline has 2 ranks and 2"
    ):
        Pipeline(chain(), mesh, ["2"], schedule=Schedule.generate("gpipe", 4, 2))
    with pytest.raises(ValueError, match="the schedule has 4 stages and the cuts make 2"):
        Pipeline(chain(), mesh, ["2"], schedule=Schedule.generate("looped_bfs", 2, 2, 2))
    model = chain()
    pipeline = Pipeline(model, mesh, ["2"], schedule=Schedule.generate("gpipe", 2, 2))
    with pytest.raises(ValueError, match=r"the micro-batches weigh \[0.0, 0.0\]"):
        pipeline.step(torch.ones(4, 4), lambda x: model(x).sum(), weight=lambda _: 0)
    with pytest.raises(RuntimeError, match="was called outside of a pipeline's step"):
        model(torch.ones(4, 4))
    with torch.no_grad(), pytest.raises(RuntimeError, match="use evaluate, or enable them"):
        pipeline.step(torch.ones(4, 4), lambda x: model(x).sum())
