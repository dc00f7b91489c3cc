"""Sets up data loaders: keeps their order and compares their lengths between ranks.

The ranks of a tensor-parallel or context-parallel group and the stages of a pipeline have the same data-parallel rank
and get the same batches. Data-parallel ranks get different batches; they must run equally many batches only if they
exchange tensors in every batch.

Lengths are gathered when a loader is set up. Under the Trainer, lengths of validation, test and prediction loaders are
compared at once; if lengths of training loaders differ, the next training step compares the numbers of batches that
will run. If lengths are unknown or unreliable or, under Fabric, differ, a `LockstepLoader` checks before each batch
that all ranks or none have another batch. With check_batches=0 and check_batches_every=0, nothing is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.utils.data import DistributedSampler

from weft._plugin.loader_check import (
    UNKNOWN,
    LoaderState,
    LockstepLoader,
    check_equal_states,
    describe_length,
    describe_next,
    gather,
    has_reliable_length,
    in_lockstep,
    is_stateful,
    loader_length,
)
from weft._plugin.resumable_loaders import ResumableLoader, make_resumable

if TYPE_CHECKING:
    from weft._plugin.engine import Engine
    from weft._plugin.stock_strategies import StockTrainerStrategy

_NO_LIMIT = 2**62


class Loaders:
    """The base class for the loaders of the Trainer and of Fabric."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def are_compared(self) -> bool:
        """Return whether lengths are compared between ranks."""
        return self._engine.batch_check.is_on and self._engine.mesh.size() > 1

    def begin_epoch(self) -> None:
        """Request that the next batch be compared between ranks."""
        for check in (self._engine.batch_check, self._engine.stages.batch_check):
            check.begin_epoch()

    def gather_states(self, *numbers: int, from_all_ranks: bool) -> list[LoaderState]:
        """Return the `numbers` of all ranks, or of the ranks that get the same batches as this rank; collective."""
        engine = self._engine
        stage_groups = [engine.stages.group] if engine.options.has_stages else []
        stage = stage_groups[0].rank() if stage_groups else 0
        state = LoaderState(dist.get_rank(), engine.data_axes.rank, stage, tuple(numbers))
        world = dist.group.WORLD
        assert world is not None
        groups = [world] if from_all_ranks else [engine.same_data_group, *stage_groups]
        return gather(state, groups, engine.device)

    def check_next(self, loader_name: str, advice: str, exchanged: str | None, has_batch: bool) -> None:
        """Raise ValueError if some ranks have another batch and others do not.

        Collective over all ranks, or, if `exchanged` is None, over the ranks that get the same batches as this rank.

        exchanged: the tensors that data-parallel ranks exchange in every batch, such as "gradients"; None: none.
        """
        states = self.gather_states(int(has_batch), from_all_ranks=exchanged is not None)
        check_equal_states(
            states, exchanged, describe_next, loader_name, advice, same_data_kind=self._engine.same_data_kind
        )


class FabricLoaders(Loaders):
    """The loaders of `fabric.setup_dataloaders`; the user's code loops over them."""

    def with_length_check(self, dataloader: Any, modules: Sequence[Module]) -> Any:
        """Return a loader that checks before each batch that all ranks have one, unless lengths are known to be equal.

        Collective.

        modules: the strategy's list, to which modules set up later are appended. Data-parallel ranks must run equally
            many batches if FSDP2 shards one of these modules.
        """
        if not self.are_compared:
            return dataloader
        length = loader_length(dataloader) if has_reliable_length(dataloader) else UNKNOWN
        states = self.gather_states(length, from_all_ranks=True)
        return in_lockstep(dataloader, partial(self._begin_loop, states, modules))

    def _begin_loop(self, states: list[LoaderState], modules: Sequence[Module]) -> Any:
        """Start comparing a loop's batches; return the function that LockstepLoader calls before each batch, or None.

        `states`: the states of all ranks; the number in each is the loader's length.
        """
        self.begin_epoch()
        is_sharded = any(isinstance(inner, FSDPModule) for module in modules for inner in module.modules())
        exchanged = "parameters" if is_sharded else None
        lengths = {s.numbers for s in states if is_sharded or s.data_rank == self._engine.data_axes.rank}
        if len(lengths) == 1 and lengths != {(UNKNOWN,)}:
            return None
        advice = "give all ranks loaders of one length, or leave the loop after the same number of batches on each"
        return partial(self.check_next, "a data loader", advice, exchanged)


class TrainerLoaders(Loaders):
    """The loaders of the Trainer's loops."""

    def __init__(self, engine: Engine, strategy: StockTrainerStrategy) -> None:
        super().__init__(engine)
        self._strategy = strategy
        self._training_lengths_differ = False
        self._has_logged_order = False
        self._positions: list[dict[str, Any] | None] = []

    def prepare(self, trainer: Any) -> None:
        """With a plan, disable Lightning's distributed sampler on one data rank; call it before loaders are set up."""
        self._training_lengths_differ = False
        self._positions = []  # of a run that has ended before its loaders were set up
        if self._engine.plan is not None and self._engine.data_axes.size == 1:
            # Every rank gets all the data. Lightning's distributed sampler would shuffle any training data.
            trainer._accelerator_connector.use_distributed_sampler = False

    def with_length_check(self, dataloader: Any) -> Any:
        """Return the loader, or a LockstepLoader if a rank's length is unknown or unreliable; collective.

        Makes a loader of training data resumable.

        Raises:
            ValueError: on all ranks, if ranks that must run equally many batches have different numbers. For
                training: only if some ranks' loaders have a length and others none, or some have batches and others
                none; `begin_training_step` compares the numbers.
        """
        trainer = self._strategy.lightning_module.trainer
        if trainer.training:
            self._log_order(dataloader)
            dataloader = self._resumable(dataloader)
        length = loader_length(dataloader)
        records = trainer.training and length == UNKNOWN and is_stateful(dataloader)
        if not self.are_compared:
            return in_lockstep(dataloader, lambda: None, records) if records else dataloader
        loop, limit_name = _loop_of(trainer)
        limited = _limited(length, getattr(trainer, limit_name))
        states = self.gather_states(length, limited, int(has_reliable_length(dataloader)), from_all_ranks=True)
        exchanged = self._exchanged_by_data_ranks(loop)
        loader_name, advice = f"the {loop} loader", _advice(limit_name)

        def key(numbers: tuple[int, ...]) -> Any:
            length, limited, _ = numbers
            # The number of training batches depends on all training loaders and on max_steps.
            return limited if loop != "training" else (length == UNKNOWN, length == 0)

        kind = self._engine.same_data_kind
        check_equal_states(states, exchanged, describe_length, loader_name, advice, key, same_data_kind=kind)
        lengths, _, are_reliable = zip(*(s.numbers for s in states), strict=True)
        if loop == "training":
            self._training_lengths_differ |= len(set(lengths)) > 1
        if all(are_reliable):
            return dataloader
        return in_lockstep(dataloader, lambda: partial(self._check_next_batch, loop, loader_name, advice), records)

    def resume(self, positions: list[dict[str, Any] | None]) -> None:
        """Let the training loaders, when they are set up next, begin at the positions of a checkpoint."""
        self._positions = list(positions)
        if positions:
            # It says that the loaders are not resumable, because Lightning does not know of these positions.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")

    def _resumable(self, dataloader: Any) -> Any:
        """Return a training loader that is resumable, if it can be, and begins at the next position."""
        dataloader = make_resumable(dataloader, self._engine.data_axes.size)
        position = self._positions.pop(0) if self._positions else None
        if position is not None and isinstance(dataloader, ResumableLoader):
            reason = dataloader.resume(position, self._engine.random_states.restore_within_epoch)
            if reason is not None:
                self._engine.console.warn(
                    f"weft: a training loader begins with its first batch: {reason}; keep the product of both."
                )
        return dataloader

    def _exchanged_by_data_ranks(self, loop: str) -> str | None:
        """Return the tensors that data-parallel ranks exchange in every batch of a loop; None: they exchange none."""
        if loop == "training":
            return "gradients"
        is_sharded = any(isinstance(module, FSDPModule) for module in self._strategy.model.modules())
        return "parameters" if is_sharded else None

    def _check_next_batch(self, loop: str, loader_name: str, advice: str, has_batch: bool) -> None:
        exchanged = self._exchanged_by_data_ranks(loop)
        trainer = self._strategy.lightning_module.trainer
        if loop == "training" and not isinstance(trainer.train_dataloader, LockstepLoader):
            exchanged = None  # one of several loaders, which may restart while another continues
        self.check_next(loader_name, advice, exchanged, has_batch)

    def begin_training_step(self) -> None:
        """At an epoch's first step, start comparing batches; compare the numbers of batches if lengths differ."""
        if self._strategy.lightning_module.trainer.fit_loop.batch_idx == 0:
            self.begin_epoch()
        if self._training_lengths_differ:
            self._compare_training_lengths()

    def _compare_training_lengths(self) -> None:
        """Raise ValueError if ranks would run different numbers of batches in this epoch, or between validations."""
        self._training_lengths_differ = False
        trainer = self._strategy.lightning_module.trainer
        end = _batches_before_max_steps(trainer)
        if end is None:
            return
        num_batches = int(min(trainer.num_training_batches, _NO_LIMIT))
        num_run = min(num_batches, end)
        val_interval = trainer.val_check_batch if trainer.enable_validation else None
        num_between_validations = int(val_interval) if val_interval is not None and val_interval <= num_run else 0
        states = self.gather_states(num_batches, num_run, num_between_validations, from_all_ranks=True)
        check_equal_states(
            states,
            "gradients",
            describe_length,
            "the training loader",
            _advice("limit_train_batches"),
            key=lambda numbers: numbers[1:],  # the first one, num_batches, is only for the error
            same_data_kind=self._engine.same_data_kind,
        )

    def _log_order(self, dataloader: Any) -> None:
        sampler = getattr(dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler) and sampler.shuffle and not self._has_logged_order:
            self._has_logged_order = True
            num_data_ranks = self._engine.data_axes.size
            self._engine.console.log(
                f"weft: a distributed sampler splits the training data over {num_data_ranks} data-parallel ranks "
                "and shuffles it, which Lightning does even for loaders with shuffle=False; to keep an order, give the "
                "loader a sampler that splits the data itself, and pass Trainer(use_distributed_sampler=False)."
            )


def _loop_of(trainer: Any) -> tuple[str, str]:
    """Return the name of the current loop, and the Trainer's argument that limits its batches."""
    if trainer.training:
        return "training", "limit_train_batches"
    if trainer.testing:
        return "test", "limit_test_batches"
    if trainer.predicting:
        return "prediction", "limit_predict_batches"
    return "validation", "limit_val_batches"


def _limited(length: int, limit: float) -> int:
    """Return the number of batches of a loader that run under a limit, a number (int) or a fraction (float)."""
    if isinstance(limit, int):
        return limit if length == UNKNOWN else min(length, limit)
    return UNKNOWN if length == UNKNOWN else int(length * limit)


def _advice(limit_name: str) -> str:
    return f"give all ranks loaders of one length, or pass Trainer({limit_name}=...) a number of batches that all have"


def _batches_before_max_steps(trainer: Any) -> int | None:
    """Return the number of batches from the epoch's start to max_steps; None: unknown, with manual optimization."""
    if trainer.max_steps == -1:
        return _NO_LIMIT
    if not trainer.lightning_module.automatic_optimization:
        return None
    done: int = trainer.fit_loop.batch_idx
    num_accumulated: int = trainer.accumulate_grad_batches
    num_steps: int = trainer.max_steps - trainer.global_step
    return done - done % num_accumulated + num_steps * num_accumulated
