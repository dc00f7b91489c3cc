"""Fabric with a model in stages: parity with one device on every mesh, clipping, checkpoints, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import set_torchrun_environment
from torch import Tensor, nn

from support.extended import extended_unless
from support.models import Llama, LlamaArgs, token_batches
from support.parity import full
from support.ranks import on_ranks, run_on_ranks
from weft.lightning.fabric import WeftModelParallelStrategy
from weft.strategy._plan import default_stages_per_rank
from weft.strategy.pipeline import SCHEDULES

ARGS = LlamaArgs(n_layers=4, tie_head=True, dtype=torch.float64)
BATCHES = token_batches(4, 37)
TOLERANCE = 1e-10


def next_token(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def fabric_with(world_size: int, **options: Any) -> Fabric:
    options = {"plan": "auto", "pipeline_cuts": ["layers.2"], "num_micro_batches": 2, **options}
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=WeftModelParallelStrategy(**options))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    return fabric


def set_up(fabric: Fabric, optimizer: str = "SGD") -> tuple[Any, Any]:
    with fabric.init_module(empty_init=True):
        model = Llama(ARGS)
    model = fabric.setup(model)
    made = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer == "SGD" else torch.optim.AdamW(model.parameters())
    return model, fabric.setup_optimizers(made)


def train(fabric: Fabric, model: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train clipped steps on this data-parallel rank's rows; return the losses averaged over the ranks."""
    losses, axes = [], fabric.strategy.data_axes
    for batch in batches:
        optimizer.zero_grad()
        local_batch = tuple(tensor.chunk(axes.size)[axes.rank] for tensor in batch)
        loss = fabric.strategy.pipeline_step(local_batch, next_token)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(fabric.all_reduce(loss, reduce_op="mean").item())
    return losses


def train_full(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = next_token(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def reference() -> nn.Module:
    torch.manual_seed(0)
    return Llama(ARGS)


def assert_same_weights(fabric: Fabric, expected: nn.Module) -> None:
    model = fabric.strategy.pipeline.model
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters()]
    assert names and set(names) <= set(wanted)
    for name, parameter in model.named_parameters():
        difference = (full(parameter) - wanted[name]).norm()
        assert difference <= TOLERANCE * wanted[name].norm(), name


LAYOUTS = {
    2: [("pp2", 3)],
    4: [("pp2,tp2", 3), ("pp2,dp2", 0), ("pp2,dp2", 1), ("pp2,dp2", 2), ("pp2,dp2", 3)],
    8: [("pp2,dp2,tp2", 3), ("pp2,rep2,dp2", 3), ("pp2,dp2,tp2", 0)],
}


CASES = [(*case, optimizer) for cases in LAYOUTS.values() for case in cases for optimizer in ("SGD", "AdamW")]


def _is_kept(layout: str, zero_stage: int, optimizer: str) -> bool:
    return optimizer == "SGD" or (layout, zero_stage) in (("pp2,dp2", 1), ("pp2,dp2,tp2", 3))


@pytest.mark.parametrize(("layout", "zero_stage", "optimizer"), extended_unless(_is_kept, CASES))
def test_matches_one_device(layout: str, zero_stage: int, optimizer: str) -> None:
    world_size = next(size for size, cases in LAYOUTS.items() if (layout, zero_stage) in cases)
    case = {"layout": layout, "zero_stage": zero_stage, "optimizer": optimizer}
    run_on_ranks(world_size, check_matches_one_device, keeps_groups=True, **case)


@on_ranks(4)
def test_sequence_shards_match_one_device(rank: int, world_size: int) -> None:
    check_matches_one_device(rank, world_size, "pp2,tp2", 3, "SGD", sequence_parallel=True)


def check_matches_one_device(
    rank: int, world_size: int, layout: str, zero_stage: int, optimizer: str, **options: Any
) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout=layout, zero_stage=zero_stage, **options)
    model, ours = set_up(fabric, optimizer)
    expected = reference()
    theirs = (
        torch.optim.SGD(expected.parameters(), lr=0.1)
        if optimizer == "SGD"
        else torch.optim.AdamW(expected.parameters())
    )
    losses = train(fabric, model, ours, BATCHES)
    assert losses == pytest.approx(train_full(expected, theirs, BATCHES), rel=1e-10)
    assert_same_weights(fabric, expected)


@on_ranks(2)
def test_steps_in_backward(rank: int, world_size: int) -> None:
    """The second batch is accumulated."""
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout="pp2", optimizer_in_backward=True)
    model, ours = set_up(fabric)
    expected = reference()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    for idx, batch in enumerate(BATCHES):
        with fabric.no_backward_sync(model, enabled=idx == 1):
            loss = fabric.strategy.pipeline_step(batch, next_token)
        expected_loss = next_token(expected, batch)
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-10)
        expected_loss.backward()
        assert all((parameter.grad is None) == (idx != 1) for parameter in model.parameters())
        if idx != 1:
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(fabric, expected)


@on_ranks(2)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_matches_one_device(rank: int, world_size: int, kind: str) -> None:
    set_torchrun_environment(rank, world_size)
    cuts = "auto" if default_stages_per_rank(kind) == 2 else ["layers.2"]
    fabric = fabric_with(world_size, layout="pp2", pipeline_cuts=cuts, pipeline_schedule=kind, num_micro_batches=3)
    model, optimizer = set_up(fabric)
    expected = reference()
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1)
    assert train(fabric, model, optimizer, BATCHES) == pytest.approx(train_full(expected, theirs, BATCHES), rel=1e-10)
    assert_same_weights(fabric, expected)
    assert {span.action.kind for span in fabric.strategy.pipeline.trace} >= {"F"}
    chosen = ("layers.1", "layers.2", "layers.3")
    assert fabric.strategy.pipeline.cuts == (chosen if cuts == "auto" else ("layers.2",))


@on_ranks(4)
def test_resumes_on_another_number_of_stages(rank: int, world_size: int, tmp_path: Path) -> None:
    """Save after two steps on two stages x dp2, resume on four stages; results are those of an uninterrupted run."""
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout="pp2,dp2")
    model, optimizer = set_up(fabric, "AdamW")
    state = {"model": model, "optimizer": optimizer, "step": 2}
    losses = train(fabric, model, optimizer, BATCHES[:2])
    fabric.save(tmp_path / "checkpoint", state)

    fabric = fabric_with(world_size, layout="pp4", pipeline_cuts=["layers.1", "layers.2", "layers.3"])
    model, optimizer = set_up(fabric, "AdamW")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "checkpoint", state)
    assert state["step"] == 2
    losses += train(fabric, model, optimizer, BATCHES[2:])
    expected = reference()
    theirs = torch.optim.AdamW(expected.parameters())
    assert losses == pytest.approx(train_full(expected, theirs, BATCHES), rel=1e-10)
    assert_same_weights(fabric, expected)


@on_ranks(2)
def test_resumes_without_stages(rank: int, world_size: int, tmp_path: Path) -> None:
    """The tied weight's state is saved under its name in the unsplit model."""
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout="pp2")
    model, optimizer = set_up(fabric, "AdamW")
    train(fabric, model, optimizer, BATCHES[:2])
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    fabric = fabric_with(world_size, layout="tp2", pipeline_cuts=None, num_micro_batches=None)
    model, optimizer = set_up(fabric, "AdamW")
    fabric.load(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    expected = reference()
    theirs = torch.optim.AdamW(expected.parameters())
    train_full(expected, theirs, BATCHES[:2])
    for ours, expected_parameter in zip(model.parameters(), expected.parameters(), strict=True):
        difference = full(optimizer.state[ours]["exp_avg"]) - theirs.state[expected_parameter]["exp_avg"]
        assert difference.norm() <= TOLERANCE and torch.allclose(full(ours), expected_parameter, rtol=1e-10)


@on_ranks(2)
def test_stages_train_and_evaluate_in_bfloat16(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(plan={}, layout="pp2", pipeline_cuts=["1"], num_micro_batches=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model = fabric.setup(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    output_dtypes = []

    def loss_of(model: Any, x: Tensor) -> Tensor:
        output = model(x)
        output_dtypes.append(output.dtype)
        return output.square().mean()

    loss = strategy.pipeline_step(torch.ones(4, 4), loss_of)
    assert torch.isfinite(loss) and next(model.parameters()).dtype == torch.float32
    # Under autocast, the stages exchange bfloat16; Fabric converts the model's output to float32.
    boundary_dtypes = {str(value.dtype) for value in boundary_values(strategy)}
    assert boundary_dtypes == {"torch.bfloat16"} and set(output_dtypes) == ({torch.float32} if rank == 1 else set())
    outputs = strategy.pipeline_evaluate(torch.ones(4, 4), lambda m, x: m(x))
    assert len(outputs) == (2 if rank == 1 else 0)


def boundary_values(strategy: Any) -> list[Tensor]:
    [recordings] = strategy.pipeline._recordings.values()
    return [recording.values[number] for recording in recordings for number in recording.crossings[0]]


@on_ranks(2)
def test_different_batches_raise(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout="pp2")
    set_up(fabric)
    with pytest.raises(
        ValueError, match="training batch 0 differs between rank 0 and rank 1, which are in one pipeline"
    ):
        fabric.strategy.pipeline_step(BATCHES[rank], next_token)


@on_ranks(2)
def test_second_model_and_full_checkpoint_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = fabric_with(world_size, layout="pp2", save_distributed_checkpoint=False)
    model, _ = set_up(fabric)
    with pytest.raises(ValueError, match="has divided a WeftLlama into stages and got a Llama"):
        fabric.setup(Llama(ARGS))
    with pytest.raises(ValueError, match="where no rank has the full model"):
        fabric.save(tmp_path / "file", {"model": model})
    plain = WeftModelParallelStrategy(plan="auto")
    with pytest.raises(RuntimeError, match=r"has no model in stages; pass pipeline_cuts=\[\.\.\.\]"):
        plain.pipeline_step(BATCHES[0], next_token)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": "pp2"}, ValueError, "2 pipeline-parallel ranks without stages"),
        ({"pipeline_parallel_size": 0}, ValueError, "pipeline_parallel_size is 0"),
        ({"layout": "pp2", "pipeline_parallel_size": 2}, ValueError, "which gives the sizes of all axes"),
        ({"layout": "pp2", "pipeline_cuts": "layers.2"}, TypeError, "pass a list of module names"),
        ({"layout": "pp2", "pipeline_cuts": ["a", "b"]}, ValueError, "2 pipeline_cuts make 3 stages for 2"),
        ({"pipeline_cuts": [], "pipeline_schedule": "2f2b"}, ValueError, "got pipeline_schedule='2f2b'"),
        ({"plan": "auto", "pipeline_cuts": [], "optimizer_in_backward": "rows"}, ValueError, "'rows' with pipeline"),
    ],
)
def test_invalid_settings_raise(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WeftModelParallelStrategy(**options)
