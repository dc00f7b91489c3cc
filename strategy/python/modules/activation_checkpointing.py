"""Activation checkpointing: a module saves its inputs for the backward, which recomputes the activations it needs.

As in Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by non-reentrant torch.utils.checkpoint.
A checkpointed module gets a subclass of its class: names, hooks and state dicts do not change.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from weft.strategy._plan import matches
from weft.strategy.modules.argument_caches import caches_in_first_state
from weft.strategy.modules.kept_recomputation import checkpoint
from weft.strategy.modules.offload import OffloadedModule
from weft.strategy.sharding.remote_layers import RemoteLayer
from weft.strategy.sharding.state import cached, original_class, state_of

FULL, SELECTIVE, NONE = "full", "selective", "none"
CheckpointSpec = str | Sequence[str] | Mapping[str, str]

# The operators whose results a selective checkpoint saves: matrix products, convolutions, attention, communication,
# vocabulary-parallel embeddings and losses.
_SAVED_ATEN = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math"),
)
_SAVED_WEFT = (
    *("column_linear", "row_linear", "_column_row_mlp_saving", "vocab_parallel_embedding"),
    *("all_gather_linear", "linear_reduce_scatter", "sharded_linear", "_ring_attention"),
    *("grouped_linear", "_moe_dispatch", "_moe_combine"),
    *("_moe_routes", "_moe_start_dispatch", "_moe_start_return", "_moe_sum"),
    *("_vocab_cross_entropy", "_linear_cross_entropy"),
    *("reduce_from_group", "gather_from_group", "gather_from_sequence", "reduce_scatter_to_sequence", "all_to_all"),
)
_SAVED_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def checkpoint_activations(model: nn.Module, what: CheckpointSpec = FULL, *, offload: bool = False) -> list[str]:
    """Checkpoint modules of a model, in place, after `parallelize`.

    Args:
        model: a plain module, or one that `parallelize`, `fully_shard` or both have changed.
        what: "full" or "selective" for all repeated blocks (see `repeated_blocks`); "full:8" or "selective:8" for the
            first eight of them, in a pipeline of those on each rank; or a pattern of module names, as in a plan, or
            several, for a full checkpoint of each match; or a dict from pattern to "full" or "selective"; or "none". A
            full checkpoint saves a module's inputs. A selective one also saves the results of matrix products,
            convolutions, attention, communication, and vocabulary-parallel embeddings and losses, which are not
            recomputed; code must not change these results in place.
        offload: keep the tensors among a module's arguments in pinned CPU memory until the backward.

    Returns:
        The names of the checkpointed modules.

    Raises:
        ValueError: no blocks were found; a pattern matches nothing, has a value other than "full" and "selective", or
            contradicts another pattern; or a module to checkpoint is a layer of a fused MLP, has no forward in its
            class, has a forward that was replaced on the instance, or already has a checkpoint with other options. Also
            if the rule of the module, or of a module inside, has offload; and for a selective checkpoint, if such a
            rule has recompute, or a module inside is checkpointed. No module is changed then.
        TypeError: `what` has none of these types, or is empty.
    """
    check_checkpoint_spec("checkpoint_activations", what)
    modes = _modes(model, what)
    modules = {name: model.get_submodule(name) for name in modes}
    for name, mode in modes.items():
        _check_module(name, modules[name], mode, offload)
    for name, mode in modes.items():
        module = modules[name]
        if not isinstance(module, CheckpointedModule):
            module.__class__ = _checkpointed_class(type(module), mode, offload)
    return list(modes)


def _modes(model: nn.Module, what: CheckpointSpec) -> dict[str, str]:
    """Return the mode of each module to checkpoint, by name; a module with two names counts once."""
    if what == NONE:
        return {}
    names = [name for name, _ in model.named_modules()]
    kind, count = split_count(what)
    if kind in (FULL, SELECTIVE):
        blocks = repeated_blocks(model)
        if not blocks:
            raise ValueError(
                f"checkpoint_activations: {what!r} finds no repeated blocks in a {original_class(model).__name__}, "
                "which are modules of one class in an nn.ModuleList or nn.Sequential; pass patterns of module names."
            )
        return dict.fromkeys(blocks[:count], str(kind))
    patterns = what if isinstance(what, Mapping) else dict.fromkeys([what] if isinstance(what, str) else what, FULL)
    modes: dict[str, str] = {}
    for pattern, mode in patterns.items():
        if mode not in (FULL, SELECTIVE):
            raise ValueError(
                f"checkpoint_activations: pattern '{pattern}' has the value {mode!r}; pass 'full' or 'selective'."
            )
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise ValueError(
                f"checkpoint_activations: pattern '{pattern}' matches no module; pass 'full', 'selective', 'none' or "
                f"names such as {', '.join(repr(name) for name in names[1:4])}."
            )
        for name in found:
            if modes.setdefault(name, mode) != mode:
                raise ValueError(
                    f"checkpoint_activations: '{name}' gets 'full' from one pattern and 'selective' from another; "
                    "change the patterns so that they agree."
                )
    return modes


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's repeated blocks.

    A block is an entry of an nn.ModuleList, of an nn.ModuleDict whose keys are numbers, or of an nn.Sequential with two
    or more entries, not counting layers of other pipeline stages. All entries must have one class, which has a forward.
    An entry without modules inside is no block, and neither is an entry inside another block.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found):
            continue
        is_list = isinstance(module, nn.ModuleList)
        is_numbered = isinstance(module, nn.ModuleDict) and all(key.isdigit() for key in module)
        holds_blocks = is_list or is_numbered or isinstance(module, nn.Sequential)
        entries = [(key, entry) for key, entry in module.named_children() if not isinstance(entry, RemoteLayer)]
        entries = entries if holds_blocks else []
        alike = len({_class_without_wrapper(entry) for _, entry in entries}) == 1
        if alike and len(entries) >= (2 if isinstance(module, nn.Sequential) else 1):
            prefix = f"{name}." if name else ""
            found += [prefix + key for key, entry in entries if _is_block(entry)]
    return found


def _is_block(entry: nn.Module) -> bool:
    return type(entry).forward is not nn.Module.forward and any(True for _ in entry.children())


def _class_without_wrapper(module: nn.Module) -> type:
    return next(cls for cls in original_class(module).__mro__ if not issubclass(cls, WrappedForward))


def split_count(what: object) -> tuple[object, int | None]:
    """Return ("full", 8) for "full:8", likewise for "selective:8"; (what, None) for anything else.

    Raises:
        ValueError: the number is missing or below 1.
    """
    kind, colon, number = what.partition(":") if isinstance(what, str) else (what, "", "")
    if not colon or kind not in (FULL, SELECTIVE):
        return what, None
    if not (number.isdecimal() and int(number) >= 1):
        raise ValueError(
            f"checkpoint_activations: got {what!r}; after the colon, give the number of blocks that are checkpointed, "
            "from 1."
        )
    return kind, int(number)


def check_checkpoint_spec(owner: str, what: object) -> None:
    """Raise TypeError unless `what` is text, or a list, tuple or mapping that is not empty and lists only text.

    Raises ValueError for a number of blocks below 1.
    """
    is_text = isinstance(what, str)
    is_patterns = isinstance(what, (list, tuple, Mapping)) and what and all(isinstance(each, str) for each in what)
    if not is_text and not is_patterns:
        raise TypeError(
            f"{owner} got {what!r} for what to checkpoint; pass 'none', 'selective', 'full', a pattern of module "
            "names, a list of them, or a dict from pattern to 'full' or 'selective'."
        )
    split_count(what)


def _check_module(name: str, module: nn.Module, mode: str, offload: bool) -> None:
    shown = f"'{name}'" if name else "the model itself"
    state = state_of(module)
    if state is not None and state.is_layer_of_fused:
        raise ValueError(
            f"checkpoint_activations: {shown} is a layer of a fused MLP, which never calls it; name the MLP, or "
            "set recompute in the rule of the MLP."
        )
    if isinstance(module, CheckpointedModule) and module.checkpoint_mode != (mode, offload):
        raise ValueError(
            f"checkpoint_activations: {shown} has a {module.checkpoint_mode[0]} checkpoint "
            f"{'with' if module.checkpoint_mode[1] else 'without'} offload already; give it the same again, or build "
            "the model anew."
        )
    if isinstance(module, WrappedForward) and not isinstance(module, CheckpointedModule):
        raise ValueError(
            f"checkpoint_activations: {shown} is compiled already, and a checkpoint belongs inside the compiled code; "
            "call compile_blocks after checkpoint_activations, or build the model anew."
        )
    offloaded = next((n for n, m in module.named_modules(prefix=name) if isinstance(m, OffloadedModule)), None)
    if offloaded is not None:
        raise ValueError(
            f"checkpoint_activations: the rule of '{offloaded}' says offload, which would keep what a checkpoint of "
            f"{shown} recomputes; leave out one of the two, or add recompute to that rule."
        )
    recomputing = next((n for n, m in module.named_modules() if _recomputes(m) and m is not module), None)
    if mode == SELECTIVE and (recomputing is not None or (state is not None and state.recompute)):
        raise ValueError(
            f"checkpoint_activations: the rule of '{recomputing or name}' in {shown} says recompute, and a selective "
            "checkpoint would save what it recomputes; leave out one of the two, or use a full checkpoint."
        )
    reason = why_not_wrapped(module)
    if reason is not None:
        raise ValueError(
            f"checkpoint_activations: {shown} is to be recomputed, but {reason}; name the modules inside it."
        )


def _recomputes(module: nn.Module) -> bool:
    state = state_of(module)
    return isinstance(module, CheckpointedModule) or (state is not None and state.recompute)


def why_not_wrapped(module: nn.Module) -> str | None:
    """Return why a subclass of a module's class cannot wrap its forward; None if it can."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return f"a {type(module).__name__} has no forward of its own"
    return "its forward was replaced on the instance" if "forward" in module.__dict__ else None


class WrappedForward:
    """The first base of each class that wraps the forward of a module's class, which is the second base."""


class CheckpointedModule(WrappedForward):
    """Marks every module that checkpoint_activations has changed."""

    checkpoint_mode: tuple[str, bool]  # "full" or "selective", and whether its inputs are offloaded


def has_selective_checkpoints(model: nn.Module) -> bool:
    """Return whether a module has a selective checkpoint, whose saved results support one backward of each forward."""
    found = (module for module in model.modules() if isinstance(module, CheckpointedModule))
    return any(module.checkpoint_mode[0] == SELECTIVE for module in found)


@cached
def _checkpointed_class(cls: type[nn.Module], mode: str, offload: bool) -> type[nn.Module]:
    own_forward = cls.forward
    contexts = _selective_contexts if mode == SELECTIVE else None

    # With offload, the tensors among the keyword arguments are the last len(names) entries of `args`, and `names` has
    # their names: save_on_cpu offloads only tensors that are positional arguments.
    def run(
        self: nn.Module,
        make_lengths_context: Any,
        join: Any,
        caches: Any,
        kwargs: dict[str, Any],
        names: list[str],
        *args: Any,
    ) -> Any:
        num_args = len(args) - len(names)
        args, kwargs = join((args[:num_args], {**kwargs, **dict(zip(names, args[num_args:], strict=True))}))
        if caches is not None:
            args, kwargs = caches(args, kwargs)
        with contextlib.nullcontext() if make_lengths_context is None else make_lengths_context():
            return own_forward(self, *args, **kwargs)

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return own_forward(self, *args, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if offload else contextlib.nullcontext():
            names = [name for name, value in kwargs.items() if offload and isinstance(value, Tensor)]
            if names:
                kwargs = {name: kwargs[name] for name in sorted(kwargs, key=names.__contains__)}  # as `run` joins them
            caches = None if torch.compiler.is_compiling() else caches_in_first_state(args, kwargs)
            (args, kwargs), join = _without_sequences((args, kwargs))
            others = {name: value for name, value in kwargs.items() if name not in names}
            settings = (_lengths_context(self), join, caches)
            args = (self, *settings, others, names, *args, *(kwargs[name] for name in names))
            return checkpoint(run, *args, contexts=_compiled_contexts(args, contexts))

    namespace = {"__module__": cls.__module__, "forward": forward, "checkpoint_mode": (mode, offload)}
    return type(cls.__name__, (CheckpointedModule, cls), namespace)


def _without_sequences(arguments: Any) -> tuple[Any, Any]:
    """Return arguments with shards in place of sequences that context parallelism shards; see `separate`."""
    if torch.compiler.is_compiling() or "weft.strategy.context.sharded_sequence" not in sys.modules:
        return arguments, lambda shards: shards
    from weft.strategy.context.sharded_sequence import separate

    return separate(arguments)


def _lengths_context(module: nn.Module) -> Any:
    """Return a function that returns a context manager, in which the recomputation has this forward's sequence lengths.

    None: the module has no role in a sequence region, or is its first block, which sets the lengths itself; or
    torch.compile traces the forward, and the lengths are in the code.
    """
    state = state_of(module)
    if torch.compiler.is_compiling() or state is None or state.sequence_role is None:
        return None
    if state.sequence_role.is_first_block:
        return None
    return functools.partial(state.sequence_role.region.with_lengths, state.sequence_role.region.lengths)


def _selective_contexts() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(list(_saved_operators()))


def _compiled_contexts(args: tuple[Any, ...], contexts: Any) -> Any:
    """Return `contexts`, or in code that torch.compile traces for CPUs, contexts that also save random numbers.

    torch 2.15 fails to draw them again in the backward on a CPU if the code has DTensors for inputs.
    """
    on_cpu = any(isinstance(each, Tensor) and each.device.type == "cpu" for each in args)
    if not (torch.compiler.is_compiling() and on_cpu):
        return contexts
    return _full_contexts_with_random if contexts is None else _selective_contexts_with_random


def _full_contexts_with_random() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(_random_policy)


def _selective_contexts_with_random() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(_selective_random_policy)


def _random_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return CheckpointPolicy.MUST_SAVE if is_random else CheckpointPolicy.MUST_RECOMPUTE


def _selective_random_policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = torch.Tag.nondeterministic_seeded in op.tags or op in _saved_operators()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _saved_operators() -> tuple[Any, ...]:
    def overloads(namespace: Any, names: tuple[str, ...]) -> list[Any]:
        packets = [getattr(namespace, name) for name in names if hasattr(namespace, name)]
        return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]

    return tuple(
        op
        for namespace, names in (
            (torch.ops.aten, _SAVED_ATEN),
            (torch.ops.weft, _SAVED_WEFT),
            (torch.ops._c10d_functional, _SAVED_COLLECTIVES),
        )
        for op in overloads(namespace, names)
        if not op._schema.is_mutable and not op._overloadname.endswith("out")
    )
