"""Steps, hooks and optimizers that read all parameters match one device, in the Trainer and Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.utilities import grad_norm
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn

import weft
from support.models import Llama, LlamaArgs, token_batches
from support.ranks import on_ranks, run_on_ranks
from weft.lightning import WeftModelParallelStrategy
from weft.lightning.fabric import WeftModelParallelStrategy as FabricStrategy

VOCAB, ROWS = 37, 4
WQ = "model.layers.0.attention.wq.weight"


class Penalized(L.LightningModule):
    """A language model with a penalty on its weights; logs norms of gradients before the optimizer's step."""

    def __init__(self, case: str = "penalty") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Llama(LlamaArgs(dtype=torch.float64, n_kv_heads=4))
        self.scale = nn.Parameter(torch.full((VOCAB,), 1.25, dtype=torch.float64))
        self.case, self.seen = case, list[float]()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch[0][0], batch[1][0]
        loss = F.cross_entropy((self.model(tokens) * self.scale).flatten(0, 1), targets.flatten())
        if self.case in ("penalty", "nan"):
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())
        if self.case == "nan":
            loss = loss + 0 * self.model.output.weight.sub(self.model.output.weight).sqrt().sum()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.case == "penalty":
            norms = grad_norm(self, norm_type=2)
            self.log_dict(norms)
            self.seen += [float(norms["grad_2.0_norm_total"]), float(norms[f"grad_2.0_norm/{WQ}"])]

    def on_after_backward(self) -> None:
        if self.case == "penalty":
            assert all(torch.isfinite(p.grad).all() for p in self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        if self.case == "penalty":
            self.seen.append(float(self.trainer.callback_metrics["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        if self.case == "LBFGS":
            return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
        if self.case.startswith("Adafactor"):
            return torch.optim.Adafactor(parameters, lr=0.05, foreach=self.case.endswith("foreach"))
        return torch.optim.SGD(parameters, lr=0.05)


def _batches(num_replicas: int, replica: int) -> torch.utils.data.DataLoader:
    """Return a loader whose items are this replica's rows of each batch, so that no sampler splits them again."""
    rows = slice(replica * ROWS // num_replicas, (replica + 1) * ROWS // num_replicas)
    return torch.utils.data.DataLoader([tuple(each[rows] for each in pair) for pair in token_batches(2, VOCAB)])


def _fit(rank: int, world_size: int, layout: str, zero_stage: int | None, cases: list[str], folder: str) -> list[Any]:
    set_torchrun_environment(rank, world_size)
    num_replicas = 2 if "dp2" in layout else 1
    found = []
    for case in cases:
        module = Penalized(case)
        strategy = WeftModelParallelStrategy(plan="auto", layout=layout, zero_stage=zero_stage) if layout else "auto"
        run = trainer(world_size, strategy, folder, log_every_n_steps=1)
        run.fit(module, _batches(num_replicas, rank // (world_size // num_replicas)))
        found.append((module.seen, weights(module)))
    return found


CASES = ["penalty", "LBFGS", "Adafactor", "Adafactor foreach"]
LAYOUTS = [("tp2", None), ("dp2", 0), ("dp2", 1), ("dp2,tp2", 3)]


def test_training_matches_one_device(tmp_path: Path) -> None:
    [expected] = run_on_ranks(1, _fit, layout="", zero_stage=None, cases=CASES, folder=str(tmp_path))
    for layout, zero_stage in LAYOUTS:
        cases = CASES if zero_stage != 1 else CASES[:1]  # zero_stage=1 does not support the other optimizers
        size = 4 if "," in layout else 2
        for found in run_on_ranks(size, _fit, layout=layout, zero_stage=zero_stage, cases=cases, folder=str(tmp_path)):
            for case, (seen, values), (expected_seen, expected_values) in zip(cases, found, expected, strict=False):
                assert seen == pytest.approx(expected_seen, rel=1e-6), (layout, zero_stage, case)
                # Adafactor and LBFGS amplify the rounding errors of sums in another order.
                for name, value in values.items():
                    label = f"{layout}, zero_stage {zero_stage}, {case}: {name}"
                    torch.testing.assert_close(value, expected_values[name], rtol=1e-7, atol=1e-9, msg=label)


@on_ranks(2)
def test_anomaly_detection_finds_nan_of_sharded_weight(rank: int, world_size: int, tmp_path: Path) -> None:
    """Anomaly detection raises for a NaN in the gradient of a sharded weight, and not if there is no NaN."""
    set_torchrun_environment(rank, world_size)
    try:
        for case in ("penalty", "nan"):
            run = trainer(2, WeftModelParallelStrategy(plan="auto"), tmp_path, detect_anomaly=True)
            if case == "penalty":
                run.fit(Penalized(case), _batches(1, 0))
                continue
            with pytest.raises(RuntimeError, match="returned nan values"):
                run.fit(Penalized(case), _batches(1, 0))
    finally:
        torch.autograd.set_detect_anomaly(False)


class PipelineModule(L.LightningModule):
    """Reads all parameters in a hook, which warns in a pipeline, and if `is_penalized` in a step, which raises."""

    def __init__(self, is_penalized: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.is_penalized = is_penalized

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters()) if self.is_penalized else 0
        return self.model(batch).square().mean() + penalty

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grad_norm(self, norm_type=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@on_ranks(2)
def test_reading_all_parameters_with_pipeline_raises_or_warns(rank: int, world_size: int, tmp_path: Path) -> None:
    set_torchrun_environment(rank, world_size)
    for is_penalized in (False, True):
        strategy = WeftModelParallelStrategy(plan="auto", layout="pp2", pipeline_cuts=["2"])
        module, run = PipelineModule(is_penalized), trainer(2, strategy, tmp_path)
        loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)
        if is_penalized:  # the step reads them before it calls the model, so that it fails on every stage
            with pytest.raises(ValueError, match=r"a step called parameters\(\) of the module, and with pipeline_cuts"):
                run.fit(module, loader)
        else:
            with pytest.warns(UserWarning, match=r"a hook called parameters\(\) of the module"):
                run.fit(module, loader)
        assert len(list(module.parameters())) == 2  # the end of the run has removed the check


@on_ranks(2)
def test_fabric_backward_of_local_parameters(rank: int, world_size: int) -> None:
    set_torchrun_environment(rank, world_size)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(plan="auto"))
    fabric.launch()
    module = Penalized()
    model = fabric.setup_module(module.model)
    with weft.strategy.local_parameters():
        fabric.backward(sum(p.pow(2).sum() for p in model.parameters()))
    assert all(torch.equal(p.grad.full_tensor(), 2 * p.full_tensor()) for p in model.parameters())
    with pytest.raises(ValueError, match=r"fabric.backward got a DTensor .* inside weft.strategy.local_parameters"):
        fabric.backward(next(model.parameters()).pow(2).sum())
