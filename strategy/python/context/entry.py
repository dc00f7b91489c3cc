"""Makes a module compute on a shard of the sequence: the tokens are sharded where its embeddings read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from weft.strategy.context.attention import Attention
from weft.strategy.context.experts import compute_experts_on_shards
from weft.strategy.context.groups import grids_of
from weft.strategy.context.layout import Order, layout_of, place_of
from weft.strategy.context.sharded_sequence import ShardedSequence, forget_kept, separate, shard

_MARK = "_weft_context"
ORDERS: dict[Attention, Order] = {"ring": "head_tail", "ulysses": "contiguous", "ring_ulysses": "head_tail"}


class Context:
    """The context-parallel group of a model, and the length of the sequence that it reads."""

    def __init__(self, group: dist.ProcessGroup, attention: Attention) -> None:
        self.group_name = group.group_name
        self.num_ranks, self.rank = group.size(), group.rank()
        self.order = ORDERS[attention]
        self.grids = grids_of(group) if attention == "ring_ulysses" else ()
        self._length: int | None = None

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return a full tensor, equal on all ranks, as a sharded sequence with its tokens at `dim`."""
        layout = layout_of(x.shape[dim], self.group_name, self.num_ranks, self.rank, self.order, self.grids)
        place = place_of(layout, dim % x.dim())
        return ShardedSequence(shard(x, place), place)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def shard_ids(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shard the ids `[..., tokens]` that an embedding gets, or positions `[tokens]` of that sequence."""
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or type(ids) is ShardedSequence or ids.dim() == 0 or ids.shape[-1] < 2:
            return None
        if ids.dim() == 1 and ids.shape[0] != self._length:
            return None
        self._length = ids.shape[-1]
        forget_kept()
        return (self.shard(ids, -1), *args[1:]), {name: each for name, each in kwargs.items() if name != "input"}


def parallelize_context(
    module: nn.Module, group: dist.ProcessGroup, *, attention: Attention = "ring", skeleton: nn.Module | None = None
) -> None:
    """Make a module compute on a shard of the sequence, in place.

    All ranks of the group call the module with the same batch. Each embedding (nn.Embedding) computes this rank's part
    of the ids `[..., tokens]` that it gets, and what is computed from its result is a `ShardedSequence`, down to the
    loss, which is a plain number again, equal on all ranks.

    Args:
        module: has an nn.Embedding; may be parallelized by a plan.
        group: the context-parallel group; a group of one rank changes nothing. A later call with another group
            replaces the first one.
        attention: how F.scaled_dot_product_attention is computed: "ring" or "ulysses" attention, see `weft.ops`, or
            "ring_ulysses": by Ulysses within groups of ranks, as many as divide a layer's heads and key/value heads,
            and by the ring between the groups. The first call for `group` then creates two process groups for each
            proper divisor of its size, and all ranks of `group` must make it.
        skeleton: of a module in pipeline stages: the copy with all stages, whose forward is recorded.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: `attention` has another value, the module has no embedding or computes attention by
            flex_attention, or the group's ranks are not in ascending order, as "ring_ulysses" needs them.
    """
    if attention not in ORDERS:
        raise ValueError(f"parallelize_context got attention={attention!r}; pass 'ring', 'ulysses' or 'ring_ulysses'.")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"parallelize_context got a group of type {type(group).__name__}; pass a ProcessGroup, such as "
            "mesh.get_group()."
        )
    if group.size() == 1:
        return
    modules = [module] if skeleton is None else [module, skeleton]
    embeddings = [each for root in modules for each in root.modules() if isinstance(each, nn.Embedding)]
    if not embeddings:
        raise ValueError(
            f"parallelize_context got a {type(module).__name__} without an nn.Embedding, where the sequence of tokens "
            "begins; leave context parallelism out."
        )
    # transformers names the function in the configuration. torch compiles it, and traces no sharded sequence.
    configs = [getattr(each, "config", None) for root in modules for each in root.modules()]
    if any(getattr(config, "_attn_implementation", None) == "flex_attention" for config in configs):
        raise ValueError(
            f"parallelize_context got a {type(module).__name__} with attn_implementation='flex_attention', which takes "
            "no sharded sequences; pass 'sdpa', or leave context parallelism out."
        )
    for each in modules:
        remove_context(each)
        compute_experts_on_shards(each)
    # The forwards of a rank's stages and of the recording have lengths of their own.
    for root in modules:
        context = Context(group, attention)
        for each in root.modules():
            if isinstance(each, nn.Embedding):
                each.__dict__[_MARK] = each.register_forward_pre_hook(context.shard_ids, with_kwargs=True)


def remove_context(module: nn.Module) -> None:
    """Make a module compute on full sequences again."""
    for each in module.modules():
        if isinstance(each, nn.Embedding) and _MARK in each.__dict__:
            each.__dict__.pop(_MARK).remove()


def carry_through_fsdp(module: nn.Module) -> None:
    """Let sharded sequences pass FSDP2's autograd functions, which see the shards; after FSDP2 is applied."""
    for each in module.modules():
        if isinstance(each, FSDPModule) and _MARK not in each.__dict__:
            carrier = _Carrier()
            each.__dict__[_MARK] = carrier
            each.register_forward_pre_hook(carrier.unwrap, prepend=True, with_kwargs=True)
            each.register_forward_pre_hook(carrier.wrap, with_kwargs=True)


class _Carrier:
    """Separates the sequences among the arguments of a module from their shards, while FSDP2's hooks run."""

    def __init__(self) -> None:
        self._calls: list[Callable[[Any], Any]] = []

    def unwrap(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        shards, join = separate((args, kwargs))
        self._calls.append(join)
        return shards

    def wrap(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._calls.pop()((args, kwargs))
