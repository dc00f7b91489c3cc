"""The mixin of BatchSizeFinder, a callback that chooses the batch size; `factory.py` adds the base class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from weft import memory
from weft._plugin.console import Console
from weft._plugin.monitors import num_steps
from weft._plugin.strategy_mixin import StrategyMixin
from weft._plugin.throughput_monitor import first_dim

_CONFIRMED_STEPS = 2  # the first creates the states of the optimizer


class BatchSizeMixin:
    """Sets the batch size to the largest with which training fits into the memory of a device.

    When fit starts, rank 0 searches by dry runs of the module and its first batch, whose rows are repeated or left out;
    nothing is trained for that, and no device runs out of memory. The batch size is set before the loader is made, in
    the attribute of the LightningModule or the LightningDataModule, or in its `hparams`. The peak of the first two
    steps of the training is logged; above the limit, it is a warning. For that, `weft.memory.reset_peak` is called when
    training starts. A checkpoint has the batch size, so that a run that resumes keeps it.

    The script must call the Trainer under `if __name__ == "__main__"`. Batches must have a row for each sample, and
    further batches no longer rows than the first.

    Args:
        memory_limit: the most bytes of a device, such as "72GB"; None: that of the strategy, else nine tenths of a
            GPU's memory, or eight tenths of an equal share of the host's for CPU ranks. Tensors of data sets do not
            count.
        batch_arg_name: the attribute from which `train_dataloader` reads the batch size.
        max_batch_size: the largest that is tried, such as the samples of the data set.

    Attributes:
        batch_size: of each data-parallel rank; None: fit has not started.
        predicted_bytes: of a device with this batch size; 0: it comes from a checkpoint, and the search has found
            another one.
        measured_bytes: the peak of two steps, of the rank with the most, without tensors that were there before and
            belong to no model; None: they have not ended.
    """

    def __init__(
        self,
        memory_limit: str | int | None = None,
        batch_arg_name: str = "batch_size",
        max_batch_size: int = 8192,
    ) -> None:
        super().__init__()
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise ValueError(f"BatchSizeFinder got max_batch_size={max_batch_size!r}; pass a number from 1.")
        if memory_limit is not None:
            from weft.strategy.tuning.request import read_bytes

            try:
                read_bytes(memory_limit)
            except ValueError as error:
                raise ValueError(f"BatchSizeFinder got memory_limit={memory_limit!r}: {error}") from None
        self.batch_size: int | None = None
        self.predicted_bytes = 0
        self.measured_bytes: int | None = None
        self._memory_limit = memory_limit
        self._limit = 0
        self._name = batch_arg_name
        self._max_batch_size = max_batch_size
        self._holders: list[Any] = []
        self._first_step = 0
        self._found_size = 0  # by the search
        self._is_fitting = False
        self._earlier_communication = 0  # bytes of staging buffers of earlier runs in this process
        self._not_own_bytes = 0  # that are counted when training starts, and do not belong to it

    # ---- the search ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Find the batch size and set it, once; collective.

        Raises:
            TypeError: the strategy is not weft's.
            ValueError: there is no such attribute, the batches do not come from the module or a data module, an option
                is in no dry run, or no batch fits.
            RuntimeError: the module raised an error.
        """
        self._is_fitting = stage == "fit"
        if not self._is_fitting:
            return
        if not isinstance(trainer.strategy, StrategyMixin):
            raise TypeError(
                f"BatchSizeFinder got a Trainer with a {type(trainer.strategy).__name__}; pass strategy='weft'."
            )
        self._find_holders(trainer, pl_module)
        strategy: Any = trainer.strategy
        if strategy.root_device.type != "cuda":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tensors that exist already are not those of the training
                memory.track()
            self._earlier_communication = memory.by_category()["communication"]
        if self.batch_size is None:
            given = _get(self._holders[0], self._name)
            found = strategy.largest_batch(self._memory_limit, given_rows=given, max_rows=self._max_batch_size)
            self.batch_size = self._found_size = found.num_rows
            self.predicted_bytes, self._limit = found.predicted_bytes, found.memory_limit
            bound = " (the largest that is tried)" if found.num_rows == self._max_batch_size else ""
            bound = f" (more rows raise an error: {found.error.rstrip('.')})" if found.error else bound
            Console(strategy.fabric_module).log(
                f"weft: {self._name}={found.num_rows}{bound}, by {found.num_dry_runs} dry runs: "
                f"{found.predicted_bytes / 1e9:.4g} GB predicted on a device of {found.memory_limit / 1e9:.4g} GB."
            )
        self._set(self.batch_size)

    def _find_holders(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.fit_loop._data_source.is_module():
            raise ValueError(
                "BatchSizeFinder got loaders that were passed to fit, whose batch size is fixed; return them from "
                "train_dataloader of the LightningModule or of a LightningDataModule."
            )
        self._holders = list(_holders_of(trainer, pl_module, self._name))
        if not self._holders:
            raise ValueError(
                f"BatchSizeFinder found no attribute {self._name!r} in the LightningModule, the LightningDataModule or "
                "their hparams; set it there, and read it in train_dataloader."
            )

    def _set(self, batch_size: int) -> None:
        for holder in self._holders:
            if isinstance(holder, MutableMapping):
                holder[self._name] = batch_size
            else:
                setattr(holder, self._name, batch_size)

    # ---- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the batch size of the run that has written the checkpoint."""
        saved = state_dict["batch_size"]
        if self._is_fitting and saved is not None and saved != self.batch_size:
            self.batch_size, self.predicted_bytes, self._limit = saved, 0, 0
            self._set(saved)

    # ---- the steps that confirm the prediction -----------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.predicted_bytes = self.predicted_bytes or None
        self._first_step = num_steps(trainer, pl_module)
        self.measured_bytes = None
        if memory.is_tracking():  # not on CUDA, where all tensors take the memory of the device
            usage = memory.by_category()
            communication = usage["communication"] - self._earlier_communication
            own = _bytes_of(pl_module, trainer.optimizers) + communication
            self._not_own_bytes = sum(usage.values()) - own
        memory.reset_peak(strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Raise RuntimeError if the loader has the batch size of the search, and a checkpoint another one."""
        if self.measured_bytes is None and self._found_size not in (0, self.batch_size):
            rows = first_dim(batch)
            if rows == self._found_size:
                raise RuntimeError(
                    f"BatchSizeFinder got batches of {rows} rows from a loader that was made before the checkpoint was "
                    f"read, and the checkpoint has {self._name}={self.batch_size}; do not use the loader before "
                    f"training, such as by trainer.estimated_stepping_batches, or set {self._name} yourself."
                )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After two steps, compare the peak with the limit; collective."""
        if self.measured_bytes is not None or num_steps(trainer, pl_module) < self._first_step + _CONFIRMED_STEPS:
            return
        device = trainer.strategy.root_device
        not_own_bytes = 0 if device.type == "cuda" else self._not_own_bytes
        peak = torch.tensor(memory.peak(device) - not_own_bytes, device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.measured_bytes = int(peak)
        console = Console(trainer.strategy.fabric_module)
        taken = f"{self._name}={self.batch_size} takes at most {self.measured_bytes / 1e9:.4g} GB in the first steps"
        if 0 < self._limit < self.measured_bytes:
            console.warn(
                f"weft: {taken}, {self.predicted_bytes / 1e9:.4g} GB were predicted, and the limit is "
                f"{self._limit / 1e9:.4g} GB; pass a lower memory_limit to BatchSizeFinder."
            )
        else:
            console.log(f"weft: {taken}.")


def _bytes_of(module: Any, optimizers: list[Any]) -> int:
    """Return the bytes of this rank's parameters, gradients, buffers and optimizer states."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [leaf for each in optimizers for leaf in tree_leaves(each.state) if isinstance(leaf, torch.Tensor)]
    held = {}
    for tensor in (*parameters, *gradients, *module.buffers(), *states):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def _holders_of(trainer: Any, pl_module: Any, name: str) -> Iterator[Any]:
    """Yield the modules, or mappings, that have the attribute; those of the one that makes the loader first."""
    source = trainer.fit_loop._data_source.instance
    others = [each for each in (pl_module, trainer.datamodule) if each is not None and each is not source]
    for owner in (source, *others):
        if hasattr(owner, name):
            yield owner
        hyperparameters = getattr(owner, "hparams", {})
        if name in hyperparameters:
            yield hyperparameters


def _get(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, MutableMapping) else getattr(holder, name)
