"""Saves and loads the Trainer's checkpoints: directories of shards, or files that any Trainer loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from weft._plugin import checkpoint as checkpoints
from weft._plugin.consolidate import DIRECTORY_NOTE
from weft._plugin.optimizer_state import full_state, merge_parameter_groups, named_state
from weft._plugin.staged_module import without_step_state

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import TrainerMembers
else:
    TrainerMembers = object


class TrainerCheckpointsMixin(TrainerMembers):
    """The checkpoint methods of the Trainer's strategy; without a plan they call the stock ones."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state that this rank saves; only the last stage saves modules outside of the stages."""
        state = super().lightning_module_state_dict()
        if self._pipeline is None or self._pipeline.has_last_stage:
            return state
        assert self._target is not None
        if self._target.name == "":
            return without_step_state(self.lightning_module, state)
        prefix = f"{self._target.name}."
        return {name: value for name, value in state.items() if name.startswith(prefix)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for `save_checkpoint`; collective."""
        if self._plan is None:
            return super().optimizer_state(optimizer)
        inner = getattr(optimizer, "optimizer", optimizer)  # LightningOptimizer wraps the user's
        if self._save_distributed_checkpoint:
            state = named_state(self.model, inner)
            if self._pipeline is not None:
                merge_parameter_groups(state, self.pipeline_group)
            return state
        return full_state(inner, keep=self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint as `save_distributed_checkpoint` says; collective."""
        if self._plan is None or not self._save_distributed_checkpoint or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        stages = None if self._pipeline is None else self.pipeline_group
        path = Path(self.broadcast(filepath))
        checkpoints.save_directory(checkpoint, path, self.is_global_zero, self.barrier, stages)
        self._log_once(DIRECTORY_NOTE)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory or a file, saved at any number of ranks, into the live model and optimizers; collective."""
        if self._plan is None:
            return super().load_checkpoint(checkpoint_path, **checkpoints.without_none(weights_only=weights_only))
        path = Path(self.broadcast(checkpoint_path))
        load = checkpoints.load_directory if checkpoints.is_directory(path) else checkpoints.load_file
        # A test after a fit still has the optimizers of the fit, which may belong to another model.
        optimizers = self.optimizers if self._is_fitting else []
        with torch.no_grad():
            strict = self.lightning_module.strict_loading
            return load(path, self.model, optimizers, strict, weights_only, self._full_model)
