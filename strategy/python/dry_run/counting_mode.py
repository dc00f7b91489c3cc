"""A dispatch mode under which a training runs on tensors without values, and a ledger counts its memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weft import _memory
from weft.strategy.dry_run.leaves import leaves_of
from weft.strategy.dry_run.ledger import TensorLedger
from weft.strategy.dry_run.messages import SentMessages, channel_of
from weft.strategy.dry_run.staging import Staging
from weft.strategy.dry_run.step_clock import StepClock
from weft.strategy.dry_run.temporaries import Temporaries
from weft.strategy.dry_run.trace import OperatorTrace
from weft.strategy.pipeline.fake_mode import FakeMode, is_recorded

aten = torch.ops.aten
# Larger integers and booleans have no values.
_MAX_VALUE_BYTES = 1 << 20
# weft's operators whose kernels call other operators: their code runs, and the operators that it calls are counted.
_THROUGH = frozenset(
    (
        "column_row_mlp",
        "column_linear",
        "row_linear",
        "all_gather_linear",
        "linear_reduce_scatter",
        "sharded_linear",
        "vocab_parallel_embedding",
        "vocab_parallel_cross_entropy",
        "vocab_parallel_linear_cross_entropy",
        "rms_norm",
        "layer_norm",
        "add_rms_norm",
        "add_layer_norm",
        "copy_to_group",
        "reduce_from_group",
        "scatter_to_group",
        "gather_from_group",
        "gather_from_sequence",
        "reduce_scatter_to_sequence",
        "all_to_all",
        "ring_attention",
        "_ring_attention",
        "_ring_attention_backward",
        "grouped_linear",
        "_grouped_weight_grad",
        "_grouped_bias_grad",
        "_moe_dispatch",
        "_moe_dispatch_backward",
        "_moe_combine",
        "_moe_combine_backward",
        "_column_row_mlp_saving",
        "_all_gather_linear_backward",
        "_linear_reduce_scatter_backward",
        "_sharded_linear_input_grad",
        "_sharded_linear_shard_grad",
        "_vocab_cross_entropy",
        "_vocab_cross_entropy_backward",
        "_linear_cross_entropy",
        "_linear_cross_entropy_backward",
    )
)
_OF_EXPERTS = ("grouped_linear", "_moe_dispatch")  # whose results depend on the choice of experts
_DEVICE = torch.ops.prim.device.default
_EMPTY = ("empty", "new_empty")  # the operators whose results are written later
# Fused steps change their arguments in place, and return nothing that is new.
_FUSED_STEPS = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


class CountingMode(TorchDispatchMode):
    """Counts the storages that operators make, their temporaries, and the staging buffers of collectives.

    `unmeasured` has the names of operators with calls too large for a measurement of their temporaries;
    `assumes_balanced_routing`: whether the training chooses experts, see `balanced_routing`.

    Tensors have no values, except for small ones of integers and booleans: these decide what a model does, such as
    whether a mask is needed. Where code reads a value that does not exist, `all` and `equal` are true, other booleans
    false, and numbers one.
    """

    def __init__(
        self,
        ledger: TensorLedger,
        fake_mode: FakeMode,
        temporaries: Temporaries,
        clock: StepClock | None,
        trace: OperatorTrace | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.unmeasured: set[str] = set()
        self._temporaries = temporaries
        self._clock = clock
        self._trace = trace
        self._fake_mode = fake_mode
        self._staging = Staging()
        self._sent = SentMessages()
        self._is_paused = False
        self._keeps_scalars = False
        self._keeps_integers = False
        self.assumes_balanced_routing = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, all operators are counted; operators of weft run the code of eager mode."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate(propagator: Any, op_schema: Any) -> Any:
            with self.paused():  # computes with unsharded tensors, to find the shape of a result
                return original(propagator, op_schema)

        get_rng_state = torch.get_rng_state

        def held_rng_state() -> Tensor:
            state = get_rng_state()  # made without an operator; activation checkpoints keep one for each block
            self.ledger.hold([state])
            return state

        before = _memory.set_dry_run(True)
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate  # type: ignore[method-assign, assignment]
        torch.get_rng_state = held_rng_state
        try:
            with self.ledger.seeing_resizes(self._allocated), self._fake_mode, self:
                yield
        finally:
            torch.get_rng_state = get_rng_state
            ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]
            _memory.set_dry_run(before)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is counted."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextlib.contextmanager
    def keeping_scalars(self) -> Iterator[None]:
        """Inside, new tensors of one element without dims have values: the counts of an optimizer's steps."""
        before, self._keeps_scalars = self._keeps_scalars, True
        try:
            yield
        finally:
            self._keeps_scalars = before

    @contextlib.contextmanager
    def keeping_integers(self) -> Iterator[None]:
        """Inside, integers and booleans that are computed from values have values: choices of experts."""
        self.assumes_balanced_routing = True
        before, self._keeps_integers = self._keeps_integers, True
        try:
            yield
        finally:
            self._keeps_integers = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # The most frequent call: torch reads the device of each tensor in the backward. This is the answer of
            # FakeTensorMode.
            return torch.device("meta") if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        if any(not issubclass(cls, FakeTensor) for cls in types):
            return NotImplemented  # a DTensor calls this operator, or others, for its local shard
        if self._is_paused:
            return func(*args, **kwargs)
        mode = self._mode_of_recording(args, kwargs)
        if mode is not None:
            with mode:
                return func(*self._in_mode(mode, args), **self._in_mode(mode, kwargs))
        try:
            result = self._run(func, args, kwargs)
        except DynamicOutputShapeException as error:
            raise ValueError(
                f"estimate: the training calls {func}, and the shape of its result depends on values, which a dry run "
                "does not have; estimate a model without it."
            ) from error
        return result

    # ---- recordings of pipelines -----------------------------------------------------------------------------

    def _mode_of_recording(self, args: Any, kwargs: Any) -> FakeTensorMode | None:
        """Return the mode of a recording that makes or takes part in a call; None: it is a call of the training.

        The tensors of a recording are fake in a training, too: they have no memory, and are not counted.
        """
        active: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if active is not None and active is not self._fake_mode:
            return active
        return next((leaf.fake_mode for leaf in leaves_of((args, kwargs)) if is_recorded(leaf)), None)

    def _in_mode(self, mode: FakeTensorMode, values: Any) -> Any:
        """Return arguments in which tensors of a recording replace those of the dry run, which are real in training."""

        def like(value: Any) -> Any:
            if not isinstance(value, FakeTensor) or value.fake_mode is mode:
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

        with mode:
            return tree_map(like, values)

    # ---- calls -------------------------------------------------------------------------------------------------

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if self._trace is not None:
            self._trace.add_call(func, args, kwargs)
        if namespace == "c10d":
            return self._communicate(func, name, args, kwargs)
        if namespace == "_c10d_functional" and name == "wait_tensor":
            return args[0]
        if namespace == "weft" and name == "pipeline_flush":
            self._sent.complete()
        if namespace == "aten" and name in _FUSED_STEPS:
            self._time(func, args, kwargs, None)
            return None
        if namespace == "weft" and name in _THROUGH:
            self.assumes_balanced_routing |= name in _OF_EXPERTS
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _VALUE_READS and isinstance(args[0], FakeTensor):
            return _assumed_value(func, args[0])
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            result = self._run_with_values(func, args, kwargs, is_factory=not tensors)
            if name.startswith(_EMPTY):
                self._allocated(result.untyped_storage().nbytes())
            return result
        result = func(*args, **kwargs)
        if name.startswith(_EMPTY):
            self._allocated(result.untyped_storage().nbytes())
        if func in _ALL:
            result._is_all = True
        self.ledger.hold(_tensors_of(result))
        if namespace != "prim" and not _makes_views(func):
            temporary_bytes = self._temporaries.of(func, args, kwargs)
            if temporary_bytes is None:
                self.unmeasured.add(str(func))
            else:
                self.ledger.hold_briefly(temporary_bytes)
            self._time(func, args, kwargs, result)
        return result

    def _time(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._clock is not None:
            self._clock.operator(func, args, kwargs, result, self.ledger.phase)

    def _allocated(self, num_bytes: int) -> None:
        if self._clock is not None:
            self._clock.allocation(num_bytes, self.ledger.phase)

    def _run_with_values(self, func: Any, args: Any, kwargs: Any, is_factory: bool) -> Any:
        if is_factory:
            result = func(*args, **kwargs)
            if not all(self._has_values(tensor) for tensor in _tensors_of(result)):
                self.ledger.hold(_tensors_of(result))
                return result
        with no_dispatch():
            result = func(*args, **kwargs)
        inputs = {id(leaf) for leaf in leaves_of((args, kwargs))}

        def without_values(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in inputs or self._has_values(value):
                return value
            return self._fake_mode.from_tensor(value)

        result = tree_map(without_values, result)
        self.ledger.hold(_tensors_of(result))
        return result

    def _has_values(self, tensor: Tensor) -> bool:
        is_small = tensor.untyped_storage().nbytes() <= _MAX_VALUE_BYTES
        if tensor.is_floating_point() or tensor.is_complex():
            return self._keeps_scalars and tensor.dim() == 0 and is_small
        return self._keeps_integers or is_small

    # ---- collectives ---------------------------------------------------------------------------------------

    def _communicate(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Count the staging of a collective of c10d; its result is its argument, and complete."""
        group = next(
            dist.ProcessGroup.unbox(leaf)
            for leaf in leaves_of((args, kwargs))
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        )
        self._stage(group, name, args)
        with no_dispatch():
            if name == "alltoall_base_":  # its arguments 3 and 4 are the numbers of rows for each rank
                args = *args[:3], [0] * len(args[3]), [0] * len(args[4]), *args[5:]
            empty = tree_map(lambda leaf: torch.empty(0) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            result = func(*empty[0], **empty[1])
        return (args[0], *result[1:]) if isinstance(result, tuple) else result

    def _stage(self, group: Any, name: str, args: Any) -> None:
        staging = self._staging.group(group.group_name, group.size())
        sizes = [[leaf.nbytes for leaf in leaves_of(arg) if isinstance(leaf, Tensor)] for arg in args[:2]]
        first, second = sum(sizes[0]), sum(sizes[1]) if len(sizes) > 1 else 0
        if self._clock is not None and name not in ("send", "recv_"):
            num_bytes = first
            if "allgather" in name:
                num_bytes = second * group.size()
            elif "reduce_scatter" in name:
                num_bytes = first * group.size()
            self._clock.collective(name, num_bytes, dist.get_process_group_ranks(group))
        if name.startswith("allreduce"):
            for num_bytes in sizes[0]:
                staging.all_reduce(num_bytes)
        elif name.startswith(("_allgather", "allgather")):
            staging.exchange(second)
        elif name.startswith(("_reduce_scatter", "reduce_scatter")):
            staging.reduce_scatter(first)
        elif name.startswith("broadcast"):
            staging.exchange(first, writes=group.rank() == args[2])
        elif name.startswith("alltoall"):  # of one tensor, or of a list with a tensor for each rank
            sent = _sent_bytes(args[1], args[4], group.size()) if isinstance(args[1], Tensor) else sizes[1]
            staging.all_to_all(sent, group.rank())
        elif name == "send":
            staging.send(first, args[2])
            self._sent.add(group.group_name, args[2], args[3], args[0])
            channel = channel_of(args[3])
            if self._clock is not None and channel is not None:
                self._clock.message(channel, first)
        elif name == "recv_":
            staging.receive(first, args[2])
        else:
            staging.exchange(0)
        self.ledger.set_shared_memory(self._staging.num_bytes)


# Kernels of weft read by `item`, and Python by `_local_scalar_dense`.
_VALUE_READS = (aten.item.default, aten._local_scalar_dense.default, aten.equal.default)
_ALL = (aten.all.default, aten.all.dim, aten.all.dims)


def _assumed_value(func: Any, tensor: Tensor) -> Any:
    if func is aten.equal.default:
        return True
    if tensor.dtype == torch.bool:
        return getattr(tensor, "_is_all", False)
    return 1.0 if tensor.is_floating_point() else 1


def _sent_bytes(rows: Tensor, sizes: list[int], num_ranks: int) -> list[int]:
    """Return the bytes that an all-to-all of `rows` sends to each rank; `sizes`: rows for each, or none if equal."""
    row_bytes = rows.nbytes // max(1, rows.size(0))
    return [row_bytes * number for number in sizes] or [rows.nbytes // num_ranks] * num_ranks


def _tensors_of(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


@functools.cache
def _makes_views(func: Any) -> bool:
    """Return whether all results of an operator are views of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
