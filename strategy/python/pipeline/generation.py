"""Runs `generate` of a model in stages: every rank runs the same code, and each layer runs on the rank of its stage.

`generate` calls the model once for each token, and the next call depends on the logits of the last one, so that stages
cannot work at the same time. In such a call, no schedule runs and nothing is recorded: the forward runs on every rank,
and returns the full output on every rank. A layer computes only on its *owner*, the rank of its stage. On other ranks
its outputs have no values until code uses them: a layer of another owner, a function between layers, or the code after
the forward. Then the owner broadcasts the value. All ranks run the same code and so take part in the same broadcasts.
Keys and values stay on the rank whose layers compute them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.strategy.context.sharded_sequence import ShardedSequence, full_sequences
from weft.strategy.pipeline.fake_mode import is_recorded
from weft.strategy.pipeline.generation_cache import StageCaches
from weft.strategy.pipeline.layer_calls import InterceptedLayer, Mode, run_in_mode
from weft.strategy.pipeline.micro_batches import signature
from weft.strategy.pipeline.recording import name_of
from weft.strategy.pipeline.stages import ANY_STAGE
from weft.strategy.sharding.local_tensor import local_of

if TYPE_CHECKING:
    from weft.strategy.pipeline.staged_model import StagedModel

_DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
_MAX_DIMS = 12
# In the structure of a layer's output: a tensor.
_TENSOR = "tensor"


class GenerateCall(BaseException):
    """Ends a step whose first call of the model is one of `generate`: no schedule can run such a step."""


class StageValue(Tensor):
    """A tensor of a layer's output, on every rank; only the owner has its values until `Transfers.value_of` runs.

    owner: the rank, in the pipeline's group, that has computed it.
    value: the values; None: this rank does not have them.
    is_everywhere: whether all ranks have them.
    """

    owner: int
    value: Tensor | None
    is_everywhere: bool
    transfers: Transfers

    @staticmethod
    def __new__(cls, owner: int, value: Tensor | None, transfers: Transfers) -> StageValue:
        made = torch.empty(0, device="meta").as_subclass(cls)
        made.owner, made.value, made.is_everywhere, made.transfers = owner, value, False, transfers
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        transfers = next(leaf.__dict__["transfers"] for leaf in leaves if isinstance(leaf, StageValue))
        args, kwargs = transfers.with_values((args, kwargs or {}))
        return func(*args, **kwargs)


class Transfers:
    """Broadcasts values, and the structures of layers' outputs, from their owners."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._rank = group.rank()
        self._device = device
        self._structures: dict[Any, Any] = {}

    def with_values(self, tree: Any) -> Any:
        """Return a tree with full tensors in place of StageValues; collective if one has no values on some rank."""
        return pytree.tree_map(lambda leaf: self.value_of(leaf) if isinstance(leaf, StageValue) else leaf, tree)

    def value_of(self, leaf: StageValue) -> Tensor:
        """Return a StageValue's values, on every rank; collective if some rank has none."""
        state = leaf.__dict__
        if not state["is_everywhere"]:
            state["value"] = self._broadcast(state["value"], state["owner"])
            state["is_everywhere"] = True
        value: Tensor = state["value"]
        return value

    def on_owner(self, tree: Any, owner: int) -> Any:
        """Return a tree whose StageValues have values on the rank `owner`: full tensors there."""

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, StageValue):
                return leaf
            if leaf.__dict__["owner"] != owner:
                return self.value_of(leaf)
            return leaf.__dict__["value"] if owner == self._rank else leaf

        return pytree.tree_map(moved, tree)

    def _broadcast(self, value: Tensor | None, owner: int) -> Tensor:
        # dims, dtype, whether it is on the CPU, sizes
        header = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64)
        if value is not None:
            value = full_sequences(value.detach()).contiguous()
            sizes = [value.dim(), _DTYPES.index(value.dtype), int(value.device.type == "cpu"), *value.shape]
            header[: len(sizes)] = torch.tensor(sizes)
        dist.broadcast(header, group_src=owner, group=self._group)
        dims, dtype, is_cpu, *shape = header.tolist()
        if value is None:
            device = torch.device("cpu") if is_cpu else self._device
            value = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=device)
        if value.numel() > 0:
            dist.broadcast(value, group_src=owner, group=self._group)
        return value

    def shared_output(self, key: Any, owner: int, output: Any, arguments: Sequence[Any]) -> Any:
        """Return a layer's output with StageValues in place of tensors, on every rank.

        The structure of an output without Python values is broadcast once for each `key`.

        Args:
            key: of the layer and the kind of its arguments, the same on every rank.
            output: the output; None on other ranks than `owner`.
            arguments: the leaves of the layer's arguments; an output may contain them (a cache).
        """
        is_owner = owner == self._rank
        leaves, structure = None, self._structures.get(key)
        if is_owner:
            leaves = pytree.tree_leaves(output)
            found = pytree.tree_map(lambda leaf: _described(leaf, arguments), output)
            if structure is not None and found != structure:
                raise RuntimeError(
                    f"pipeline: the layer {key[0]!r} returned {found} and, for arguments of the same kind, {structure} "
                    "before, which other stages expect; let the structure of its output depend on its arguments only."
                )
            structure = found
        if key not in self._structures:
            box = [structure]
            dist.broadcast_object_list(box, group_src=owner, group=self._group, device=torch.device("cpu"))
            structure = box[0]
            if all(kind != "value" or detail is None for kind, detail in _kinds(structure)):
                self._structures[key] = structure
        kinds = _kinds(structure)
        values = leaves or [None] * len(kinds)
        spec = pytree.tree_structure(structure, is_leaf=_is_kind)
        return pytree.tree_unflatten(
            [self._output_leaf(kind, value, owner, arguments) for kind, value in zip(kinds, values, strict=True)], spec
        )

    def _output_leaf(self, kind: tuple[str, Any], value: Any, owner: int, arguments: Sequence[Any]) -> Any:
        if kind[0] == _TENSOR:
            return StageValue(owner, value, self)
        return arguments[kind[1]] if kind[0] == "argument" else kind[1]


def _described(leaf: Any, arguments: Sequence[Any]) -> tuple[str, Any]:
    """Return (kind, detail) of a leaf of an output: a tensor, an argument by its index, or another value."""
    if isinstance(leaf, Tensor):
        return (_TENSOR, None)
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    index = None if is_plain else next((i for i, each in enumerate(arguments) if each is leaf), None)
    return ("value", leaf) if index is None else ("argument", index)


def _is_kind(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and value[0] in (_TENSOR, "argument", "value")


def _kinds(structure: Any) -> list[tuple[str, Any]]:
    return pytree.tree_leaves(structure, is_leaf=_is_kind)


class _Forward(Mode):
    """Runs one forward on every rank."""

    def __init__(self, transfers: Transfers, rank: int, rank_of: Sequence[int], own_parameters: set[int]) -> None:
        super().__init__()
        self._transfers = transfers
        self._rank = rank
        self._rank_of = rank_of
        self._own_parameters = own_parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, StageValue) for leaf in leaves):
            args, kwargs = self._transfers.with_values((args, kwargs))
        output = None
        reads_parameter = any(is_recorded(leaf) or id(leaf) in self._own_parameters for leaf in leaves)
        if not reads_parameter or name_of(func) in ("__get__", "size", "dim", "numel", "is_floating_point"):
            output = func(*args, **(kwargs or {}))
        if reads_parameter and (output is None or isinstance(output, Tensor)):
            raise RuntimeError(
                f"pipeline: {name_of(func)} reads a parameter between the layers, which only the ranks of one stage "
                "have, and generate does not send parameters; call the layer that holds it."
            )
        return output

    def call_layer(self, layer: InterceptedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a layer's output, with StageValues for its tensors; the layer computes on its owner only."""
        name, stage = layer._weft_layer
        if stage == ANY_STAGE:
            return self._without_interception(lambda: layer.call_directly(*self._transfers.with_values((args, kwargs))))
        owner = self._rank_of[stage]
        return self._without_interception(lambda: self._call_on(owner, name, layer, args, kwargs))

    def _call_on(self, owner: int, name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._transfers.on_owner((args, kwargs), owner)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        kinds = (leaf if isinstance(leaf, (bool, str)) else _kind_of(leaf) for leaf in leaves)
        output = layer.call_directly(args, kwargs) if owner == self._rank else None
        if output is not None:
            output = pytree.tree_map_only(Tensor, _plain, output)
        return self._transfers.shared_output((name, str(spec), *kinds), owner, output, leaves)


def _plain(value: Tensor) -> Tensor:
    """Return a plain tensor or a sharded sequence; logits of a vocab_head are computed here, on the owners."""
    value = local_of(value)
    return value if type(value) in (Tensor, ShardedSequence) else value.detach().clone()


def _kind_of(leaf: Any) -> Any:
    return Tensor if isinstance(leaf, Tensor) else type(leaf)


class Generation:
    """Runs the `generate` of a model in stages.

    staged: the model in stages.
    group: the ranks of the pipeline.
    rank_of: the rank of each stage.
    around: returns the context in which the forwards of a `generate` run.
    is_open: whether a call of the model runs on all ranks.
    is_active: whether a `generate` is running.
    is_running_step: whether a step that calls `generate` is running, on all ranks.
    """

    def __init__(
        self,
        staged: StagedModel,
        group: dist.ProcessGroup,
        rank_of: Sequence[int],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._staged = staged
        self._group = group
        self._rank_of = rank_of
        self._around = around
        self._contexts = contextlib.ExitStack()
        self._arguments: Any = None
        self._transfers: Transfers | None = None  # after the first forward of a `generate`
        self._caches = StageCaches(staged, rank_of, group.rank())
        self.is_open = False
        self.is_active = False
        self.is_running_step = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        return self  # process groups cannot be copied

    def run(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `method`, the model's `generate`; collective if it calls the model.

        Raises:
            ValueError: the model is an encoder-decoder model.
        """
        model = self._staged.model
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ValueError(
                f"pipeline: generate of a {type(model).__name__} calls its encoder outside of the model's forward, and "
                "stages run inside of it only; generate with tensor parallelism, or on one device."
            )
        outer, self.is_active = self.is_active, True
        try:
            with self._on_all_ranks((args, kwargs)):
                return method(*args, **kwargs)
        finally:
            self.is_active = outer

    def run_step(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """Return the result of a step that calls `generate` first: every rank runs it once, for the full batch."""
        self.is_running_step = True
        try:
            with self._on_all_ranks(batch):
                return step(batch)
        finally:
            self.is_running_step = False

    @contextlib.contextmanager
    def _on_all_ranks(self, arguments: Any) -> Iterator[None]:
        """Inside, each call of the model runs on all ranks; `arguments`: equal on them."""
        if self.is_open:
            yield
            return
        self.is_open = True
        try:
            with contextlib.ExitStack() as self._contexts:
                self._arguments = arguments
                yield
        finally:
            self._transfers, self._arguments, self.is_open = None, None, False

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of one forward, on every rank; collective.

        In the first forward of a `generate` or step, torch's random state becomes that of the first rank, so that all
        ranks sample the same tokens.

        Raises:
            ValueError: the ranks have different prompts or options.
        """
        if self._transfers is None:
            self._contexts.enter_context(self._around())
            self._check_equal(self._arguments)
            self._align_random_states()
            self._transfers = Transfers(self._group, self._staged.device)
        transfers = self._transfers
        own = {id(parameter) for parameter in self._staged.model.parameters()}
        mode = _Forward(transfers, self._group.rank(), self._rank_of, own)
        with torch.no_grad(), self._caches.of_other_stages(args, kwargs) as caches:
            output = transfers.with_values(run_in_mode(mode, lambda: forward(*args, **kwargs)))
            caches.add(output, is_new=True)
        return output

    def _check_equal(self, arguments: Any) -> None:
        digest = hashlib.sha256()
        for leaf in pytree.tree_leaves(arguments):
            digest.update(repr(signature(leaf)).encode())
            if isinstance(leaf, Tensor):
                digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, digest.hexdigest(), group=self._group)
        other = next((rank for rank, each in enumerate(gathered) if each != gathered[0]), None)
        if other is not None:
            raise ValueError(
                f"pipeline: generate got other arguments on rank {other} of the pipeline than on rank 0; pass the same "
                "prompts and options on all ranks of a pipeline."
            )

    def _align_random_states(self) -> None:
        state = torch.get_rng_state()
        dist.broadcast(state, group_src=0, group=self._group)
        torch.set_rng_state(state)
        device = self._staged.device
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            dist.broadcast(state, group_src=0, group=self._group)
            torch.cuda.set_rng_state(state, device)
