"""Averages of weights (EMA, SWA) of a sharded model, by Lightning's callbacks: what the strategy does for them.

Each rank averages its own shards, so that averages need no communication. See `averaging_callbacks`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from weft._plugin.averaged_entries import take_entries
from weft._plugin.averaging_callbacks import AverageMixin, StochasticMixin, with_shards
from weft._plugin.trainer_checkpoints import load_entry

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.optimizer_state import FullModel
    from weft._plugin.stock_strategies import StockTrainerStrategy


class Averaging:
    """Lets the callbacks of a Trainer that average weights average the shards of the strategy's model."""

    def __init__(self, engine: Engine, strategy: StockTrainerStrategy) -> None:
        self._engine, self._strategy = engine, strategy
        self._callbacks: list[AverageMixin] = []

    @property
    def trainer(self) -> Any:
        """Return the strategy's Trainer."""
        return self._strategy.lightning_module.trainer

    def belongs_to(self, strategy: Any) -> bool:
        """Return whether this is a part of `strategy`."""
        return strategy is self._strategy

    def adapt_callbacks(self) -> None:
        """Give the Trainer's callbacks that average weights a class that averages shards, before their `setup`.

        Does nothing without a plan, when the user's code shards the model.
        """
        self._callbacks = []
        if self._engine.plan is None:
            return
        for callback in self.trainer.callbacks:
            own: Any = type(callback)
            if (cls := with_shards(own)) is not None:
                callback.__class__ = cls
                callback.averaging = self
                self._callbacks.append(callback)

    def check(self, module: Any) -> None:
        """Raise ValueError on all ranks for settings that averages do not support; before the model is sharded."""
        name = self._engine.name
        if len(self._callbacks) > 1:
            shown = " and ".join(type(callback).__name__ for callback in self._callbacks)
            raise ValueError(
                f"{name} got the callbacks {shown}, and expected at most one that averages weights, because a "
                "checkpoint has one average; leave the others out."
            )
        for callback in self._callbacks:
            self._check_one(type(callback).__name__, callback, module)

    def _check_one(self, callback_name: str, callback: Any, module: Any) -> None:
        options, name = self._engine.options, self._engine.name
        if options.master_weights != "float32":
            raise ValueError(
                f"{name} got master_weights={options.master_weights!r} with the callback {callback_name}, which would "
                "average the bfloat16 part of the weights alone; pass master_weights='float32', or leave it out."
            )
        if not options.has_stages or not isinstance(callback, StochasticMixin):
            return
        # After an earlier run, a rank has only the layers of its own stages.
        if self._strategy.reduce_boolean_decision(callback.pl_module_contains_batch_norm(module), all=False):
            raise ValueError(
                f"{name} got pipeline_cuts and a model with batch norm with the callback {callback_name}, which "
                "updates the statistics by training steps without a backward, and a pipeline's step runs its "
                "backwards; pass WeightAveraging, which averages the statistics, or a layout without 'pp'."
            )

    def begin(self) -> None:
        """Copy the shards of the model for the average; the model is complete, and on its device."""
        for callback in self._callbacks:
            callback.begin_average(self.trainer)

    def copied_state(self) -> dict[str, Any]:
        """Return the model's state as it is saved, in memory of its own; collective for files."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        shards = LocalShards(self._strategy.lightning_module)
        storages = {_storage(each) for each in (*shards.parameters(), *shards.buffers())}
        state: dict[str, Any] = self._strategy.lightning_module_state_dict()
        copied: dict[str, Any] = tree_map_only(Tensor, partial(_copy_if_shared, storages), state)
        return copied

    def load(self, path: Any, loaded: dict[str, Any], is_fitting: bool, full_model: FullModel | None) -> None:
        """Load the averages from a checkpoint that has just been loaded into the model; collective.

        loaded: the other entries of the checkpoint; a file's states of second models are removed.
        full_model: as for `checkpoint.load_directory`.
        """
        entries = take_entries(loaded) if self._callbacks else {}
        for callback in self._callbacks:
            if callback.has_average:
                load = partial(load_entry, self._engine, self._strategy, path, entries, full_model)
                callback.load_average(load, is_fitting)

    def warn(self, text: str) -> None:
        """Warn on rank 0."""
        self._engine.console.warn(f"weft: {text}")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy_if_shared(storages: set[int], tensor: Tensor) -> Tensor:
    """Return a tensor of a state; a copy in CPU memory if it shares one of the storages."""
    from weft.strategy.data_parallel.local import distributed, local_shard

    local = local_shard(tensor)
    if _storage(local) not in storages:
        return tensor
    copied = local.to("cpu", copy=True)
    if not isinstance(tensor, DTensor):
        return copied
    return distributed(copied, tensor, tensor.shape, tensor.stride())
