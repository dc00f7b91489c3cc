"""Stages cut over tensor-parallel ranks, replicated over data-parallel ranks, and both, against one device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from support.models import Llama, LlamaArgs, token_batches
from support.parity import assert_close
from support.ranks import on_ranks
from weft.strategy import checkpoint_activations, deferred_init
from weft.strategy.data_parallel import GradientReducer
from weft.strategy.pipeline import SCHEDULES, Pipeline

TOLERANCE = 1e-10
NUM_STEPS = 5
NAMES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
PLAN = {
    "tok_embeddings": "vocab_embedding",
    "layers.*.attention.wq": {"style": "column", "heads": "n_heads"},
    "layers.*.attention.wk": {"style": "column", "heads": "n_kv_heads"},
    "layers.*.attention.wv": {"style": "column", "heads": "n_kv_heads"},
    "layers.*.attention.wo": "row",
    "layers.*.feed_forward": "column_row_mlp",
    "output": "column_gather_output",
}
# As many batches as steps: four sequences of nine tokens, of which each data-parallel rank gets its part.
BATCHES = token_batches(NUM_STEPS, 37)


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def assert_trains_as_one_device(
    world_size: int, data_size: int, tensor_size: int, kind: str, plan: object, tie_head: bool, num_micro_batches: int
) -> None:
    num_ranks = world_size // (data_size * tensor_size)
    stages_per_rank = 2 if kind in ("interleaved", "looped_bfs") else 1
    mesh = init_device_mesh("cpu", (num_ranks, data_size, tensor_size), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=4, tie_head=tie_head, dtype=torch.float64))
    model = copy.deepcopy(reference)
    num_stages = num_ranks * stages_per_rank
    cuts = [f"layers.{4 // num_stages * stage}" for stage in range(1, num_stages)]
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=num_micro_batches)
    weft.parallelize(model, mesh, plan)
    reducer = GradientReducer(model, mesh["data_parallel"].get_group())
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = dict(reference.named_parameters(remove_duplicate=False))
    least = TOLERANCE * 1e-3
    for batch in BATCHES:
        ours.zero_grad()
        theirs.zero_grad()
        data_rank = mesh["data_parallel"].get_local_rank()
        part = tuple(tensor.chunk(data_size)[data_rank] for tensor in batch)
        with reducer.paused():
            loss = pipeline.step(part, lambda micro_batch: next_token(model, micro_batch))
        reducer.finish()
        own = next_token(reference, part)
        assert abs(loss - own) <= TOLERANCE * own
        next_token(reference, batch).backward()
        for name, parameter in model.named_parameters():
            assert (tensor_size > 1) <= isinstance(parameter, DTensor)
            gradient = expected[name].grad
            assert_close(name, parameter.grad, gradient, TOLERANCE * gradient.norm().item() + least)
        ours.step()
        theirs.step()
    for name, parameter in model.named_parameters():
        assert_close(name, parameter, expected[name], TOLERANCE * expected[name].norm().item())


@on_ranks(4)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 2), (2, 1)])
def test_every_schedule_on_four_ranks(world_size: int, data_size: int, tensor_size: int, kind: str) -> None:
    for num_micro_batches in (1, 2):
        assert_trains_as_one_device(world_size, data_size, tensor_size, kind, PLAN, False, num_micro_batches)


@on_ranks(8, timeout=300)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_on_eight_ranks(world_size: int, kind: str) -> None:
    assert_trains_as_one_device(world_size, 2, 2, kind, PLAN, False, 2)


@on_ranks(4)
@pytest.mark.parametrize("plan", ["auto", "dict"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_plans_and_tied_embeddings(world_size: int, plan: str, tie_head: bool) -> None:
    """The embedding's rows on the first stage and the output layer's on the last are cut alike where they are tied."""
    rules = "auto" if plan == "auto" else PLAN
    assert_trains_as_one_device(world_size, 1, 2, "1f1b", rules, tie_head, 2)


@on_ranks(4)
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_the_norm_of_all_stages(world_size: int, tensor_size: int, norm_type: float) -> None:
    """A tied weight counts once, and its copies stay equal."""
    mesh = init_device_mesh("cpu", (world_size // tensor_size, 1, tensor_size), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=4, tie_head=True, dtype=torch.float64))
    model = copy.deepcopy(reference)
    cuts = [f"layers.{4 // mesh.shape[0] * stage}" for stage in range(1, mesh.shape[0])]
    pipeline = Pipeline(model, mesh, cuts, num_micro_batches=2)
    weft.parallelize(model, mesh, PLAN)
    pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch))
    next_token(reference, BATCHES[0]).backward()
    norm = pipeline.clip_grad_norm(0.05, norm_type)
    whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    assert abs(norm - whole) <= TOLERANCE * whole and whole > 0.05
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, expected[name].grad, 1e-10)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("what", ["full", "selective"])
def test_activation_checkpoints(world_size: int, what: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=4, dtype=torch.float64))
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh, ["layers.2"], schedule=kind, num_micro_batches=4)
    names = checkpoint_activations(model, what)
    assert names == [f"layers.{2 * pipeline.stages[0] + i}" for i in range(2)]
    loss = pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch))
    whole = next_token(reference, BATCHES[0])
    whole.backward()
    assert abs(loss - whole) <= TOLERANCE * whole
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, expected[name].grad, TOLERANCE)


@on_ranks(4)
def test_checkpoints_are_those_of_the_whole_model(rank: int, world_size: int, tmp_path: Path) -> None:
    """Saved by torch.distributed.checkpoint in four stages, loaded in two and into the whole model."""
    args = LlamaArgs(n_layers=4, dtype=torch.float64)
    torch.manual_seed(0)
    model, reference = Llama(args), Llama(args)
    reference.load_state_dict(model.state_dict())
    Pipeline(model, init_device_mesh("cpu", (4,)), ["layers.1", "layers.2", "layers.3"])
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    dist.barrier()
    torch.manual_seed(1)
    other, whole = Llama(args), Llama(args)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "pipeline_parallel"))
    Pipeline(other, mesh, ["layers.2"])
    for loaded in (other, whole):
        state = {"model": loaded.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path)
        loaded.load_state_dict(state["model"])
    expected = dict(reference.named_parameters())
    for loaded in (other, whole):
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@on_ranks(2)
def test_models_without_values_get_those_of_the_whole_model(world_size: int) -> None:
    """Built deferred: each rank makes its layers' values alone, the same as those of a model built whole."""
    args = LlamaArgs(n_layers=4)
    torch.manual_seed(0)
    reference = dict(Llama(args).named_parameters())
    torch.manual_seed(0)
    with deferred_init():
        model = Llama(args)
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("pipeline_parallel", "tensor_parallel"))
    pipeline = Pipeline(model, mesh, ["layers.2"], num_micro_batches=2)
    weft.parallelize(model, mesh, PLAN)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), reference[name]), name
    assert torch.isfinite(pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch)))


@on_ranks(2)
def test_rules_of_other_stages_are_rules_still(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1, 1), mesh_dim_names=NAMES)
    model = Llama(LlamaArgs(n_layers=2))
    Pipeline(model, mesh, ["layers.1"])
    with pytest.raises(ValueError, match=r"layers\.\*\.attention\.wx"):
        weft.parallelize(model, mesh, {**PLAN, "layers.*.attention.wx": "row"})
    weft.parallelize(model, mesh, PLAN)
