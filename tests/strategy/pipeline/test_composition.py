"""Stages with tensor-parallel shards, data-parallel replicas, or both, compared with one device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ops.collectives.profiled import collectives_of
from strategy.pipeline.test_pipeline_parity import V_SHAPED
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import weft
from support.extended import extended_unless
from support.models import Gpt2, Llama, LlamaArgs, token_batches
from support.parity import assert_close
from support.ranks import on_ranks
from weft.strategy import checkpoint_activations, deferred_init
from weft.strategy._plan import default_stages_per_rank
from weft.strategy.data_parallel import GradientReducer
from weft.strategy.pipeline import SCHEDULES, Pipeline

TOLERANCE = 1e-10
NUM_STEPS = 3  # the first step records the calls between stages; the second and third use the recording
ON_EIGHT_RANKS = ("interleaved", "zero_bubble", "v_half")
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
# One batch per step: four sequences of nine tokens, divided among the data-parallel ranks.
BATCHES = token_batches(NUM_STEPS, 37)


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def llama(tie_head: bool) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaArgs(n_layers=4, tie_head=tie_head, dtype=torch.float64))


def local_shard(batch: tuple[Tensor, Tensor], data_size: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return the sequences of a data-parallel rank."""
    tokens, targets = (tensor.chunk(data_size)[data_rank] for tensor in batch)
    return tokens, targets


@dataclasses.dataclass(frozen=True)
class Reference:
    """The training of one device: per step the loss of a data-parallel rank's sequences and the gradients of the full
    batch, and the final weights.
    """

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


@functools.cache
def train_on_one_device(tie_head: bool, data_size: int, data_rank: int) -> Reference:
    """Return the reference of all schedules: a rank computes it once for all cases that it runs."""
    model = llama(tie_head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for batch in BATCHES:
        optimizer.zero_grad()
        losses.append(next_token(model, local_shard(batch, data_size, data_rank)).detach())
        next_token(model, batch).backward()
        named = model.named_parameters(remove_duplicate=False)
        gradients.append({name: parameter.grad.clone() for name, parameter in named})
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return Reference(losses, gradients, weights)


def assert_matches_one_device(
    world_size: int,
    data_size: int,
    tensor_size: int,
    kind: str,
    plan: object,
    tie_head: bool,
    num_micro_batches: int,
    *,
    is_fully_sharded: bool = False,
) -> None:
    pipeline_size = world_size // (data_size * tensor_size)
    stages_per_rank = default_stages_per_rank(kind)
    mesh = init_device_mesh("cpu", (pipeline_size, data_size, tensor_size), mesh_dim_names=NAMES)
    model = llama(tie_head)
    num_stages = pipeline_size * stages_per_rank
    cuts = [f"layers.{4 // num_stages * stage}" for stage in range(1, num_stages)]
    pipeline = Pipeline(model, mesh, cuts, schedule=kind, num_micro_batches=num_micro_batches)
    weft.parallelize(model, mesh, plan)
    reducer = None
    if is_fully_sharded:
        pipeline.fully_shard(mesh["data_parallel"])
    else:
        reducer = GradientReducer(model, mesh["data_parallel"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_rank = mesh["data_parallel"].get_local_rank()
    expected = train_on_one_device(tie_head, data_size, data_rank)
    min_bound = TOLERANCE * 1e-3
    for batch, expected_loss, gradients in zip(BATCHES, expected.losses, expected.gradients, strict=True):
        optimizer.zero_grad()
        local_batch = local_shard(batch, data_size, data_rank)
        with contextlib.nullcontext() if reducer is None else reducer.paused():
            loss = pipeline.step(local_batch, lambda micro_batch: next_token(model, micro_batch))
        if reducer is not None:
            reducer.finish()
        assert abs(loss - expected_loss) <= TOLERANCE * expected_loss
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            gradient = gradients[name]
            ours_full = parameter.grad.full_tensor() if is_fully_sharded else parameter.grad
            assert_close(name, ours_full, gradient, TOLERANCE * gradient.norm().item() + min_bound)
        optimizer.step()
    for name, parameter in model.named_parameters():
        ours_full = parameter.full_tensor() if is_fully_sharded else parameter
        assert_close(name, ours_full, expected.weights[name], TOLERANCE * expected.weights[name].norm().item())


@on_ranks(4)
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 2), (2, 1)])
def test_every_schedule_matches_one_device_on_four_ranks(
    world_size: int, data_size: int, tensor_size: int, kind: str
) -> None:
    for num_micro_batches in (1, 2):
        assert_matches_one_device(world_size, data_size, tensor_size, kind, PLAN, False, num_micro_batches)


@on_ranks(8, timeout=300)
@pytest.mark.parametrize(
    "kind", extended_unless(lambda kind: kind in ("interleaved", "zero_bubble", "v_half"), SCHEDULES)
)
def test_every_schedule_matches_one_device_on_eight_ranks(world_size: int, kind: str) -> None:
    assert_matches_one_device(world_size, 2, 2, kind, PLAN, False, 2)


def _is_usual(tie_head: bool, kind: str) -> bool:
    return not tie_head or kind in ("1f1b", "interleaved", "zero_bubble", "zbv")


@on_ranks(4)
@pytest.mark.parametrize(("tie_head", "kind"), extended_unless(_is_usual, itertools.product((False, True), SCHEDULES)))
def test_fully_sharded_stages_match_one_device(world_size: int, tie_head: bool, kind: str) -> None:
    skip_without_finalize_backward()
    if tie_head and kind in V_SHAPED:  # the head is on the rank of the embedding
        with pytest.raises(ValueError, match="move the cuts, or use a schedule such as '1f1b', so that they are on"):
            assert_matches_one_device(world_size, 2, 1, kind, PLAN, True, 2, is_fully_sharded=True)
        return
    assert_matches_one_device(world_size, 2, 1, kind, PLAN, tie_head, 2, is_fully_sharded=True)


@on_ranks(8, timeout=300)
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble", "looped_bfs"])
def test_fully_sharded_tensor_parallel_stages_match_one_device(world_size: int, kind: str) -> None:
    skip_without_finalize_backward()
    assert_matches_one_device(world_size, 2, 2, kind, PLAN, True, 2, is_fully_sharded=True)


class ReadsEmbeddingWeight(nn.Module):
    """Reads its embedding's weight as a plain attribute, and uses it as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 6, dtype=torch.float64)
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.layer(self.embed(tokens)), self.embed.weight)


class WithOffset(nn.Module):
    """A parameter of the trunk (the modules that call the layers), and four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.offset
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(4)
def test_rank_reports_list_stages_and_bytes(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    model = Llama(LlamaArgs(n_layers=2, dtype=torch.float64))
    full_bytes = sum(parameter.nbytes for parameter in model.parameters())
    Pipeline(model, mesh, ["layers.1"], num_micro_batches=2)
    weft.parallelize(model, mesh, PLAN)
    reports = weft.strategy.rank_reports(model)
    assert reports.stages == ((0,), (0,), (1,), (1,))
    lines = [line.split() for line in str(reports).splitlines()]
    assert lines[0] == ["rank", "stages", "parameters", "bytes", "from", "to"] and len(lines) == 5
    assert [line[:2] + line[4:5] for line in lines[1:]] == [
        ["0", "0", "tok_embeddings.weight"],
        ["1", "0", "tok_embeddings.weight"],
        ["2", "1", "layers.1.attention.wq.weight"],
        ["3", "1", "layers.1.attention.wq.weight"],
    ]
    rank_bytes = [rank["total_bytes"] for rank in reports.to_dict()]
    replicated = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    totals = [torch.zeros((), dtype=torch.long) for _ in range(world_size)]
    dist.all_gather(totals, torch.tensor(replicated))
    # Norms are replicated on both tensor-parallel ranks of their stage.
    assert sum(rank_bytes) - sum(int(total) for total in totals[::2]) == full_bytes
    assert int(lines[1][3].replace(",", "")) == rank_bytes[0]


class WithScale(WithOffset):
    """Adds another parameter to the trunk; the second stage uses both parameters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x * self.scale)
        return y * self.scale + self.offset


@on_ranks(2)
def test_trunk_parameters_with_plan_match_one_device(world_size: int) -> None:
    """A plan makes trunk parameters DTensors; the forward reads plain tensors, which cross to other stages."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline_parallel", "tensor_parallel"))
    torch.manual_seed(0)
    reference = WithScale().double()
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh, ["layers.2"], num_micro_batches=2)
    weft.parallelize(model, mesh, {})
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    batch = torch.randn(4, 4, dtype=torch.float64)
    for _ in range(2):
        loss = pipeline.step(batch, lambda x: model(x).square().mean())
        expected_loss = reference(batch).square().mean()
        expected_loss.backward()
    assert abs(loss - expected_loss) <= TOLERANCE * abs(expected_loss)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad.full_tensor(), expected[name].grad, TOLERANCE)
    outputs = pipeline.evaluate(batch, model)
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs), reference(batch).detach())


@on_ranks(8)
def test_hybrid_sharded_stages_gather_and_reduce_once(world_size: int) -> None:
    """Each layer is gathered once and reduced once per step, for any number of micro-batches."""
    skip_without_finalize_backward()
    names = ("pipeline_parallel", "data_replicate", "data_parallel")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    torch.manual_seed(0)
    reference = WithOffset().double()
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh, ["layers.2"], num_micro_batches=4)
    pipeline.fully_shard(mesh["data_replicate", "data_parallel"])
    with pytest.raises(ValueError, match="fully_shard was applied to this model already"):
        pipeline.fully_shard(mesh["data_replicate", "data_parallel"])
    batch = torch.randn(16, 4, dtype=torch.float64)
    data_rank = 2 * mesh["data_replicate"].get_local_rank() + mesh["data_parallel"].get_local_rank()
    # The gradient of the offset, unsharded on the first stage's ranks, is averaged over both axes.
    averaged = 2 if pipeline.stages == (0,) else 0
    messages = {"send": 2 * 4, "recv": 2 * 4}  # a header and its tensor, for each micro-batch
    sums = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 2 + averaged}
    local_batch = batch.chunk(4)[data_rank]
    loss = collectives_of(
        lambda: pipeline.step(local_batch, lambda x: model(x).square().mean()), {**sums, **messages, "broadcast": 1}
    )
    reference(batch).square().mean().backward()
    assert torch.isfinite(loss)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        assert_close(name, gradient, expected[name].grad, TOLERANCE)
    outputs = pipeline.evaluate(batch, model)
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs), reference(batch).detach())


@on_ranks(4)
def test_sharded_weights_between_layers_are_sent(world_size: int) -> None:
    """The sent weights have the gathered stage's values, although the stage is freed before the send completes."""
    skip_without_finalize_backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline_parallel", "data_parallel"))
    torch.manual_seed(0)
    gpt2 = Gpt2(n_layer=2, dtype=torch.float64)
    pipeline = Pipeline(gpt2, mesh, ["h.1"], num_micro_batches=2)
    pipeline.fully_shard(mesh["data_parallel"])
    with pytest.raises(ValueError, match="reads the parameters of 'wpe' and never calls it"):
        pipeline.step(BATCHES[0], lambda micro_batch: next_token(gpt2, micro_batch))
    reference = ReadsEmbeddingWeight()
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh, ["layer"], num_micro_batches=2)
    pipeline.fully_shard(mesh["data_parallel"])
    loss = pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch))
    expected_loss = next_token(reference, BATCHES[0])
    expected_loss.backward()
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad.full_tensor(), expected[name].grad, TOLERANCE)
    outputs = pipeline.evaluate(BATCHES[0], lambda batch: model(batch[0]))
    if pipeline.has_last_stage:
        torch.testing.assert_close(torch.cat(outputs), reference(BATCHES[0][0]).detach())


def skip_without_finalize_backward() -> None:
    if not hasattr(FSDPModule, "finalize_backward"):
        pytest.skip("this torch's FSDP2 has no finalize_backward")


@on_ranks(4)
@pytest.mark.parametrize("plan", ["auto", "dict"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_plans_and_tied_embeddings_match_one_device(world_size: int, plan: str, tie_head: bool) -> None:
    """If tied, the rows of the embedding (first stage) and of the output layer (last stage) have equal shards."""
    rules = "auto" if plan == "auto" else PLAN
    assert_matches_one_device(world_size, 1, 2, "1f1b", rules, tie_head, 2)


@on_ranks(4)
@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_global_norm_matches_one_device(world_size: int, tensor_size: int, norm_type: float) -> None:
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
    expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    assert abs(norm - expected_norm) <= TOLERANCE * expected_norm and expected_norm > 0.05
    expected = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, expected[name].grad, 1e-10)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_activation_checkpoints_match_one_device(world_size: int, policy: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    reference = Llama(LlamaArgs(n_layers=4, dtype=torch.float64))
    model = copy.deepcopy(reference)
    pipeline = Pipeline(model, mesh, ["layers.2"], schedule=kind, num_micro_batches=4)
    names = checkpoint_activations(model, policy)
    assert names == [f"layers.{2 * pipeline.stages[0] + i}" for i in range(2)]
    loss = pipeline.step(BATCHES[0], lambda micro_batch: next_token(model, micro_batch))
    expected_loss = next_token(reference, BATCHES[0])
    expected_loss.backward()
    assert abs(loss - expected_loss) <= TOLERANCE * expected_loss
    has_halves = any(action.kind == "W" for actions in pipeline.schedule(4).ranks for action in actions)
    assert has_halves == (kind == "zero_bubble")
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(name, parameter.grad, expected[name].grad, TOLERANCE)


@on_ranks(4)
def test_checkpoints_match_full_model(rank: int, world_size: int, tmp_path: Path) -> None:
    """torch.distributed.checkpoint saves four stages, and loads into two stages and into the full model."""
    args = LlamaArgs(n_layers=4, dtype=torch.float64)
    torch.manual_seed(0)
    model, reference = Llama(args), Llama(args)
    reference.load_state_dict(model.state_dict())
    Pipeline(model, init_device_mesh("cpu", (4,)), ["layers.1", "layers.2", "layers.3"])
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    dist.barrier()
    torch.manual_seed(1)
    other, full = Llama(args), Llama(args)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "pipeline_parallel"))
    Pipeline(other, mesh, ["layers.2"])
    for loaded in (other, full):
        state = {"model": loaded.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path)
        loaded.load_state_dict(state["model"])
    expected = dict(reference.named_parameters())
    for loaded in (other, full):
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name


@on_ranks(2)
def test_deferred_models_match_full_model(world_size: int) -> None:
    """Each rank materializes only its own layers, with the values of a model that is built in full."""
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
def test_rules_of_other_stages_are_valid(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size, 1, 1), mesh_dim_names=NAMES)
    model = Llama(LlamaArgs(n_layers=2))
    Pipeline(model, mesh, ["layers.1"])
    with pytest.raises(ValueError, match=r"layers\.\*\.attention\.wx"):
        weft.parallelize(model, mesh, {**PLAN, "layers.*.attention.wx": "row"})
    weft.parallelize(model, mesh, PLAN)
