"""The mixin of WeftModelParallelStrategy for Fabric; `factory.py` adds the base class, the stock strategy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from weft._plugin import checkpoint as checkpoints
from weft._plugin import fabric_pipeline
from weft._plugin.collective_groups import named_group
from weft._plugin.engine import Engine
from weft._plugin.loader_check import without_lockstep
from weft._plugin.loaders import FabricLoaders
from weft._plugin.model_setup import apply_plan, join_weights
from weft._plugin.optimizer_state import full_state, load_state, merge_parameter_groups, named_state
from weft._plugin.options import TRAINER_ONLY, FabricOptions, Options, StockOptions
from weft._plugin.parameter_replacements import parameters_of
from weft._plugin.saves import refuse_stock_save, report_seconds, takes_urls
from weft._plugin.strategy_mixin import StrategyMixin
from weft.strategy.checkpoint import Location, background, is_checkpoint, location_of, on_first_rank
from weft.strategy.checkpoint.manifest import has_manifest

if TYPE_CHECKING:
    from weft._plugin.stock_strategies import StockFabricStrategy, StockSyncControl
else:
    StockFabricStrategy = StockSyncControl = object


def _identity(model: Module, device_mesh: Any) -> Module:
    return model


class _WithoutSync(StockSyncControl):
    """Implements `fabric.no_backward_sync`; the next base class is that of Lightning's own control."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def no_backward_sync(self, module: Module, enabled: bool) -> Iterator[None]:
        engine = self._engine
        with engine.in_backward.accumulating() if enabled else nullcontext():
            if engine.plan is None:  # FSDP2 modules are the user's
                with super().no_backward_sync(module, enabled):
                    yield
                return
            with engine.data_axes.without_sync([module]) if enabled else nullcontext():
                yield


class FabricMixin(StrategyMixin, StockFabricStrategy):
    """Tensor parallelism by plan, sharded or replicated data, context and pipeline parallelism, for Fabric.

    A drop-in for Fabric's ModelParallelStrategy.
    """

    OPTION_GROUPS = (FabricOptions, StockOptions, Options)
    OMITTED_OPTIONS = TRAINER_ONLY

    def _construct(self, fabric: FabricOptions, stock: StockOptions, options: Options) -> None:
        """Construct the strategy; `weft._plugin.factory` makes the `__init__` that takes the options as arguments."""
        parallelize_fn = fabric.parallelize_fn
        if parallelize_fn is not None and not callable(parallelize_fn):
            raise TypeError(
                f"{type(self).__name__} got parallelize_fn={parallelize_fn!r}, which cannot be called; "
                "pass a function (model, device_mesh) -> model, or a plan as plan=..."
            )
        arguments = {"parallelize_fn": parallelize_fn or _identity, **vars(stock)}
        super().__init__(**arguments)
        self._user_parallelize_fn = self._parallelize_fn
        self._parallelize_fn = self._parallelize
        self._engine = Engine(self, options, owner="fabric", building_context="fabric.init_module(empty_init=True)")
        self._loaders = FabricLoaders(self._engine)
        without_sync = type("WithoutSync", (_WithoutSync, type(self._backward_sync_control)), {})
        self._backward_sync_control = without_sync(self._engine)
        self._modules: list[Module] = []
        self._parameters_before: dict[str, weakref.ref[Parameter]] = {}

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Like the stock method, except that with a plan `empty_init` defers parameters; see `Options.empty_init`."""
        if not empty_init or self.plan is None or not self._engine.options.empty_init:
            return super().module_init_context(empty_init)
        stack = ExitStack()
        stack.enter_context(super().module_init_context())
        stack.enter_context(self._engine.deferred_init())
        return stack

    def _is_stock_without_ranks(self) -> bool:
        """Return whether there is neither a plan nor a process group, so that weft has nothing to add."""
        return self.plan is None and not self._engine.has_run

    def _parallelize(self, module: Module, device_mesh: Any) -> Module:
        if self._is_stock_without_ranks():
            parallel: Module = self._user_parallelize_fn(module, device_mesh)
            return parallel
        self._parameters_before = parameters_of(module)
        self._engine.broadcast_values(module)
        module = self._user_parallelize_fn(module, device_mesh)
        if isinstance(module, Module):  # else the stock strategy raises
            self._has_meta_tensors = apply_plan(self._engine, module, self._engine.stages.divide)
        return module

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """See StrategyMixin; with a plan, None for one data rank, so that Fabric keeps the loader's sampler."""
        keeps_sampler = self.plan is not None and self.data_axes.size == 1
        return None if keeps_sampler else super().distributed_sampler_kwargs

    def process_dataloader(self, dataloader: Any) -> Any:
        """See StrategyMixin and, for the comparison of lengths, `FabricLoaders.with_length_check`; collective."""
        return self._loaders.with_length_check(super().process_dataloader(without_lockstep(dataloader)), self._modules)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Like the stock method, but with a plan by default over the data axes: ranks with the same data count once.

        Returns `tensor` itself with a plan, one data-parallel rank and no `group`. `group`: as in `all_gather`; Fabric
        passes the world's group if the user gives none.
        """
        if self.plan is not None and (group is None or group is dist.group.WORLD):
            group = self.data_group
            if group.size() == 1:
                return tensor
        return super().all_reduce(tensor, named_group(self._engine, group), reduce_op)

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Unscale gradients and clip by their norm over the shards of all axes; return the norm before clipping.

        Raises:
            RuntimeError: with optimizer_in_backward.
        """
        from weft.strategy.data_parallel import clip_gradients_by_norm

        self._check_clipping()
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        if self._engine.pipeline is not None:
            return self._engine.pipeline.clip_grad_norm(
                max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, parameters=parameters
            )
        return clip_gradients_by_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float) -> None:
        """Like the stock method; raises RuntimeError with optimizer_in_backward."""
        self._check_clipping()
        super().clip_gradients_value(module, optimizer, clip_val)

    def _check_clipping(self) -> None:
        if self._engine.in_backward.is_active:
            raise RuntimeError(
                "clip_gradients was called with optimizer_in_backward, which steps every weight in the backward and "
                "leaves no gradient to clip; pass optimizer_in_backward=False."
            )

    def setup_module(self, module: Module) -> Module:
        """Run `parallelize_fn`, then apply the plan; all replicas start from the values of the first one."""
        engine = self._engine
        module = super().setup_module(module)
        if self._is_stock_without_ranks():
            return module
        before, self._parameters_before = self._parameters_before, {}
        # A parallelize_fn may compile the module, which then is inside of another.
        engine.replacements.record(before, getattr(module, "_orig_mod", module))
        if self._has_meta_tensors:
            engine.broadcast_values(module)
        join_weights(engine, module)
        engine.broadcast_random_state()
        # Before hooks that shard the sequences of a batch.
        module.register_forward_pre_hook(self._check_batch, prepend=engine.context_group is not None)
        self._modules.append(module)
        engine.average_gradients_of(module)
        engine.memory_watch.begin(module)
        engine.first_gradients.restart()
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer; its parameters that sharding has replaced become the modules' new parameters."""
        if self._is_stock_without_ranks():
            return super().setup_optimizer(optimizer)
        engine = self._engine
        steps_in_backward = engine.options.optimizer_in_backward
        if steps_in_backward and (engine.in_backward.is_active or not self._modules):
            raise ValueError(
                "optimizer_in_backward supports one optimizer, set up with the model or after it; "
                "pass optimizer_in_backward=False for several."
            )
        if steps_in_backward and engine.scaler is not None:
            raise ValueError(
                f"optimizer_in_backward: precision {str(engine.precision.precision)!r} has a gradient scaler, which "
                "decides after the backward whether to step; pass optimizer_in_backward=False, or use 'bf16-mixed'."
            )
        optimizer = super().setup_optimizer(optimizer)
        engine.add_optimizer(optimizer, self._modules[-1] if self._modules else None)
        engine.memory_watch.add_optimizer(optimizer)
        if steps_in_backward:
            engine.in_backward.start(self._modules[-1], optimizer)
        return optimizer

    def _check_batch(self, module: Module, args: tuple[Any, ...]) -> None:
        self._engine.check_batch("training" if module.training else "evaluation", args)

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward and average gradients.

        After the first backward, check that replicated parameters have equal gradients in a tensor-parallel group.
        """
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"fabric.backward got a DTensor with the placements {tensor.placements} and expects a plain tensor; "
                "compute with parameters inside weft.strategy.local_parameters()."
            )
        super().backward(tensor, module, *args, **kwargs)
        self.data_axes.after_backward()
        self._engine.first_gradients.check(self._modules)

    def pipeline_step(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        weight: Callable[[Any], float] | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch in micro-batches; average gradients over the data axes. Collective.

        Args:
            batch: the same on every stage of a replica, as Fabric's data loaders return it.
            loss_fn: a function (model, micro_batch) -> loss, a scalar, that calls the model once.
            split, weight: as in `weft.strategy.pipeline.Pipeline.step`.

        Returns:
            The weighted mean of the losses over the micro-batches of `batch`, the same on every stage.

        Raises:
            ValueError: the stages have different batches.
            RuntimeError: no model has been set up in stages.
        """
        return fabric_pipeline.train_batch(self._engine, batch, loss_fn, split=split, weight=weight)

    def pipeline_evaluate(
        self, batch: Any, step: Callable[[Any, Any], Any], *, split: Callable[[Any, int], Sequence[Any]] | None = None
    ) -> list[Any]:
        """Run the forward of one batch in micro-batches, without gradients. Collective.

        Args:
            batch: the same on every stage of a replica, as Fabric's data loaders return it.
            step: a function (model, micro_batch) -> result that calls the model once.
            split: as in `weft.strategy.pipeline.Pipeline.step`.

        Returns:
            On the last stage, the result of `step` for each micro-batch; on other stages, [].

        Raises:
            ValueError: the stages have different batches.
        """
        return fabric_pipeline.evaluate_batch(self._engine, batch, step, split)

    # ---- checkpoints: unlike with the stock strategy, optimizers need no step before they are saved or loaded

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write `state` as a directory or, with save_distributed_checkpoint=False, as one file; collective.

        The stock method runs instead if there is no plan, if `storage_options` or `filter` is given, or if `state` does
        not have exactly one model.
        """
        engine = self._engine
        entries = {} if self.plan is None else state
        models = {key: value for key, value in entries.items() if isinstance(value, Module)}
        if storage_options is not None or filter is not None or len(models) != 1:
            location = location_of(self.broadcast(path))
            refuse_stock_save(self, location)
            if storage_options is None:  # else the stock strategy raises an error
                checkpoints.make_room(location)
            super().save_checkpoint(str(location), state, storage_options, filter)
            return
        [(model_key, model)] = models.items()
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        rest = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if key not in models and key not in optimizers
        }
        target = location_of(self.broadcast(path))
        checkpoints.check_checkpoint_path(target)
        sharded = self._save_distributed_checkpoint
        if engine.pipeline is not None and not sharded:
            raise ValueError(
                f"{type(self).__name__} got save_distributed_checkpoint=False with a model in stages, where no rank "
                "has the full model; leave it out, and consolidate the directory afterwards."
            )
        in_background = sharded and engine.options.async_save  # it copies the shards itself
        options = StateDictOptions(full_state_dict=not sharded, cpu_offload=not in_background)
        weights = get_model_state_dict(model, options=options)
        if sharded:
            states = {key: named_state(model, optimizer) for key, optimizer in optimizers.items()}
            for state_of_optimizer in states.values() if engine.pipeline is not None else ():
                merge_parameter_groups(state_of_optimizer, self.pipeline_group)
            stages = None if engine.pipeline is None else self.pipeline_group
            seconds = report_seconds(self) if in_background else None
            checkpoints.write_directory({model_key: weights}, states, rest, target, stages, engine.about(), seconds)
            return
        background.wait(raises=False)
        full_states = {key: full_state(model, optimizer, self.is_global_zero) for key, optimizer in optimizers.items()}
        file = {model_key: weights, **full_states, **rest}
        on_first_rank("save", target, lambda: checkpoints.write_file(file, target))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, saved by any number of ranks, into the objects of `state`; return the rest; collective."""
        background.wait()
        if self.plan is None and not isinstance(state, Module) and not state:
            return super().load_checkpoint(path, state, strict)  # raises an error
        source = location_of(self.broadcast(path)).existing()
        look = is_checkpoint if self.plan is not None else has_manifest
        is_readable = self.broadcast(on_first_rank("load", source, partial(look, source)))
        if self.plan is None and not (is_readable or source.is_local) and takes_urls(self):
            return super().load_checkpoint(
                str(source), state, strict, **checkpoints.without_none(weights_only=weights_only)
            )
        if isinstance(state, dict) and state and is_readable:
            return self._load_directory(source, state, strict, weights_only)
        with checkpoints.local_file(source) as file:
            return self._load_file(file, state, strict, weights_only)

    def _load_file(self, source: Path, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        optimizers = {}
        if self.plan is not None and isinstance(state, dict):
            optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        arguments = checkpoints.without_none(weights_only=weights_only)
        if not optimizers:
            return super().load_checkpoint(source, state, strict, **arguments)
        others = {key: value for key, value in state.items() if key not in optimizers}
        rest = super().load_checkpoint(source, others, strict, **arguments)
        state.update(others)
        [model] = [value for value in others.values() if isinstance(value, Module)]
        for key, optimizer in optimizers.items():
            if key not in rest:
                raise KeyError(_no_optimizer_text(source, key))
            load_state(model, optimizer, rest.pop(key))
        return rest

    def _load_directory(
        self, source: Location, state: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        models = {key: value for key, value in state.items() if isinstance(value, Module)}
        sharded = {
            key: model
            for key, model in models.items()
            if any(isinstance(parameter, DTensor) for parameter in model.parameters())
        }
        models = sharded or models
        if len(models) != 1:
            raise ValueError(
                f"{type(self).__name__} got {len(models)} models for the checkpoint {str(source)!r}; pass a state "
                "with one model, which has been set up."
            )
        [(model_key, model)] = models.items()
        checkpoint, rest = checkpoints.open_directory(source, weights_only, self._engine.options.allow_pickle)
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        others = state.keys() - optimizers.keys() - {model_key}
        missing = sorted(others - rest.keys()) if strict else []
        if missing:
            raise KeyError(
                f"the checkpoint {str(source)!r} has no entry {missing[0]!r}; load it without that key, or with "
                "strict=False."
            )
        target = {model_key: checkpoints.target_of_model(checkpoint, model_key, model, optimizers.values())}
        checkpoint.load(target, allow_partial=not strict)
        model.load_state_dict(target[model_key], strict=strict)
        for key, optimizer in optimizers.items():
            if not checkpoints.load_optimizer_of_directory(checkpoint, key, model, optimizer, rest):
                raise KeyError(_no_optimizer_text(source, key))
        for key in others & rest.keys():
            state[key] = rest.pop(key)
        return rest


def _no_optimizer_text(source: Path | Location, key: str) -> str:
    return (
        f"the checkpoint {str(source)!r} has no entry {key!r} for the optimizer of that name in the state; load it "
        "without the optimizer, or under the name it was saved as."
    )
