"""The mixin of PretrainedCheckpoint, a callback that saves the model for transformers; `factory.py` adds the base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from weft._plugin.monitors import check_at_least_one, num_steps
from weft._plugin.strategy_mixin import StrategyMixin


class PretrainedCheckpointMixin:
    """Saves the model in the layout of Hugging Face, as `weft.save_pretrained` does, during and after training.

    The directories are `dirpath/step=N`, N being the number of steps so far as Lightning counts them; one that exists,
    such as of an earlier run that was resumed before it, is kept. These directories hold the weights only: to resume
    training, use checkpoints of Lightning.

    Args:
        dirpath: the folder of the directories.
        every_n_steps: the steps between two directories; None: save at the end of training only.
        module: the name of the module of the LightningModule that is saved, such as "model"; None: the only model of
            transformers in the LightningModule, else the LightningModule itself.
        max_shard_size: as in `weft.save_pretrained`.
        dtype: as in `weft.save_pretrained`.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        every_n_steps: int | None = None,
        module: str | None = None,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        from weft.strategy.pretrained.output import size_of

        if every_n_steps is not None:
            check_at_least_one("PretrainedCheckpoint", "every_n_steps", every_n_steps)
        size_of(max_shard_size)  # raises ValueError now, not after hours of training
        self._folder = Path(dirpath)
        self._every_n_steps = every_n_steps
        self._module = module
        self._options: dict[str, Any] = {"max_shard_size": max_shard_size, "dtype": dtype}
        self._saved_step = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise an error if the strategy or the module's name is wrong."""
        if not isinstance(trainer.strategy, StrategyMixin):
            raise TypeError(
                f"PretrainedCheckpoint got a Trainer with a {type(trainer.strategy).__name__}; pass strategy='weft', "
                "or call the model's own save_pretrained."
            )
        from weft.strategy.sharding.state import original_class

        if self._module is not None and self._module not in dict(pl_module.named_modules()):
            raise ValueError(
                f"PretrainedCheckpoint got module={self._module!r}, which {original_class(pl_module).__name__} lacks; "
                "pass the name of one of its modules."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._saved_step = num_steps(trainer, pl_module)  # of a resumed run: the steps before

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step = num_steps(trainer, pl_module)
        if self._every_n_steps is not None and step - self._saved_step >= self._every_n_steps:
            self._save(trainer, pl_module, step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        step = num_steps(trainer, pl_module)
        if step > self._saved_step:
            self._save(trainer, pl_module, step)

    def _save(self, trainer: Any, pl_module: Any, step: int) -> None:
        self._saved_step = step
        directory = self._folder / f"step={step}"
        # All ranks must agree, also if only some see the files of rank 0.
        if not trainer.strategy.broadcast(os.path.lexists(directory)):
            module = pl_module if self._module is None else pl_module.get_submodule(self._module)
            trainer.strategy.save_pretrained(directory, module, **self._options)
