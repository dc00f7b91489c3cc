"""WeftModelParallelStrategy for the Trainer, less its base class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from weft._plugin.in_backward import refuse_with_optimizer_in_backward
from weft._plugin.loaders_mixin import TrainerLoadersMixin
from weft._plugin.parameter_code import CALL_GRADIENT_HOOKS, computing_with_parameters, run_step
from weft._plugin.process_guard import guard
from weft._plugin.repoint import Replacements, parameters_of
from weft._plugin.settings import PlanSettings
from weft._plugin.strategy_mixin import StrategyMixin
from weft._plugin.trainer_checkpoints import TrainerCheckpointsMixin
from weft._plugin.trainer_pipeline import STEPS, TrainerPipelineMixin

# The Trainer enters the context without a word there, and init_module says what its caller wants.
_IN_CONFIGURE_MODEL = object()


def _overridden_steps(module: Any) -> list[str]:
    base = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    return [name for name in STEPS if name in vars(module) or getattr(type(module), name) is not getattr(base, name)]


def _refuse_averaged_copies(trainer: Any) -> None:
    """Raise ValueError for a callback that has copied the model before it was sharded, whole, to average weights."""
    for callback in trainer.callbacks:
        if {"StochasticWeightAveraging", "WeightAveraging"} & {cls.__name__ for cls in type(callback).__mro__}:
            raise ValueError(
                f"the callback {type(callback).__name__} averages into a copy of the whole unsharded model, which "
                "sharded weights cannot be averaged into; leave it out, and average the weights of checkpoints instead."
            )


class TrainerMixin(TrainerCheckpointsMixin, TrainerPipelineMixin, TrainerLoadersMixin, StrategyMixin):
    """Tensor parallelism by plan, and sharded or replicated data parallelism, for the Trainer.

    A drop-in for Lightning's ModelParallelStrategy.

    Args:
        data_parallel_size: how many ranks see other data, and share what `zero_stage` says; "auto": what the other
            sizes leave. Without a plan, as in ModelParallelStrategy.
        tensor_parallel_size: how many ranks share each layer's arithmetic; "auto": what the other sizes leave, and of
            that no more than a host has. Without a plan, as in ModelParallelStrategy.
        save_distributed_checkpoint: True: checkpoints are directories to which each rank writes its part; False: one
            file, assembled on rank 0, that any Trainer loads.
        process_group_backend: as in ModelParallelStrategy; None on CPUs: "cpu:weft", of one host or several. "gloo" is
            the alternative there.
        timeout: as in ModelParallelStrategy.
        plan: a plan as `weft.parallelize` takes it. `configure_model` is optional then, and runs first where it is
            overridden. None: the stock behaviour, in which `configure_model` does all the sharding.
        check_batches: compare the first batches of each stage and of each training epoch between the ranks of a
            tensor-parallel group, and the lengths of loaders; 0, without check_batches_every: no comparison.
        check_batches_every: compare every N-th batch as well; 0: no others.
        fused_optimizers: have Adam, AdamW, SGD and Adagrad use their fused kernels, which need no temporaries, unless
            they were told `foreach` or `fused`; what is done stands in the log. False: leave all as they are.
        empty_init: with a plan, what `configure_model` builds gets its values when the plan is applied, each rank its
            shards only, and the values are those of an unsharded model; `init_module(empty_init=True)` does so too.
            False: as in ModelParallelStrategy, where every rank builds the whole model first.
        optimizer_in_backward: step each parameter as soon as its gradient is complete, and free the gradient: one
            gradient is alive at a time. For one Adam, AdamW or SGD; not together with what needs all gradients at
            once, which is refused. "rows": of fused MLPs' weights some rows, with tensor parallelism alone.
        activation_checkpointing: "none"; "full": each repeated block keeps its inputs alone for the backward, which
            runs its forward again; "selective": it keeps the results of matrix products, attention and communication,
            too; or a pattern of module names, a list of them, or a dict from pattern to "full" or "selective".
        activation_offload: keep those inputs in CPU memory until the backward; on CUDA devices.

        data_replicate_size: how many replicas there are of what the other axes share; "auto": what they leave.
        zero_stage: what is cut over the data-parallel axis. 3: parameters, gradients and optimizer states (FSDP2, each
            unit freed after its forward); 2: the same, freed after its backward; 1: the states alone; 0: nothing.
            None: 3 with a plan; without one, all sharding is up to `configure_model`.
        layout: all sizes at once, such as "dp2,tp2" or "rep2,dp4,tp8"; axes that are left out have one rank.
        sequence_parallel: with a plan, have the ranks of a tensor-parallel group share the tokens between the layers
            that they share by features: norms, residual sums and dropout, and what is kept of them.
        pipeline_cuts: the names of the first module of each stage but the first, in the module that is cut or in the
            LightningModule; or "auto", see `weft.strategy.pipeline.AutoCuts`. The steps run once for each micro-batch,
            on every stage up to the call of the module that is cut; what they log and give is put together.
        pipeline_module: the name of the module that is cut, such as "model"; what is beside it is on the last stage.
            "": the LightningModule itself, whose steps call self(...). None: the child that has the cuts, else "".
        pipeline_parallel_size: ranks of a pipeline, of which as many cuts make one stage each, or several; in a layout
            "pp2,dp2,tp2".
        pipeline_schedule: "1f1b", "gpipe", "zero_bubble", "interleaved", "looped_bfs", "naive", or a
            `weft.strategy.pipeline.Schedule`.
        num_micro_batches: of a batch; None: that of a `Schedule`, else twice the pipeline's ranks.
        micro_batch_shares: their relative sizes in place of their number, such as [1, 2, 1]; None: as even as can be.
        split_batch: cuts a batch into so many micro-batches; None: along dim 0 of the tensors.
        micro_batch_weight: what a micro-batch's loss, and what it logs, counts for; None: its samples.
        verify: "auto": layers that the plan itself shards by heads are first compared with the unsharded module, and
            gathered if they differ; "always": column and row rules are compared as well, and raise if they differ;
            "never": no comparison. The model is called with `example_input_array`, or with inputs that follow from its
            first layer. None: the plan's own setting.

    Raises:
        ValueError, TypeError: an argument that no number of devices could make work.
    """

    _DEFERRED_PLACE = "configure_model"

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        plan: Any = None,
        check_batches: int = 2,
        check_batches_every: int = 0,
        fused_optimizers: bool = True,
        empty_init: bool = True,
        optimizer_in_backward: bool | Literal["rows"] = False,
        activation_checkpointing: Any = "none",
        activation_offload: bool = False,
        data_replicate_size: int | str = 1,
        zero_stage: int | None = None,
        layout: str | None = None,
        sequence_parallel: bool = False,
        pipeline_cuts: Any = None,
        pipeline_module: str | None = None,
        pipeline_parallel_size: int = 1,
        pipeline_schedule: Any = "1f1b",
        num_micro_batches: int | None = None,
        micro_batch_shares: Sequence[float] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        micro_batch_weight: Callable[[Any], float] | None = None,
        verify: Literal["auto", "always", "never"] | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._init_weft(
            PlanSettings(
                plan=plan,
                check_batches=check_batches,
                check_batches_every=check_batches_every,
                fused_optimizers=fused_optimizers,
                empty_init=empty_init,
                optimizer_in_backward=optimizer_in_backward,
                activation_checkpointing=activation_checkpointing,
                activation_offload=activation_offload,
                data_replicate_size=data_replicate_size,
                zero_stage=zero_stage,
                layout=layout,
                sequence_parallel=sequence_parallel,
                pipeline_parallel_size=pipeline_parallel_size,
                pipeline_cuts=pipeline_cuts,
                pipeline_schedule=pipeline_schedule,
                num_micro_batches=num_micro_batches,
                micro_batch_shares=micro_batch_shares,
                pipeline_module=pipeline_module,
                split_batch=split_batch,
                micro_batch_weight=micro_batch_weight,
                verify=verify,
            )
        )
        self._replacements = Replacements()
        self._gradients_checked = False
        self._gradient_norm: Tensor | None = None

    # ---- a run's beginning and end -------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """See StrategyMixin; the module's `device_mesh` is this process's one mesh."""
        super().setup_environment()
        # The stock strategy has set the mesh that it made, and LightningModule.device_mesh has no setter.
        self.lightning_module._device_mesh = self._device_mesh
        self._gradients_checked = False

    @contextmanager
    def tensor_init_context(self, empty_init: Any = _IN_CONFIGURE_MODEL) -> Iterator[None]:
        """As the stock one; with a plan, what would be without values waits for them instead (see `empty_init`)."""
        in_configure_model = empty_init is _IN_CONFIGURE_MODEL
        if self._plan is None or not self._empty_init or not (in_configure_model or empty_init):
            with super().tensor_init_context(**({} if in_configure_model else {"empty_init": empty_init})):
                yield
            return
        with super().tensor_init_context(), self._deferred_init():
            yield

    def setup(self, trainer: Any) -> None:
        """Apply the plan to what `configure_model` has built, then all that the stock strategy does."""
        self._prepare_for_loaders(trainer)
        # A step may compute with DTensors, which torch.inference_mode breaks. Lightning knows that of gloo groups
        # (by name) only.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self._is_fitting = trainer.state.fn == "fit"
        if self._plan is not None:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        if self._plan is not None and self._is_fitting:
            _refuse_averaged_copies(trainer)
        steps_in_backward = self._optimizer_in_backward and self._is_fitting
        if steps_in_backward:
            refuse_with_optimizer_in_backward(trainer)
        if self._pipeline_settings is not None:
            self._refuse_what_stages_cannot(trainer)
            self._convert_before_cutting()
        values_to_come = self._shard_model()
        if self._plan is not None:
            self._wrap_gradient_hooks()
        with self._plan_instead_of_configure_model():
            super().setup(trainer)
        if values_to_come:
            self._share_values(self.model)
        self._share_random_state()
        if self._pipeline is not None:
            self._setup_steps(self.model)
        if self._is_fitting:
            self._average_gradients_of(self.model)
        self._watch_memory(self.model, *self.optimizers)
        if steps_in_backward:
            self._step_in_backward(self.model, self.optimizers[0], trainer.gradient_clip_val)
            # After the backward there is nothing left to clip, which torch's clipping takes for an error.
            self.precision_plugin.clip_gradients = lambda *_, **__: None

    def _wrap_gradient_hooks(self) -> None:
        """Have on_after_backward and on_before_optimizer_step, of the module and of callbacks, compute as steps do."""
        for name in CALL_GRADIENT_HOOKS:
            method = getattr(type(self.precision_plugin), name).__get__(self.precision_plugin)
            setattr(self.precision_plugin, name, computing_with_parameters(method, self._module_in_stages()))

    def _module_in_stages(self) -> Any:
        return None if self._pipeline is None else self.lightning_module

    def _shard_model(self) -> bool:
        module = self.lightning_module
        before = parameters_of(self.model)  # until this returns: torch moves no DTensor that has weak references
        values_to_come = self._apply_plan(
            self.model, entry_points=_overridden_steps(module), root_is_called=module.automatic_optimization
        )
        self._replacements.note(before, self.model)
        return values_to_come

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, or take those that LightningCLI made with the model; torch's own become fused."""
        with self._empty_groups_allowed():
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._replacements.repoint(optimizer)
            self._fuse(optimizer, self.model)
            self.data_axes.add_optimizer(optimizer)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """What the precision plugin does, over all ranks' parts; the norm before is logged as "gradient_norm"."""
        from weft.strategy.data_parallel import clip_gradients_by_norm

        parameters = self.precision_plugin.main_params(optimizer)
        if self._pipeline is not None:
            self._gradient_norm = self._pipeline.clip_grad_norm(clip_val, parameters=parameters)
        else:
            self._gradient_norm = clip_gradients_by_norm(parameters, clip_val)
        self.lightning_module.log("gradient_norm", self._gradient_norm)

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm of the gradients before they were last clipped by it; None: they never were."""
        return self._gradient_norm

    @contextmanager
    def _plan_instead_of_configure_model(self) -> Iterator[None]:
        """Inside, `configure_model` counts as overridden, which the stock `setup` insists on, if there is a plan."""
        module = self.lightning_module
        if self._plan is None or "configure_model" in vars(module):
            yield
            return
        own = module.configure_model
        module.configure_model = lambda: own()  # noqa: PLW0108  (`own` itself has the code that is not overridden)
        try:
            yield
        finally:
            del module.configure_model

    def on_train_start(self) -> None:
        """Continue with one random state: hooks between setup and here may have drawn on some ranks only."""
        super().on_train_start()
        self._share_random_state()

    def on_exception(self, exception: BaseException) -> None:
        """Remember that this process is going down, so that its exit waits for no other rank."""
        super().on_exception(exception)
        guard().mark_failed(True)
        if self._stepper is not None and self._stepper.num_stepped:
            self._log(
                f"weft: the run ended within a step, after {self._stepper.num_stepped} parameters were updated inside "
                "the backward and before the others were: go on from a checkpoint, not from these weights."
            )

    def teardown(self) -> None:
        """The stock teardown. The process group and the mesh stay: what a run leaves must remain usable."""
        guard().watch_signals(False)
        self._unwatch_memory()
        self._stop_stepping()
        self._end_steps()
        if self._data_axes is not None:
            self._data_axes.release()
        for name in ("clip_gradients", "clip_grad_by_norm", *CALL_GRADIENT_HOOKS):
            vars(self.precision_plugin).pop(name, None)
        super().teardown()

    # ---- steps ---------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`, which may read replicated parameters as plain tensors."""
        return self._step("training", super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `validation_step`; see `training_step`."""
        return self._step("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `test_step`; see `training_step`."""
        return self._step("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `predict_step`; see `training_step`."""
        return self._step("prediction", super().predict_step, args, kwargs)

    def _step(self, stage: str, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stage == "training":
            self._begin_training_step()
        if args:
            self._batch_check.check(stage, args[0], self.tensor_parallel_group, self.root_device)
        if self._watch is not None:
            self._watch.forward_begins(args)
        if self._plan is None:
            return step(*args, **kwargs)
        if self._pipeline is not None:
            step = partial(run_step, step, self._module_in_stages())
            return self._run_in_stages(stage, step, args, kwargs)
        return run_step(step, None, *args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """The stock hook; what the step has left alive is kept for the backward that begins."""
        super().pre_backward(closure_loss)
        if self._watch is not None:
            self._watch.backward_begins()

    def post_backward(self, closure_loss: Tensor) -> None:
        """After a run's first backward: replicated parameters must have got equal gradients on all ranks."""
        super().post_backward(closure_loss)
        self.data_axes.after_backward()
        self._check_first_gradients([self.model])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay this rank's own inside; the stock one knows of DistributedDataParallel alone."""
        with self.data_axes.without_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the stock one, over the data axes by default: each replica counts once, and one alone sends nothing."""
        if group is None and self.data_group.size() == 1:
            return tensor
        return super().reduce(tensor, group or self.data_group, reduce_op)
