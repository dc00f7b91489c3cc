"""Trains a small Llama with the Trainer on any mesh and ZeRO stage, and compares it with one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning_plugin.scripts.plugin_models import set_torchrun_environment, trainer, weights
from torch import Tensor, nn

from support.models import Llama, LlamaArgs, token_batches
from support.ranks import run_on_ranks
from weft.lightning import WeftModelParallelStrategy

# The first step creates the optimizer's states, the second uses them, and a wrong step changes all later losses.
STEPS = 4
VOCAB = 37
# Sizes of (data_replicate, data_parallel, tensor_parallel), sorted by the number of ranks so that pools are reused.
MESHES = {
    "tp1": (1, 1, 1),
    "tp2": (1, 1, 2),
    "dp2": (1, 2, 1),
    "tp4": (1, 1, 4),
    "dp4": (1, 4, 1),
    "dp2,tp2": (1, 2, 2),
    "dp2,tp2 by tokens": (1, 2, 2),
    "rep2,dp2": (2, 2, 1),
    "rep2,tp2": (2, 1, 2),
    "rep2,dp2,tp2": (2, 2, 2),
}
CASES = [(layout, stage) for layout, sizes in MESHES.items() for stage in ((0, 1, 2, 3) if sizes[1] > 1 else (None,))]


def mesh_settings(mesh: str, stage: int | None) -> dict[str, Any]:
    """Return the strategy's arguments for one of MESHES; "by tokens" means sequence parallelism."""
    layout, *words = mesh.split(" ")
    return {"plan": "auto", "layout": layout, "zero_stage": stage, "sequence_parallel": bool(words)}


class Tokens(L.LightningModule):
    """A Llama with scaled logits; records losses, the gradients of the last step and gradient norms."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Llama(LlamaArgs(dtype=torch.float64, n_kv_heads=4, hidden_dim=38, vocab_size=VOCAB))
        self.scale = nn.Parameter(torch.full((VOCAB,), 1.25, dtype=torch.float64))
        self.optimizer = optimizer
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch[0][0], batch[1][0]
        loss = F.cross_entropy((self.model(tokens) * self.scale).flatten(0, 1), targets.flatten())
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        self.gradients = {
            name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
            for name, p in self.named_parameters()
        }

    def on_train_batch_end(self, *_: Any) -> None:
        if "gradient_norm" in self.trainer.callback_metrics:
            self.norms.append(self.trainer.callback_metrics["gradient_norm"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(num_data: int, data_rank: int, accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """Return this data rank's rows of one device's batches; inputs and targets are `[4 / num_data, 9]`."""
    rows = 4 // num_data
    return [
        (inputs[data_rank * rows : (data_rank + 1) * rows], targets[data_rank * rows : (data_rank + 1) * rows])
        for inputs, targets in token_batches(STEPS * accumulate, VOCAB)
    ]


def fit(
    rank: int,
    world_size: int,
    folder: str,
    mesh: str,
    stage: int | None,
    optimizer: str,
    accumulate: int,
    clip: Any,
    accelerator: str = "cpu",
) -> dict[str, Any]:
    set_torchrun_environment(rank, world_size)
    strategy = WeftModelParallelStrategy(**mesh_settings(mesh, stage)) if mesh else "auto"
    tp_size = MESHES[mesh][2] if mesh else 1
    model = Tokens(optimizer)
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "log_every_n_steps": 1}
    run = trainer(world_size, strategy, folder, accelerator=accelerator, **options)
    run.fit(model, torch.utils.data.DataLoader(batches(world_size // tp_size, rank // tp_size, accumulate)))
    gradients, fitted = ({k: v.cpu() for k, v in each.items()} for each in (model.gradients, weights(model)))
    return {"losses": model.losses, "gradients": gradients, "weights": fitted, "norms": model.norms}


@functools.cache
def one_device(folder: str, optimizer: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    """Return the results of one device without weft."""
    case = {"optimizer": optimizer, "accumulate": accumulate, "clip": clip}
    [result] = run_on_ranks(1, fit, folder=folder, mesh="", stage=None, **case)
    return result


def assert_matches_one_device(
    folder: str,
    mesh: str,
    stage: int | None,
    optimizer: str,
    accumulate: int,
    clip: float | None,
    fit_on_rank: Callable[..., dict[str, Any]] = fit,
) -> None:
    """Compare losses, the last step's gradients and the weights after STEPS steps with one device."""
    expected = one_device(folder, optimizer, accumulate, clip)
    tp_size, world_size = MESHES[mesh][2], torch.Size(MESHES[mesh]).numel()
    case = {"optimizer": optimizer, "accumulate": accumulate, "clip": clip}
    options = {"keeps_groups": fit_on_rank is fit}  # another function may create process groups
    results = run_on_ranks(world_size, fit_on_rank, **options, folder=folder, mesh=mesh, stage=stage, **case)
    losses = torch.tensor([result["losses"] for result in results[::tp_size]], dtype=torch.float64).mean(0)
    # AdamW divides by the magnitude of gradients, which amplifies the rounding errors of small gradients.
    tolerance = 1e-10 if optimizer == "SGD" else 1e-8
    torch.testing.assert_close(losses, torch.tensor(expected["losses"], dtype=torch.float64), rtol=tolerance, atol=0)
    for result in results:
        for kind in ("gradients", "weights"):
            for name, value in expected[kind].items():
                bound = tolerance * max(value.norm().item(), 1e-3)
                difference = (result[kind][name] - value).norm().item()
                assert difference <= bound, f"{kind} of {name}: {difference:.3g} apart, allowed {bound:.3g}"
