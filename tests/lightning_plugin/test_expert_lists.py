"""Models with experts in an nn.ModuleList under the Trainer and Fabric: they train like on one device, unmodified."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning_plugin.scripts.plugin_models import assert_same_weights, set_torchrun_environment, trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from support.expert_lists import BLOCKS, VOCAB, list_model
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy
from weft.strategy.data_parallel import sharded_states_of
from weft.strategy.data_parallel.local import local_shard

ROWS, TOKENS, STEPS = 4, 5, 4
RULES = {"model.layers.*.mlp.experts": "experts", "model.head": "column_gather_output"}


class Tokens(L.LightningModule):
    """Trains a model with lists of experts; records losses and gradient norms."""

    def __init__(self, kind: str, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = list_model(kind)
        self.optimizer_name = optimizer
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch).flatten(0, 1), batch.roll(1, -1).flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        if "gradient_norm" in self.trainer.callback_metrics:
            self.norms.append(self.trainer.callback_metrics["gradient_norm"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        named = list(self.named_parameters())
        biases = [parameter for name, parameter in named if "bias" in name]
        others = [parameter for name, parameter in named if "bias" not in name]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)


def loader(rank: int, layout: str) -> DataLoader[Any]:
    """Return this rank's rows of each batch of one device."""
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d)", layout)}
    num_data = sizes.get("dp", 1)
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(0, VOCAB, (ROWS * STEPS, TOKENS), generator=generator)
    data_rank = rank // sizes.get("tp", 1)
    return DataLoader([batch.chunk(num_data)[data_rank] for batch in rows.split(ROWS)], batch_size=None)


def strategy_of(layout: str, stage: int | None, **options: Any) -> WeftModelParallelStrategy:
    plan = RULES if layout == "tp2" else "auto"
    return WeftModelParallelStrategy(**{"plan": plan, "layout": layout, "zero_stage": stage, **options})


def weights(module: Any) -> dict[str, Tensor]:
    """Return the unsharded state by the names of the unsharded model; collective."""
    state = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in module.state_dict().items()}
    return {name: value for name, value in state.items() if not name.endswith("seen")}  # counts of one rank's tokens


# (kind, layout, ZeRO stage, arguments of the strategy)
Case = tuple[str, str, int, dict[str, Any]]
CASES: dict[int, list[Case]] = {
    2: [
        *((kind, "dp2,ep2", 0, {}) for kind in BLOCKS),
        ("masked", "dp2,ep2", 1, {"activation_checkpointing": "full"}),
        ("mixtral", "dp2,ep2", 1, {"activation_checkpointing": "selective"}),
        ("list", "dp2,ep2", 0, {"optimizer_in_backward": True}),
        ("mixtral", "tp2", 0, {}),
    ],
    4: [
        ("mixtral", "dp4,ep4", 0, {}),
        *((kind, "dp4,ep2", 1, {}) for kind in ("masked", "dense")),
        ("mixtral", "dp4,ep2", 2, {}),
        ("mixtral", "dp4,ep2", 3, {"activation_checkpointing": "full"}),
        ("list", "dp4,ep2", 3, {}),
        ("masked", "dp2,ep2,tp2", 1, {}),
    ],
}


def fit_all(rank: int, world_size: int, folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Train each case; return losses, norms and weights."""
    set_torchrun_environment(rank, world_size)
    found = []
    for kind, layout, stage, options in cases:
        module = Tokens(kind)
        settings = {} if "optimizer_in_backward" in options else {"gradient_clip_val": 0.5}
        run = trainer(world_size, strategy_of(layout, stage, **options), folder, log_every_n_steps=1, **settings)
        run.fit(module, loader(rank, layout))
        found.append({"losses": module.losses, "norms": module.norms, "weights": weights(module)})
    return found


@functools.cache
def on_one_device(folder: str) -> dict[str, dict[str, Any]]:
    """Return the results of each kind with clipping, and without under the name "<kind> unclipped"."""
    cases: list[Case] = [
        *((kind, "dp1", 0, {}) for kind in BLOCKS),
        ("list", "dp1", 0, {"optimizer_in_backward": True}),
    ]
    [results] = run_on_ranks(1, fit_all, folder=folder, cases=cases)
    return dict(zip([*BLOCKS, "list unclipped"], results, strict=True))


@pytest.mark.parametrize("world_size", CASES)
def test_training_matches_one_device(tmp_path_factory: pytest.TempPathFactory, world_size: int) -> None:
    folder = str(tmp_path_factory.getbasetemp())
    expected = on_one_device(folder)
    for results in run_on_ranks(world_size, fit_all, folder=folder, cases=CASES[world_size]):
        for case, found in zip(CASES[world_size], results, strict=True):
            like = expected[case[0] + (" unclipped" if "optimizer_in_backward" in case[3] else "")]
            said = functools.partial("{}: {}".format, case)
            torch.testing.assert_close(found["losses"], like["losses"], rtol=1e-10, atol=0, msg=said)
            torch.testing.assert_close(found["norms"], like["norms"], rtol=1e-9, atol=0, msg=said)
            assert found["weights"].keys() == like["weights"].keys()
            assert_same_weights(found["weights"], like["weights"], 1e-10)


# (epochs, the checkpoint to resume, where to save, whether that is a file)
Run = tuple[int, str | None, str, bool]


def train_and_save(rank: int, world_size: int, folder: str, layout: str, runs: list[Run]) -> list[dict[str, Tensor]]:
    """Train the dense kind, all of whose experts have states on one device, too, with AdamW; save it."""
    set_torchrun_environment(rank, world_size)
    found = []
    for num_epochs, ckpt_path, saves, is_file in runs:
        module = Tokens("dense", "adamw")
        stage = {"dp4,ep2": 3, "dp2,ep2": 1}.get(layout, 0)
        strategy = strategy_of(layout, stage, save_distributed_checkpoint=not is_file)
        run = trainer(world_size, strategy, folder, max_epochs=num_epochs)
        run.fit(module, loader(rank, layout), ckpt_path=ckpt_path)
        run.save_checkpoint(saves)
        found.append(weights(module))
    return found


def test_checkpoints_resume_on_other_layouts(tmp_path: Path) -> None:
    """Any number of expert-parallel ranks reads what any other has saved: directories of shards, and single files."""
    folder, saved, expected = str(tmp_path), None, None
    chain = [("dp1", False), ("dp2,ep2", True), ("dp4,ep4", False), ("dp4,ep2", True), ("dp1", False)]
    for idx, (layout, is_file) in enumerate(chain):
        path = f"{tmp_path}/{idx}.ckpt"
        runs: list[Run] = [(2, saved, f"{path}.full", is_file), (1, None, path, is_file)]
        results = run_on_ranks(_num_ranks(layout), train_and_save, folder=folder, layout=layout, runs=runs)
        expected, saved = expected or results[0][0], path  # the first run trains two epochs from the start
        for resumed, _ in results:
            assert resumed.keys() == expected.keys()
            assert_same_weights(resumed, expected, rtol=1e-9)


def _num_ranks(layout: str) -> int:
    sizes = {name: int(size) for name, size in re.findall(r"([a-z]+)(\d)", layout)}
    return sizes.get("dp", 1) * sizes.get("tp", 1)


def bytes_of_experts(rank: int, world_size: int, folder: str, cases: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """Return the bytes of this rank's experts, and of Adam's moments of these, under each layout."""
    set_torchrun_environment(rank, world_size)
    found = []
    for layout, stage in cases:
        module = Tokens("dense", "adamw")
        run = trainer(world_size, strategy_of(layout, stage), folder, limit_train_batches=1)
        run.fit(module, loader(rank, layout))
        [optimizer] = run.optimizers
        states = sharded_states_of(optimizer)
        sizes = [0, 0]
        for name, parameter in module.named_parameters():
            if "experts" in name:
                key = parameter if states is None else states.flat_shard_of(parameter)
                sizes[0] += local_shard(parameter).nbytes
                sizes[1] += local_shard(optimizer.state[key]["exp_avg"]).nbytes
        found.append((sizes[0], sizes[1]))
    return found


def test_memory_of_experts_is_proportional_to_their_ranks(tmp_path: Path) -> None:
    [[(full, moments)]] = run_on_ranks(1, bytes_of_experts, folder=str(tmp_path), cases=[("dp1", 0)])
    assert full == moments == 2 * 7 * 3 * 32 * 24 * 8
    cases = [("dp4,ep4", 0), ("dp4,ep2", 1), ("dp4,ep2", 3)]
    results = run_on_ranks(4, bytes_of_experts, folder=str(tmp_path), cases=cases)
    sevenths = [[(round(p * 7 / full, 9), round(m * 7 / full, 9)) for p, m in of_rank] for of_rank in results]
    # 7 experts: 2, 2, 2, 1 on four ranks; 4 and 3 on two, of which each of two holders steps a half, or has 2 and 1.
    assert [each[0] for each in sevenths] == [(2, 2), (2, 2), (2, 2), (1, 1)]
    assert [each[1] for each in sevenths] == [(4, 2), (3, 1.5), (4, 2), (3, 1.5)]
    assert [each[2] for each in sevenths] == [(2, 2), (2, 2), (2, 2), (1, 1)]


def fabric_steps(rank: int, world_size: int, layout: str, stage: int) -> dict[str, Tensor]:
    set_torchrun_environment(rank, world_size)
    strategy = FabricStrategy(plan="auto", layout=layout, zero_stage=stage)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = Tokens("mixtral").model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    for batch in loader(rank, layout):
        fabric.backward(F.cross_entropy(model(batch).flatten(0, 1), batch.flatten()))
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("_forward_module."): each for name, each in weights(model).items()}


def test_fabric_matches_one_device() -> None:
    [expected] = run_on_ranks(1, fabric_steps, layout="dp1", stage=0)
    for found in run_on_ranks(2, fabric_steps, layout="dp2,ep2", stage=1):
        assert_same_weights(found, expected, 1e-10)


@on_ranks(2)
def test_unsupported_options_raise(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for layout, options, text in (
        ("cp2,ep2", {}, "got context-parallel ranks for a model with the list of experts 'model.layers.0.mlp.experts'"),
        ("dp2,ep2", {"optimizer_state": "int8"}, "got optimizer_state='int8' for a model with the list"),
        (
            "dp2,ep2",
            {"activation_checkpointing": "selective", "stage": 3},
            "got activation_checkpointing='selective' with zero_stage 2 or 3 for a model with the list",
        ),
    ):
        run = trainer(world_size, strategy_of(layout, **{"stage": 0, **options}), tmp_path)
        with pytest.raises(ValueError, match=text):
            run.fit(Tokens("mixtral"), loader(0, "dp1"))
