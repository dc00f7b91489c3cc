"""The errors of Lightning's ModelParallelStrategy about a Trainer's module, raised before anything is sent."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module

from weft._plugin.in_backward import is_overridden


def check_module(owner: str, module: Any, model: Module, has_plan: bool) -> None:
    """Raise TypeError if nothing would shard the module, or if torch's first FSDP has wrapped it.

    The texts contain those of Lightning.

    Args:
        owner: the name of the strategy's class.
        module: the LightningModule.
        model: the module that is sharded.
        has_plan: whether weft shards the module.
    """
    if not has_plan and not is_overridden("configure_model", module, "LightningModule"):
        raise TypeError(
            f"When using the {owner}, you are required to override the `configure_model()` hook in the LightningModule "
            f"and apply parallelization there, because it got no plan; or pass plan='auto', and weft shards the "
            f"{type(module).__name__}."
        )
    if any(isinstance(inner, FullyShardedDataParallel) for inner in model.modules()):
        raise TypeError(
            "Found modules that are wrapped with `torch.distributed.fsdp.FullyShardedDataParallel`. The "
            f"`{owner}` only supports the new FSDP2 APIs in PyTorch >= 2.4; use `fully_shard`, or a plan."
        )
