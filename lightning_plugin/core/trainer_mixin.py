"""The mixin of WeftModelParallelStrategy for the Trainer; `factory.py` adds the base class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from weft._plugin import trainer_checkpoints as checkpoints
from weft._plugin.auto_layout import choose_layout
from weft._plugin.averaging import Averaging
from weft._plugin.checkpoint import explaining_added_entries
from weft._plugin.collective_groups import named_group
from weft._plugin.engine import Engine
from weft._plugin.hook_parameters import HookParameters
from weft._plugin.in_backward import check_optimizer_in_backward, clips_by_norm, is_overridden
from weft._plugin.largest_batch import LargestBatch, find_largest_batch
from weft._plugin.late_ties import LateTies
from weft._plugin.loader_check import without_lockstep
from weft._plugin.loaders import TrainerLoaders
from weft._plugin.model_setup import apply_plan, is_on, join_weights, move_unsharded
from weft._plugin.options import Options, StockOptions
from weft._plugin.parameter_code import CALL_GRADIENT_HOOKS, run_step, with_local_parameters
from weft._plugin.parameter_replacements import parameters_of
from weft._plugin.process_guard import guard
from weft._plugin.resumable_loaders import KEY as LOADERS_KEY
from weft._plugin.resumable_loaders import positions
from weft._plugin.resuming import Resuming
from weft._plugin.saves import finish_save_of_exception, let_checkpoints_see_saves, refuse_without_plan, remove
from weft._plugin.stage_steps import STEPS
from weft._plugin.stateful_loaders import load_states, save_states
from weft._plugin.stock_checks import check_module
from weft._plugin.strategy_mixin import StrategyMixin
from weft._plugin.trainer_stages import TrainerStages
from weft.strategy.checkpoint import background, location_of

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import StockTrainerStrategy
else:
    StockTrainerStrategy = object

# The default of `empty_init`: around configure_model, the Trainer passes no argument; init_module passes True or False.
_IN_CONFIGURE_MODEL = object()


def _shows_progress(trainer: Any) -> bool:
    """Return whether this process shows the Trainer's progress bar."""
    bar = trainer.progress_bar_callback
    return bool(trainer.is_global_zero and bar is not None and getattr(bar, "is_enabled", True))


class TrainerMixin(StrategyMixin, StockTrainerStrategy):
    """Tensor parallelism by plan, sharded or replicated data, context and pipeline parallelism, for the Trainer.

    A drop-in for Lightning's ModelParallelStrategy.
    """

    OPTION_GROUPS = (StockOptions, Options)
    OMITTED_OPTIONS: frozenset[str] = frozenset()

    def _construct(self, stock: StockOptions, options: Options) -> None:
        """Construct the strategy; `weft._plugin.factory` makes the `__init__` that takes the options as arguments."""
        super().__init__(**vars(stock))
        self._engine = Engine(self, options, owner="trainer", building_context="configure_model")
        self._stages = TrainerStages(self._engine, self)
        self._loaders = TrainerLoaders(self._engine, self)
        self._resuming = Resuming(self._engine, self)
        self._averaging = Averaging(self._engine, self)
        self._hooks = HookParameters()
        self._late_ties = LateTies()
        self._gradient_norm: Tensor | None = None
        self._is_fitting = False
        self._saves_in_background = False  # from on_train_start to on_train_end

    # ---- start and end of a run ----------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """See StrategyMixin; sets the module's `device_mesh` to the strategy's mesh, and prepares `resume`."""
        super().setup_environment()
        # The stock strategy has set the mesh that it made itself, and LightningModule.device_mesh has no setter.
        self.lightning_module._device_mesh = self._device_mesh
        self._resuming.prepare()
        self._averaging.adapt_callbacks()

    def _setup_distributed(self) -> None:
        """Join the process group, and choose a layout, once, if that is left to weft."""
        super()._setup_distributed()
        engine = self._engine
        if engine.options.chooses_layout and engine.chosen_sizes is None:
            engine.chosen_sizes, engine.chosen_stage = choose_layout(engine, self)
            engine.check_devices()
            self._set_sizes()

    def largest_batch(self, memory_limit: str | int | None = None, *, given_rows: int, max_rows: int) -> LargestBatch:
        """Return the largest batch with which training fits into a device, by dry runs on rank 0; collective.

        For `weft.lightning.BatchSizeFinder`, before the model is set up.

        Args:
            memory_limit: the most bytes of a device, such as "72GB"; None: as for BatchSizeFinder.
            given_rows: the rows of the batches of the loader.
            max_rows: the most rows that are tried.

        Raises:
            ValueError: an option is in no dry run, no batch fits, or the module and its batch cannot be sent to a new
                process.
            RuntimeError: the module raised an error.
        """
        return find_largest_batch(self._engine, self, memory_limit, given_rows, max_rows)

    @contextmanager
    def tensor_init_context(self, empty_init: Any = _IN_CONFIGURE_MODEL) -> Iterator[None]:
        """Like the stock method; with a plan, parameters created inside are deferred.

        Deferred parameters replace real ones in `configure_model`, and meta ones with `empty_init=True`; see
        `Options.empty_init`.
        """
        in_configure_model = empty_init is _IN_CONFIGURE_MODEL
        if self.plan is None or not self._engine.options.empty_init or not (in_configure_model or empty_init):
            with super().tensor_init_context(**({} if in_configure_model else {"empty_init": empty_init})):
                yield
            return
        with super().tensor_init_context(), self._engine.deferred_init():
            yield

    def setup(self, trainer: Any) -> None:
        """Apply the plan to the model, which is complete by now, then run the stock setup."""
        engine, options = self._engine, self._engine.options
        check_module(engine.name, self.lightning_module, self.model, engine.plan is not None)
        if self.plan is None and not engine.has_run:  # no process group: there is nothing to add
            super().setup(trainer)
            return
        self._loaders.prepare(trainer)
        # A step may compute with DTensors, which torch.inference_mode does not support. Lightning disables that mode
        # only for groups whose backend is named gloo.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self._is_fitting = trainer.state.fn == "fit"
        if self.plan is not None:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        if self._is_fitting:
            self._averaging.check(self.model)
        steps_in_backward = options.optimizer_in_backward and self._is_fitting
        if steps_in_backward:
            check_optimizer_in_backward(trainer, options.has_stages)
        if options.has_stages:
            self._stages.find_target(trainer)
            self.model = self._stages.convert_before_division(self.model)
        has_meta_tensors = self._shard_model()
        if self.plan is not None:
            self._wrap_gradient_hooks()
            self._hooks.begin([self.lightning_module, *trainer.callbacks], self._module_in_stages())
        with self._plan_instead_of_configure_model():
            super().setup(trainer)
        engine.settle_states(self.optimizers)
        if has_meta_tensors:
            engine.broadcast_values(self.model)
        join_weights(engine, self.model)
        engine.broadcast_random_state()
        if engine.pipeline is not None:
            self._stages.begin_steps(self.model, self._is_fitting)
        if self._is_fitting:
            engine.average_gradients_of(self.model)
            self._averaging.begin()
        self._late_ties.record(self.model)
        engine.memory_watch.begin(self.model, *self.optimizers)
        if steps_in_backward:
            self._step_in_backward(trainer)

    def model_to_device(self) -> None:
        """Like the stock method; offloaded parameters stay in CPU memory.

        A module that is on its device stays untouched: torch cannot move DTensors for which compiled code has guards.
        """
        if self._engine.options.offloads_parameters:
            move_unsharded(self.model, self.root_device)
        elif self.lightning_module.device != self.root_device or not is_on(self.model, self.root_device):
            super().model_to_device()

    def _step_in_backward(self, trainer: Any) -> None:
        """Make the optimizer step in the backward, with the Trainer's clipping."""
        engine, limit = self._engine, trainer.gradient_clip_val
        has_limit = limit is not None and limit > 0  # as in Lightning's clip_gradients
        by_norm = has_limit and clips_by_norm(trainer)
        if by_norm and (reason := _why_all_gradients(engine.pipeline is not None, self.model)):
            engine.console.log(f"weft steps after the backward, because the Trainer clips by norm: {reason}.")
            if engine.plan is not None:
                engine.data_axes.average_gradients_of(self.model)
            return
        clip_value, clip_norm = (None, limit) if by_norm else (limit if has_limit else None, None)
        engine.in_backward.start(self.model, self.optimizers[0], clip_value, clip_norm)

        def clip_gradients(*_: Any, **__: Any) -> None:
            """Replace torch's clipping, to which missing gradients are an error; the backward has clipped them."""
            if clip_norm is not None:
                self.lightning_module.log("gradient_norm", self._gradient_norm)

        self.precision_plugin.clip_gradients = clip_gradients

    def _wrap_gradient_hooks(self) -> None:
        """Run on_after_backward, on_before_optimizer_step (of callbacks, too) and clipping in `local_parameters`."""
        for name in CALL_GRADIENT_HOOKS:
            method = getattr(type(self.precision_plugin), name).__get__(self.precision_plugin)
            setattr(self.precision_plugin, name, with_local_parameters(method, self._module_in_stages()))

    def _module_in_stages(self) -> Any:
        return None if self._engine.pipeline is None else self.lightning_module

    def _shard_model(self) -> bool:
        module = self.lightning_module
        entry_points = [name for name in STEPS if is_overridden(name, module, "LightningModule")]
        # These weak references are dropped before the stock setup moves the model: torch cannot move a DTensor that has
        # a weak reference.
        before = parameters_of(self.model)
        has_meta_tensors = apply_plan(
            self._engine,
            self.model,
            self._stages.divide,
            shows_progress=_shows_progress(module.trainer),
            entry_points=entry_points,
            root_is_unit=module.automatic_optimization,
        )
        self._engine.replacements.record(before, self.model)
        return has_meta_tensors

    @contextmanager
    def _plan_instead_of_configure_model(self) -> Iterator[None]:
        """With a plan, `configure_model` counts as overridden inside, which the stock `setup` requires."""
        module = self.lightning_module
        if self.plan is None or "configure_model" in vars(module):
            yield
            return
        # Lightning compares code objects: the lambda's differs from the base class's, that of `original` may not.
        original = module.configure_model
        module.configure_model = lambda: original()  # noqa: PLW0108
        try:
            yield
        finally:
            del module.configure_model

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizers, or use those that LightningCLI built with the model; see `Engine.add_optimizer`."""
        with self._stages.placeholders_of_other_stages():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._engine.add_optimizer(optimizer, self.model)

    def process_dataloader(self, dataloader: Any) -> Any:
        """See StrategyMixin; collective. Raises ValueError on all ranks for lengths that would deadlock."""
        return self._loaders.with_length_check(super().process_dataloader(without_lockstep(dataloader)))

    def on_train_start(self) -> None:
        """Synchronize random states again: hooks since setup may have drawn numbers on some ranks only."""
        super().on_train_start()
        if self._engine.data_axes.shards_parameters or self._engine.pipeline is not None:
            self._late_ties.check(self.model)
        self._engine.broadcast_random_state()
        self._engine.end_summary.begin(self.lightning_module.trainer.accumulate_grad_batches)
        self._saves_in_background = self._engine.options.async_save
        let_checkpoints_see_saves(self.lightning_module.trainer)

    def on_train_end(self) -> None:
        """Wait for a checkpoint that is written in the background; raise its error on all ranks. Log a summary."""
        super().on_train_end()
        self._saves_in_background = False
        background.wait()
        self._engine.end_summary.log()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Like the stock method, but if a checkpoint is being written, after it is complete."""
        background.call_later(partial(self._remove_checkpoint, filepath))

    def _remove_checkpoint(self, filepath: Any) -> None:
        if not (self.is_global_zero and remove(location_of(filepath))):
            super().remove_checkpoint(filepath)

    def on_exception(self, exception: BaseException) -> None:
        """Mark this process as failed, so that its exit does not wait for other ranks."""
        super().on_exception(exception)
        self._resuming.cancel()
        guard().mark_failed(True)
        self._saves_in_background = False
        finish_save_of_exception(self.lightning_module.trainer)
        if num_stepped := self._engine.in_backward.num_stepped:
            self._engine.console.log(
                f"weft: the run ended within a step, after {num_stepped} parameters were updated inside "
                "the backward and before the others were: resume from a checkpoint, not from these weights."
            )

    def teardown(self) -> None:
        """Run the stock teardown. The process group and the mesh stay, because the model remains usable after a run."""
        guard().watch_signals(False)
        self._saves_in_background = False
        background.free_copies()
        self._engine.end_run()
        self._stages.end_steps()
        self._hooks.end()
        for name in ("clip_gradients", "clip_grad_by_norm", *CALL_GRADIENT_HOOKS):
            vars(self.precision_plugin).pop(name, None)
        super().teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before the first step of a resumed run, restore random states, and count an epoch that Lightning does not.

        Lightning 2.6 does not count the epoch with which a run begins that resumes at the end of an epoch. A checkpoint
        within it would then resume at its start.
        """
        super().on_train_batch_start(batch, batch_idx)
        progress = self.lightning_module.trainer.fit_loop.epoch_progress
        if progress.current.ready == progress.current.processed:
            progress.increment_ready()
            progress.increment_started()
        self._engine.random_states.begin_step(batch_idx)
        self._engine.end_summary.batch_begins(batch)

    # ---- steps ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step`; with a plan it computes with parameters as on one device."""
        return self._step("training", super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step`; see `training_step`."""
        return self._step("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step`; see `training_step`."""
        return self._step("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step`; see `training_step`."""
        return self._step("prediction", super().predict_step, args, kwargs)

    def _step(self, loop: str, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = self._engine
        if loop == "training":
            self._loaders.begin_training_step()
        if args:
            engine.check_batch(loop, args[0])
        engine.memory_watch.forward_begins(args)
        if engine.plan is None:
            return step(*args, **kwargs)
        if engine.context_group is not None:
            step = partial(_with_full_sequences, step)
        if engine.pipeline is not None:
            step = partial(run_step, step, self._module_in_stages())
            return self._stages.run_step(loop, step, args, kwargs)
        return run_step(step, None, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the stock method; with `optimizer_in_backward` and clipping by norm, the backward runs twice."""
        in_backward = self._engine.in_backward
        if in_backward.clip_norm is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        loss = closure_loss

        def run(retains_graph: bool) -> None:
            nonlocal loss
            if retains_graph:
                self._engine.memory_watch.backward_begins()
                self.precision_plugin.backward(
                    closure_loss, self.lightning_module, optimizer, *args, **{**kwargs, "retain_graph": True}
                )
            else:
                loss = super(TrainerMixin, self).backward(closure_loss, optimizer, *args, **kwargs)

        if (norm := in_backward.backward(run)) is not None:
            self._gradient_norm = norm
        return loss

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Run the stock hook, and begin the phase "backward" of the memory count."""
        super().pre_backward(closure_loss)
        self._engine.memory_watch.backward_begins()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average gradients; after a run's first backward, check that replicated parameters have equal gradients."""
        super().post_backward(closure_loss)
        self.data_axes.after_backward()
        self._engine.first_gradients.check([self.model])

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all ranks' shards; the norm before clipping is logged as "gradient_norm"."""
        from weft.strategy.data_parallel import clip_gradients_by_norm

        parameters = self.precision_plugin.main_params(optimizer)
        if (pipeline := self._engine.pipeline) is not None:
            self._gradient_norm = pipeline.clip_grad_norm(clip_val, parameters=parameters)
        else:
            self._gradient_norm = clip_gradients_by_norm(parameters, clip_val)
        self.lightning_module.log("gradient_norm", self._gradient_norm)

    @property
    def gradient_norm(self) -> Tensor | None:
        """Return the gradients' norm before the last clipping by norm; None: no clipping by norm has run."""
        return self._gradient_norm

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backwards only accumulate; the stock method supports only DistributedDataParallel."""
        with self.data_axes.without_sync(), self._engine.in_backward.accumulating():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Like the stock method, but with a plan by default over the data axes: ranks with the same data count once.

        Returns `tensor` itself with a plan, one data-parallel rank and no `group`. `group`: as in `all_gather`.
        """
        if group is None and self.plan is not None:
            group = self.data_group
            if group.size() == 1:
                return tensor
        return super().reduce(tensor, named_group(self._engine, group), reduce_op)

    # ---- checkpoints; without a plan, the stock methods run ------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state that this rank saves; only the last stage saves modules outside of the stages."""
        with explaining_added_entries(self.model):
            if self.plan is not None and self._saves_in_background and self._save_distributed_checkpoint:
                return self._stages.own_state(get_model_state_dict(self.model))  # not copied to the CPU yet
            return self._stages.own_state(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for `save_checkpoint`; collective."""
        if self.plan is None:
            return super().optimizer_state(optimizer)
        return checkpoints.optimizer_state(self._engine, self, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a directory of shards, or one file with save_distributed_checkpoint=False; collective."""
        found = []
        if self.lightning_module is not None:
            found = positions(checkpoint, self.lightning_module.trainer)
            save_states(checkpoint, self.lightning_module.trainer, self._engine.data_axes)
        if found:
            checkpoint[LOADERS_KEY] = found
        self._engine.random_states.of_loaders = [None if each is None else each["random_state"] for each in found]
        if self.plan is not None and self._save_distributed_checkpoint and storage_options is None:
            checkpoints.save(self._engine, self, checkpoint, filepath, self._saves_in_background)
        elif not checkpoints.save_file(self._engine, self, checkpoint, filepath, storage_options):
            super().save_checkpoint(checkpoint, str(location_of(filepath)), storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory or a file, saved by any number of ranks, into the model and the optimizers; collective."""
        background.wait()
        self._engine.random_states.loaded({})
        if self.plan is None:
            location = location_of(checkpoint_path)
            refuse_without_plan(self, location)
            loaded = super().load_checkpoint(str(location), **checkpoints.without_none(weights_only=weights_only))
        else:
            # A test after a fit still has the optimizers of the fit, which may belong to another model.
            optimizers = self.optimizers if self._is_fitting else []
            full_model = self._stages.full_model
            loaded = checkpoints.load(self._engine, self, checkpoint_path, optimizers, weights_only, full_model)
            self._averaging.load(checkpoint_path, loaded, self._is_fitting, full_model)
        if self._is_fitting:
            found = loaded.pop(LOADERS_KEY, [])
            self._loaders.resume(self._engine.random_states.with_own_states(found))
            load_states(loaded, self._engine.data_axes, self._engine.console.warn)
        return loaded


def _with_full_sequences(step: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step; sequences in it are gathered over the context-parallel ranks."""
    from weft.strategy.context import full_sequences

    return full_sequences(step(*args, **kwargs))


def _why_all_gradients(has_stages: bool, model: Any) -> str:
    """Return why clipping by norm needs all gradients at once; "": the backward can run twice instead."""
    from weft.strategy.modules.activation_checkpointing import has_selective_checkpoints
    from weft.strategy.modules.compiled_blocks import has_compiled_blocks

    if has_stages:
        return "the norm is that of the gradients of all stages"
    if has_compiled_blocks(model):
        return "compiled blocks support one backward"
    return "selective checkpoints support one backward" if has_selective_checkpoints(model) else ""
