"""Mixins that let Lightning's callbacks that average weights average the shards of each rank.

Lightning's callbacks copy the full model in `setup`, before it is sharded, and update and swap the parameters and
buffers of model and copy pairwise. `with_shards` puts a mixin in front of such a callback's class. The callback's own
code still decides when to update and when to swap; the mixin gives it the shards of the model, once they exist, in
place of the model.

NOTE on names: `_average_model` and, of WeightAveraging, `_swap_models` and `_copy_average_to_current`, and of
StochasticWeightAveraging `_scheduler_state`, `_clear_schedulers` and `_load_average_model_state` are protected members
of Lightning's classes. Lightning has no public equivalents.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft._plugin.averaged_entries import AVERAGE, CURRENT

if TYPE_CHECKING:
    from weft._plugin.averaging import Averaging
    from weft._plugin.stock_strategies import StockAverageCallback
else:
    StockAverageCallback = object


class AverageMixin(StockAverageCallback):
    """The part that both callbacks have in common.

    Attributes:
        averaging: the part of the strategy whose model is averaged.
        is_swapped: whether the model has the average's values, and the average has the model's.
    """

    averaging: Averaging
    is_swapped: bool = False
    _module: Callable[[], Any]  # a weak reference to the averaged module

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before training, do nothing: `begin_average` sets up. Otherwise run the callback's setup without a copy."""
        if not self.averaging.belongs_to(trainer.strategy):  # the callback is used again, in another Trainer
            self.__class__ = type(self).__bases__[1]
            self.setup(trainer, pl_module, stage)
            return
        if stage == "fit":
            return
        if self._average_model is not None and pl_module is not self._module():
            self._average_model = None
        with _copied_as(pl_module, lambda: self._average_model):
            super().setup(trainer, pl_module, stage)

    def begin_average(self, trainer: Any) -> None:
        """Run the callback's setup for training, which copies the shards of the Trainer's module."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        module = trainer.lightning_module
        self._module, self.is_swapped = weakref.ref(module), False
        with _copied_as(module, lambda: LocalShards(module).copy()):
            super().setup(trainer, module, "fit")

    @property
    def has_average(self) -> bool:
        """Return whether there is an average, which exists from the start of training."""
        return self._average_model is not None

    def shards_of_average(self) -> Any:
        """Return the average's `LocalShards`."""
        return self._average_model

    def swap(self) -> None:
        """Exchange the values of the model and the average; no communication."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        LocalShards(self._module()).swap_with(self.shards_of_average())
        self.is_swapped = not self.is_swapped

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the values of the model and the average are exchanged."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def load_average(self, load: Callable[[str], bool], is_fitting: bool) -> None:
        """Load the average from the checkpoint that has just been loaded into the model; collective.

        load: loads the entry of that name into the model; returns whether the checkpoint has it.
        """
        raise NotImplementedError


class WeightAveragingMixin(AverageMixin):
    """In front of WeightAveraging and its subclasses, such as EMAWeightAveraging."""

    def begin_average(self, trainer: Any) -> None:
        """See AverageMixin."""
        from weft.strategy.data_parallel.local_shards import ShardAverage

        super().begin_average(trainer)
        self._average_model.__class__ = ShardAverage

    def shards_of_average(self) -> Any:
        """See AverageMixin."""
        return self._average_model.module

    def _swap_models(self, pl_module: Any) -> None:
        self.swap()

    def _copy_average_to_current(self, pl_module: Any) -> None:
        from weft.strategy.data_parallel.local_shards import LocalShards

        LocalShards(pl_module).copy_from(self.shards_of_average())

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Like the stock hook: the average becomes "state_dict"; collective."""
        if not self.has_average:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        of_model = checkpoint["state_dict"]
        with self.swapped():
            other = self.averaging.copied_state()
        checkpoint["state_dict"], checkpoint[CURRENT] = (of_model, other) if self.is_swapped else (other, of_model)
        checkpoint["averaging_state"] = {"n_averaged": self._average_model.n_averaged.to("cpu", copy=True)}

    def load_average(self, load: Callable[[str], bool], is_fitting: bool) -> None:
        """See AverageMixin; "state_dict", which the model has, is the average."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        self.shards_of_average().copy_from(LocalShards(self._module()))
        if is_fitting:
            load(CURRENT)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Like the stock hook, after `load_average`."""
        if not self.has_average:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
        elif "averaging_state" in checkpoint:
            self._average_model.n_averaged.fill_(int(checkpoint["averaging_state"]["n_averaged"]))
        else:
            self.averaging.warn(
                "the checkpoint was not saved with the WeightAveraging callback: its weights become those of the model "
                "and of the average."
            )


class StochasticMixin(AverageMixin):
    """In front of StochasticWeightAveraging and its subclasses."""

    def update_parameters(self, average_model: nn.Module, model: nn.Module, n_averaged: Tensor, avg_fn: Any) -> None:
        """Like the stock function, with this rank's shards of the model; no communication."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        super().update_parameters(average_model, LocalShards(model), n_averaged, avg_fn)

    def transfer_weights(self, src_pl_module: nn.Module, dst_pl_module: nn.Module) -> None:
        """Like the stock function, to this rank's shards of the model."""
        from weft.strategy.data_parallel.local_shards import LocalShards

        super().transfer_weights(src_pl_module, LocalShards(dst_pl_module))

    def state_dict(self) -> dict[str, Any]:
        """Like the stock method; the average's state is that of the model; collective."""
        state: dict[str, Any] = super().state_dict()
        if self.has_average:
            with self.swapped():
                state[AVERAGE] = self.averaging.copied_state()
        return state

    def load_average(self, load: Callable[[str], bool], is_fitting: bool) -> None:
        """See AverageMixin."""
        if is_fitting:
            with self.swapped():
                load(AVERAGE)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like the stock method, after `load_average`; the schedulers are cleared, which the stock on_fit_start does.

        The strategy restores a checkpoint after that hook.
        """
        super().load_state_dict(state_dict)
        trainer = self.averaging.trainer
        if trainer.state.fn == "fit" and self._scheduler_state is not None:
            self._clear_schedulers(trainer)

    def _load_average_model_state(self, model_state: Any) -> None:
        """Do nothing: `load_average` has loaded it."""


_MIXINS = {"WeightAveraging": WeightAveragingMixin, "StochasticWeightAveraging": StochasticMixin}


@functools.cache
def with_shards(cls: type) -> type | None:
    """Return the class of a callback with a mixin in front; None: the callback averages no weights."""
    if issubclass(cls, AverageMixin):
        return cls
    stock = (each for each in cls.__mro__ if each.__module__.startswith(("lightning.", "pytorch_lightning.")))
    mixin = next((_MIXINS[each.__name__] for each in stock if each.__name__ in _MIXINS), None)
    if mixin is None:
        return None
    # Lightning derives the callback's key in checkpoints from the name of its class.
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (mixin, cls), names)


@contextmanager
def _copied_as(module: Any, copy: Callable[[], Any]) -> Iterator[None]:
    """Inside, `deepcopy(module)` returns what `copy` returns, and `configure_model`, which has run, does nothing."""
    base: Any = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    shadows = {"__deepcopy__": lambda memo: copy(), "configure_model": base.configure_model.__get__(module)}
    before = {name: vars(module)[name] for name in shadows if name in vars(module)}
    vars(module).update(shadows)
    try:
        yield
    finally:
        for name in shadows:
            del vars(module)[name]
        vars(module).update(before)
