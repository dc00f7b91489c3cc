"""Runs a model without its weights to record the arguments of its modules.

The arguments that a module gets from its parent (masks, positions, caches) are recorded before each call, so that the
module can be run on them again by itself. If the model as a whole cannot be called, its modules are called instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weft.strategy.recognition.module_signatures import Signatures, argument_signature
from weft.strategy.recognition.shell import isolated_execution
from weft.strategy.verification.samples import Sample, samples_for
from weft.strategy.verification.weightless import Layers, Weightless

_MAX_CALLS = 2  # recorded calls of a module in one run
_MAX_ALIKE = 5  # recorded calls, in one run, of all modules that differ only in indices, with equal kinds of arguments
_SCALES = (1.0, 3.0)  # standard deviations of the layers' outputs in the two runs
_MAX_DEPTH = 4  # levels of modules that are called by themselves


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a module in train or eval mode: copies of its arguments from before the call, detached.

    scale: of the run, as in `Weightless`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool
    scale: float

    def kind(self) -> tuple[Any, ...]:
        """Return a key of mode, scale and arguments; see `argument_signature`."""
        return self.training, self.scale, argument_signature(self.args, self.kwargs)

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments, which are leaves of a new graph."""
        memo: dict[int, Any] = {}
        return copied(self.args, memo), copied(dict(self.kwargs), memo)


@dataclasses.dataclass
class Rehearsal:
    """The results of running a model without weights, in train mode and in eval mode.

    calls: the recorded calls, by the id of a module.
    like: for a module without recorded calls, the id of one that differs from it only in index attributes, such as
        `layer_idx`, and got the same kinds of arguments.
    called, read: as in `Weightless`, from all runs.
    covered: the ids of the modules that were called as a whole, and of all modules inside them.
    signatures: those of the modules, cached.
    why_not: by the name of a module that could not be called, the reason.
    """

    calls: dict[int, list[Call]] = dataclasses.field(default_factory=dict)
    like: dict[int, int] = dataclasses.field(default_factory=dict)
    signatures: Signatures = dataclasses.field(default_factory=Signatures)
    called: set[int] = dataclasses.field(default_factory=set)
    read: set[int] = dataclasses.field(default_factory=set)
    covered: set[int] = dataclasses.field(default_factory=set)
    why_not: dict[str, str] = dataclasses.field(default_factory=dict)

    def calls_of(self, module: nn.Module) -> list[Call]:
        """Return the recorded calls of a module, or of one that differs from it only in index attributes."""
        module_id = id(module) if id(module) in self.calls else self.like.get(id(module), 0)
        return self.calls.get(module_id, [])


def rehearse(model: nn.Module, example: Sample | None = None) -> Rehearsal:
    """Run a model, or those of its modules that can be called, in train mode and in eval mode.

    Arguments that `samples_for` makes have another sequence length in eval mode; an example is used in both modes.

    Args:
        model: any module; neither it nor random states change.
        example: a call of the model, for both modes; None: see `samples_for`.

    Raises:
        ValueError: the model cannot be called with the example.
    """
    result = Rehearsal()
    with isolated_execution():
        _rehearse_modules(result, model, "", example, 0)
    if example is not None and "" in result.why_not:
        raise ValueError(
            f"plan: {type(model).__name__} cannot be called with the example ({result.why_not['']}); give arguments "
            "that its forward takes, or leave out the example; a LightningModule without a forward must define one, "
            "such as def forward(self, x): return self.model(x)."
        )
    return result


def _rehearse_modules(result: Rehearsal, module: nn.Module, name: str, example: Sample | None, depth: int) -> None:
    layers = Layers.of(module)
    if not (layers.linears or layers.others) or id(module) in (*layers.linears, *layers.others):
        return  # no layers inside, or itself a layer, whose output is drawn at random: there is no other code
    reason = _run_in_both_modes(result, module, example)
    if reason is None:
        result.covered.update(map(id, module.modules()))
        return
    if reason:
        result.why_not[name] = reason
    if depth < _MAX_DEPTH:
        for key, child in module.named_children():
            is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            _rehearse_modules(
                result, child, f"{name}.{key}" if name else key, None, depth if is_container else depth + 1
            )


def _run_in_both_modes(result: Rehearsal, module: nn.Module, example: Sample | None) -> str | None:
    """Run a module in both modes. Returns None on success, the reason on failure, "" if there is no sample."""
    pairs: Iterable[tuple[Sample, Sample]] = samples_for(module) if example is None else ((example, example),)
    reason = ""
    for pair in pairs:
        runs = [Weightless(module, scale) for scale in _SCALES]  # train mode, eval mode
        calls: dict[int, list[Call]] = {}
        like: dict[int, int] = {}
        try:
            for run, sample, training in zip(runs, pair, (True, False), strict=True):
                _record(run, sample, training, calls, like, result.signatures)
        except Exception as error:  # the user's code may raise anything; the reason quotes it
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"
            continue
        result.like.update(like)
        for key, found in calls.items():
            result.calls.setdefault(key, []).extend(found)
        for run in runs:
            result.called |= run.called
            result.read |= run.read
        return None
    return reason


def _record(
    weightless: Weightless,
    sample: Sample,
    training: bool,
    calls: dict[int, list[Call]],
    like: dict[int, int],
    signatures: Signatures,
) -> None:
    originals = dict(weightless.module.named_modules())
    with_layers = _modules_with(originals, weightless.layers.linears)
    counts: dict[int, int] = {}
    recorded: dict[Any, list[int]] = {}

    def wrap(name: str, shell: nn.Module, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        original = originals[name]
        if name not in with_layers:
            return own_forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            counts[id(original)] = counts.get(id(original), 0) + 1
            alike = recorded.setdefault((signatures.of(original, False), argument_signature(args, kwargs)), [])
            if len(alike) >= _MAX_ALIKE and id(original) not in alike:
                if id(original) not in calls:
                    like[id(original)] = alike[0]
            elif counts[id(original)] <= _MAX_CALLS:
                alike.append(id(original))
                like.pop(id(original), None)
                memo: dict[int, Any] = {}
                call = Call(copied(args, memo), copied(kwargs, memo), training, weightless.scale)
                calls.setdefault(id(original), []).append(call)
            return own_forward(*args, **kwargs)

        return forward

    args, kwargs = sample.args, sample.kwargs
    weightless.run(copied(args, {}), copied(dict(kwargs), {}), training=training, wrap=wrap)


def _modules_with(modules: Mapping[str, nn.Module], layers: Mapping[int, str]) -> set[str]:
    """Return the names of the modules with some of these layers below them."""
    names: set[str] = set()
    for name, module in modules.items():
        if id(module) in layers:
            parts = name.split(".")
            names.update(".".join(parts[:end]) for end in range(len(parts)))
    return names


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return copies of arguments: tensors detached, with their requires_grad; objects such as caches deep-copied.

    Modules, configs, callables, and objects that cannot be copied are returned unchanged.
    """

    def copy_of(leaf: Any) -> Any:
        if id(leaf) in memo:
            return memo[id(leaf)]
        if isinstance(leaf, Tensor):
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return memo[id(leaf)]
        if leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device, nn.Module)):
            return leaf
        if callable(leaf) or type(leaf).__name__.endswith("Config"):
            return leaf
        _memoize_tensors(leaf, memo, set())
        try:
            return copy.deepcopy(leaf, memo)
        except Exception:  # the copy of a user's object may raise anything; the object itself is passed on
            return leaf

    return tree_map(copy_of, value)


def _memoize_tensors(value: Any, memo: dict[int, Any], seen: set[int]) -> None:
    """Enter copies of the tensors inside an object into the memo of deepcopy, which cannot copy non-leaf tensors.

    Modules and configs are entered as their own copies.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module) or type(value).__name__.endswith("Config"):
        memo[id(value)] = value
    elif isinstance(value, Tensor):
        memo.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            _memoize_tensors(item, memo, seen)
    elif isinstance(value, dict):
        for item in value.values():
            _memoize_tensors(item, memo, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            _memoize_tensors(item, memo, seen)
