"""The arguments of a dry run of what a Trainer is about to train."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from weft._plugin.engine import Engine

_USABLE = 0.9  # of a GPU's memory: the rest is for fragments, workspaces of libraries and the context


class FirstBatch:
    """Makes the first batch of a loader, of a LightningDataModule or of a LightningModule, in the dry run's process."""

    def __init__(self, source: Any) -> None:
        if isinstance(source, torch.nn.Module):
            source = unattached(source)
        elif hasattr(source, "train_dataloader"):
            source = copy.copy(source)
            source.trainer = None  # cannot be pickled
        self._source = source

    def __call__(self) -> Any:
        loader = self._source
        if hasattr(loader, "train_dataloader"):
            loader.prepare_data()
            loader.setup("fit")
            loader = loader.train_dataloader()
        if loader is None or isinstance(loader, (dict, list, tuple)) or hasattr(loader, "iterables"):
            raise ValueError(f"estimate: the batches come from a {type(loader).__name__}; pass one DataLoader.")
        return next(iter(loader))


def unattached(module: Any) -> Any:
    """Return a LightningModule with the same parameters that can be sent to another process."""
    module = copy.copy(module)  # leaves its Trainer out
    module._device_mesh = None
    return module


def options_of_training(engine: Engine) -> dict[str, Any]:
    """Return the options of `estimate_module` that are also options of the strategy, or follow from the Trainer."""
    options = engine.options
    return {
        "plan": options.plan,
        "precision": str(engine.precision.precision),
        "zero_stage": options.zero_stage,
        "sequence_parallel": options.sequence_parallel,
        "activation_checkpointing": options.activation_checkpointing,
        "optimizer_in_backward": options.optimizer_in_backward,
        "fused_optimizers": options.fused_optimizers,
        "optimizer_state": options.optimizer_state,
        "master_weights": options.master_weights,
    }


def memory_limit_of(engine: Engine, given: int | str | None, devices_per_host: int) -> int | str:
    """Return the limit given; else the usable part of a GPU's memory, or a CPU rank's share of the host's."""
    if given is not None:
        return given
    if engine.device.type == "cpu":
        from weft.strategy.tuning.request import host_bytes

        return host_bytes() // devices_per_host
    return int(torch.cuda.get_device_properties(engine.device).total_memory * _USABLE)
