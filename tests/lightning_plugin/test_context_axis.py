"""Context-parallel ranks under the Trainer and Fabric: they get equal batches and train like one device.

They average gradients, and shard, together with the data-parallel ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import assert_same_weights, set_torchrun_environment, trainer, weights
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

from support.models import Llama, LlamaArgs
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import BatchSizeFinder, ReplicaCheck, Report, WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.checkpoint.manifest import Manifest
from weft.strategy.reports.run_data import DATA_FILE

ROWS, TOKENS, VOCAB, STEPS, CONTEXT = 4, 16, 37, 4, 2
NUM_DATA = {"tp1": 1, "dp2": 2, "cp2": 1, "cp4": 1, "dp2,cp2": 2, "rep2,cp2": 2, "pp2,cp2": 1}
CASES = [*((layout, stage) for layout in ("cp2", "dp2,cp2") for stage in (0, 1, 3)), ("rep2,cp2", 3)]


def ranks_of(layout: str) -> int:
    return NUM_DATA[layout] * (CONTEXT if "cp" in layout else 1)


def data_rank_of(rank: int, layout: str) -> int:
    return rank // (CONTEXT if "cp" in layout else 1) % NUM_DATA[layout]


def dataset(num_batches: int = STEPS) -> TensorDataset:
    """Return inputs and targets, `[ROWS * num_batches, TOKENS]` each, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(*torch.randint(0, VOCAB, (2, ROWS * num_batches, TOKENS), generator=generator))


def batches(num_data: int, data_rank: int, num_batches: int = STEPS) -> list[tuple[Tensor, ...]]:
    """Return the rows of one data-parallel rank in each batch of one device."""
    full = [each.split(ROWS) for each in dataset(num_batches).tensors]
    return [tuple(each.chunk(num_data)[data_rank] for each in batch) for batch in zip(*full, strict=True)]


def model(num_heads: int = 4) -> Llama:
    torch.manual_seed(3)
    return Llama(LlamaArgs(dtype=torch.float64, vocab_size=VOCAB, n_heads=num_heads))


def loss_of(module: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())


class Tokens(L.LightningModule):
    """Records losses, gradient norms and batches; logs the loss of the training and of the validation."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.model = model(num_heads)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.batches: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        loss = loss_of(self.model, *batch)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        if "gradient_norm" in self.trainer.callback_metrics:
            self.norms.append(self.trainer.callback_metrics["gradient_norm"].item())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model, *batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader(rank: int, layout: str) -> DataLoader:
    return DataLoader(batches(NUM_DATA[layout], data_rank_of(rank, layout)), batch_size=None)


def strategy_of(layout: str, stage: int | None = None, **options: Any) -> WeftModelParallelStrategy:
    return WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=stage, **options)


def _predicted(run: L.Trainer, module: Tokens, batches_of_rank: DataLoader) -> Tensor:
    """Return the predictions, which are plain tensors: code of one rank alone, such as a writer, may read them."""
    found = run.predict(module, batches_of_rank)
    assert {type(each) for each in found} == {Tensor}
    return torch.cat(found)


# ---- one device --------------------------------------------------------------------------------------------


def _fit(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, num_heads: int = 4, **options: Any
) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    module, strategy = Tokens(num_heads), strategy_of(layout, stage, **options)
    run = trainer(world_size, strategy, folder, gradient_clip_val=0.3, log_every_n_steps=1)
    run.fit(module, loader(rank, layout), loader(rank, layout))
    logged = [run.callback_metrics[name].item() for name in ("train_loss_epoch", "val_loss")]
    [validated] = run.validate(module, loader(rank, layout), verbose=False)
    predicted = _predicted(run, module, loader(rank, layout))
    if stage == 3:
        weight = module.model.layers[0].feed_forward.w1.weight
        assert isinstance(weight, DTensor) and weight.device_mesh.size() == world_size
        assert any(isinstance(placement, Shard) for placement in weight.placements)
    return {
        "losses": module.losses,
        "norms": module.norms,
        "logged": [*logged, validated["val_loss"]],
        "predicted": predicted,
        "weights": weights(module),
    }


def _fabric_steps(
    rank: int, world_size: int, folder: str, layout: str, stage: int | None, num_heads: int = 4, **options: Any
) -> dict[str, Any]:
    """Train clipped steps of two micro-batches, save after the first, load at the end; return the results."""
    set_torchrun_environment(rank, world_size)
    plan = None if layout == "dp2,cp2" else "auto"  # context-parallel ranks need a plan; {} replaces None
    strategy = FabricStrategy(plan=plan, layout=layout, zero_stage=None if stage == 3 else stage, **options)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    llama = model(num_heads)
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.05, momentum=0.9)
    llama, optimizer = fabric.setup(llama, optimizer)
    axes = strategy.data_axes
    assert (axes.size, axes.rank) == (NUM_DATA[layout], data_rank_of(rank, layout))
    losses, norms, state = [], [], {"model": llama, "optimizer": optimizer}
    path = Path(folder, f"{layout}-{stage}")
    for number, batch in enumerate(batches(axes.size, axes.rank)):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(llama, enabled=not is_last):
            loss = loss_of(llama, *batch) / 2
            fabric.backward(loss)
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        if is_last:
            norms.append(fabric.clip_gradients(llama, optimizer, max_norm=0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            fabric.save(path, state)
    result = {"losses": losses, "norms": norms, "weights": weights(llama)}
    fabric.load(path, state)
    loss = loss_of(llama, *batches(axes.size, axes.rank)[2]) / 2
    result["logged"] = [fabric.all_reduce(loss.detach(), reduce_op="mean").item()]
    return result


def _assert_close(mine: Any, theirs: Any, name: str) -> None:
    left, right = (torch.as_tensor(each, dtype=torch.float64) for each in (mine, theirs))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=0, msg=lambda text: f"{name}: {text}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def fitted_on_one_device(folder: str) -> dict[str, Any]:
    [result] = run_on_ranks(1, _fit, folder=folder, layout="tp1", stage=None)
    return result


@pytest.mark.parametrize(("layout", "stage"), CASES)
def test_trainer_matches_one_device(folder: str, fitted_on_one_device: dict[str, Any], layout: str, stage: int) -> None:
    expected, num_data = fitted_on_one_device, NUM_DATA[layout]
    results = run_on_ranks(ranks_of(layout), _fit, folder=folder, layout=layout, stage=stage)
    losses = torch.tensor([each["losses"] for each in results], dtype=torch.float64).view(num_data, CONTEXT, STEPS)
    _assert_close(losses[:, 0], losses[:, 1], "losses of context-parallel ranks")
    _assert_close(losses[:, 0].mean(0), expected["losses"], "losses")
    rows = expected["predicted"].view(STEPS, num_data, -1, TOKENS, VOCAB)
    for rank, result in enumerate(results):
        _assert_close(result["norms"], expected["norms"], "norms")
        _assert_close(result["logged"], expected["logged"], "logged values")
        assert_same_weights(result["weights"], expected["weights"])
        mine = rows[:, data_rank_of(rank, layout)].flatten(0, 1)
        torch.testing.assert_close(result["predicted"], mine, rtol=1e-9, atol=1e-12)


def test_fabric_matches_one_device(folder: str) -> None:
    [expected] = run_on_ranks(1, _fabric_steps, folder=folder, layout="tp1", stage=None)
    for layout, stage in CASES:
        for result in run_on_ranks(ranks_of(layout), _fabric_steps, folder=folder, layout=layout, stage=stage):
            for name in ("losses", "norms", "logged"):
                _assert_close(result[name], expected[name], f"{name} of {layout} at stage {stage}")
            assert_same_weights(result["weights"], expected["weights"])


def test_more_context_ranks_than_heads(folder: str) -> None:
    common: dict[str, Any] = {"folder": folder, "num_heads": 2}
    for steps in (_fit, _fabric_steps):
        [expected] = run_on_ranks(1, steps, **common, layout="tp1", stage=None)
        for result in run_on_ranks(4, steps, **common, layout="cp4", stage=3, context_attention="ring_ulysses"):
            for name in ("losses", "norms", "logged"):
                _assert_close(result[name], expected[name], f"{name} of {steps.__name__}")
            assert_same_weights(result["weights"], expected["weights"])


def _fit_stages(rank: int, world_size: int, folder: str, attention: str) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    options = {"pipeline_cuts": ["layers.1"], "pipeline_module": "model", "num_micro_batches": 2}
    module = Tokens()
    strategy = strategy_of("pp2,cp2", context_attention=attention, **options)
    run = trainer(world_size, strategy, folder, gradient_clip_val=0.3, log_every_n_steps=1)
    run.fit(module, loader(rank, "pp2,cp2"), loader(rank, "pp2,cp2"))
    logged = [run.callback_metrics[name].item() for name in ("train_loss_epoch", "val_loss")]
    predicted = _predicted(run, module, loader(rank, "pp2,cp2"))
    return {"losses": module.losses, "norms": module.norms, "logged": logged, "predicted": predicted}


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_stages_match_one_device(folder: str, fitted_on_one_device: dict[str, Any], attention: str) -> None:
    expected = fitted_on_one_device
    for result in run_on_ranks(4, _fit_stages, folder=folder, attention=attention):
        for name in ("losses", "norms"):
            _assert_close(result[name], expected[name], name)
        _assert_close(result["logged"], expected["logged"][:2], "logged values")
        torch.testing.assert_close(result["predicted"], expected["predicted"], rtol=1e-9, atol=1e-12)


# ---- checkpoints -------------------------------------------------------------------------------------------


def _run_epochs(
    rank: int, world_size: int, folder: str, layout: str, num_epochs: int, ckpt_path: str | None, saves: str | None
) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    module = Tokens()
    run = trainer(world_size, strategy_of(layout), folder, max_epochs=num_epochs)
    run.fit(module, loader(rank, layout), ckpt_path=ckpt_path)
    if saves is not None:
        run.save_checkpoint(saves)
    return weights(module)


def test_checkpoints_resume_on_other_layouts(folder: str) -> None:
    common: dict[str, Any] = {"folder": folder, "ckpt_path": None, "saves": None}
    [expected] = run_on_ranks(1, _run_epochs, **common, layout="tp1", num_epochs=2)
    for source, target in (("cp2", "dp2"), ("dp2", "cp2"), ("cp2", "dp2,cp2")):
        path = f"{folder}/{source}.ckpt"
        run_on_ranks(ranks_of(source), _run_epochs, **{**common, "saves": path}, layout=source, num_epochs=1)
        case = {**common, "ckpt_path": path, "layout": target, "num_epochs": 2}
        for resumed in run_on_ranks(ranks_of(target), _run_epochs, **case):
            assert_same_weights(resumed, expected, rtol=1e-9)
    assert Manifest.read(f"{folder}/cp2.ckpt").about["mesh"] == {
        "data_parallel": 1,
        "context_parallel": 2,
        "tensor_parallel": 1,
    }


# ---- groups, data and random numbers ---------------------------------------------------------------------------


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "data", "context", "same_data"),
    [
        ("dp2,cp2", [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ("rep2,cp2", [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
        ("cp2,tp2", [[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]),
        ("cp4", [[0], [1], [2], [3]], [[0, 1, 2, 3]], [[0, 1, 2, 3]]),
        ("dp4", [[0, 1, 2, 3]], None, [[0], [1], [2], [3]]),
    ],
)
def test_groups(
    rank: int,
    world_size: int,
    layout: str,
    data: list[list[int]],
    context: list[list[int]] | None,
    same_data: list[list[int]],
) -> None:
    set_torchrun_environment(rank, world_size)
    groups = []
    for _ in range(2):  # the second run reuses the groups of the first
        strategy = FabricStrategy(plan="auto", layout=layout)
        Fabric(accelerator="cpu", devices=world_size, strategy=strategy).launch()
        engine = strategy._engine
        groups.append((strategy.data_group, strategy.context_parallel_group, engine.same_data_group))
    assert all(first is second for first, second in zip(*groups, strict=True))
    for group, expected in zip(groups[0], (data, context, same_data), strict=True):
        found = None if group is None else dist.get_process_group_ranks(group)
        assert found == (None if expected is None else next(ranks for ranks in expected if rank in ranks))
    [own] = [ranks for ranks in data if rank in ranks]
    assert (strategy.data_axes.size, strategy.data_axes.rank) == (len(own), own.index(rank))
    assert strategy.distributed_sampler_kwargs in (None, {"num_replicas": len(own), "rank": own.index(rank)})
    num_tensor = strategy.tensor_parallel_group.size()
    assert strategy.data_axes.num_gradient_ranks == world_size // num_tensor
    assert strategy.device_mesh["data_parallel"].size() == world_size // num_tensor // (2 if "rep" in layout else 1)


class Values(Tokens):
    """Logs and gathers a value of each data-parallel rank, and draws a random number."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        rank = float(self.trainer.strategy.data_axes.rank + 1)
        for how in ("sum", "mean", "max"):
            self.log(how, rank, sync_dist=True, reduce_fx=how)
        assert self.all_gather(torch.tensor([rank])).flatten().tolist() == [1.0, 2.0]

    def on_train_start(self) -> None:
        self.drawn = torch.rand(()).item()


@on_ranks(4)
def test_samples_logs_and_random_numbers_belong_to_data_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    torch.manual_seed(rank)
    module, strategy = Values(), strategy_of("dp2,cp2")
    torch.manual_seed(rank)
    run = trainer(world_size, strategy, tmp_path, use_distributed_sampler=True, callbacks=[Report(tmp_path)])
    run.fit(module, DataLoader(dataset(), batch_size=2, shuffle=True))
    [found] = run.validate(module, DataLoader(dataset(1), batch_size=2), verbose=False)
    assert found == {"sum": 3.0, "mean": 1.5, "max": 2.0}
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, (torch.cat(module.batches), module.drawn))
    seen, drawn = zip(*gathered, strict=True)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    rows = sorted(torch.cat([seen[0], seen[2]]).tolist())
    assert rows == sorted(dataset().tensors[0].tolist()), "each row is in the batches of one data-parallel rank"
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[0] != drawn[2]
    expected = "data_parallel=2, context_parallel=2, tensor_parallel=1, zero_stage=3, context_attention=ring"
    assert strategy.start_summary[0] == f"layout: {expected}; plan: auto."
    if rank == 0:
        data = json.loads((tmp_path / DATA_FILE).read_text())
        assert data["run"]["layout"] == "dp2,cp2"
        assert data["run"]["mesh"] == [["data_parallel", 2], ["context_parallel", 2], ["tensor_parallel", 1]]


@on_ranks(2)
def test_different_batches_of_context_ranks_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    run = trainer(world_size, strategy_of("cp2"), tmp_path)
    with pytest.raises(ValueError, match="differs between rank 0 and rank 1, which are in one context-parallel group"):
        run.fit(Tokens(), DataLoader(batches(2, rank), batch_size=None))
    run = trainer(world_size, strategy_of("cp2"), tmp_path)
    with pytest.raises(ValueError, match="the ranks of a context-parallel group must get the same batches"):
        run.fit(Tokens(), DataLoader(batches(1, 0, STEPS - rank), batch_size=None))
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(plan="auto", layout="cp2"))
    fabric.launch()
    llama = fabric.setup(model())
    with pytest.raises(ValueError, match="differs between rank 0 and rank 1, which are in one context-parallel group"):
        llama(batches(2, rank)[0][0])


@on_ranks(4)
def test_replica_check_names_the_context_rank_that_differs(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)

    class Flips(Tokens):
        def on_before_zero_grad(self, *_: Any) -> None:
            if rank == 1 and self.trainer.global_step == 1:
                self.model.norm.weight.data[0] += 1.0

    callbacks = [ReplicaCheck(every_n_steps=1, axes=["data_parallel"])]
    run = trainer(world_size, strategy_of("dp2,cp2", 0), tmp_path, callbacks=callbacks)
    with pytest.raises(RuntimeError, match=r"'model.norm.weight' differs on rank 1, of ranks 0, 1, 2 and 3, which"):
        run.fit(Flips(), loader(rank, "dp2,cp2"))


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size is 0; pass a number of ranks from 1 on\\.$"),
        ({"context_parallel_size": "auto"}, "context_parallel_size is 'auto'; pass a number of ranks from 1 on\\.$"),
        ({"layout": "cpauto"}, "context_parallel_size is 'auto'"),
        ({"context_attention": "flash"}, "got context_attention='flash'; pass 'ring', 'ulysses' or 'ring_u"),
        ({"layout": "cp2", "context_parallel_size": 2}, "and also context_parallel_size=2; leave these out"),
        ({"layout": "auto", "context_parallel_size": 2}, "and also context_parallel_size=2; leave these out"),
        ({"layout": "cp2", "sequence_parallel": True}, "2 context-parallel ranks and sequence_parallel=True, which"),
    ],
)
def test_unsupported_options_raise(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        WeftModelParallelStrategy(plan="auto", **settings)


def test_sequence_parallel_plan_raises() -> None:
    from weft import Plan

    with pytest.raises(ValueError, match="2 context-parallel ranks and sequence_parallel=True, which are not"):
        FabricStrategy(plan=Plan("auto", sequence_parallel=True), context_parallel_size=2)


def test_sizes_that_do_not_fit_the_devices_or_options_raise(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has 4 processes .* layout 'cp3' has 3 ranks"):
        trainer(4, strategy_of("cp3"), tmp_path)
    sizes = {"context_parallel_size": 2, "tensor_parallel_size": 1, "data_parallel_size": 1}
    with pytest.raises(RuntimeError, match="data_parallel=1,context_parallel=2,tensor_parallel=1' has 2 ranks"):
        trainer(4, WeftModelParallelStrategy(**sizes), tmp_path)
    rows = strategy_of("cp2", optimizer_in_backward="rows")
    with pytest.raises(ValueError, match="'rows' with 2 context-parallel ranks, over which full gradients"):
        trainer(2, rows, tmp_path)
    with pytest.raises(ValueError, match="join_gate_up=True with 2 data- and context-parallel ranks, which gather"):
        trainer(2, strategy_of("cp2", join_gate_up=True), tmp_path)


def test_ulysses_without_context_ranks_is_valid() -> None:
    strategy = WeftModelParallelStrategy(plan="auto", context_attention="ulysses")
    assert not strategy._engine.options.has_context


@on_ranks(2)
def test_search_for_the_batch_size_raises(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)

    class Sized(Tokens):
        batch_size = 2

        def train_dataloader(self) -> DataLoader:
            return DataLoader(dataset(), batch_size=self.batch_size)

    run = trainer(world_size, strategy_of("cp2"), tmp_path, callbacks=[BatchSizeFinder()])
    with pytest.raises(ValueError, match="got context-parallel ranks, which no dry run has"):
        run.fit(Sized())
