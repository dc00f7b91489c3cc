"""Compares the code between linear layers, such as q, k, v and o, on one rank's features and on all features.

The layers are a `dataflow.Group`: sources, such as q, k and v, whose outputs flow into a sink, such as o.

The reference is the module's own code with the full outputs of the sources, which layers of the style
`column_gather_output` return. It is correct for any code. The candidate, for each rank, is the same code with that
rank's shard of these outputs, and with the head counts that the code reads divided by the number of ranks. The
candidate is correct if all values and gradients agree with the reference:

    the sink's input, and gradients of source outputs    are that rank's shard of those in the reference
    gradients of parameters between the layers           are equal after a sum over ranks
    all other values and gradients                       are equal

The layers themselves need no check: column and row operators are exact for any weight, so the runs need no weights.
Every process runs the candidates of all ranks (or of some, see `verdict_on`) from the same seeds, without
communication, so all processes reach the same verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.strategy.sharding.shard_dropout import ShardedDim
from weft.strategy.sharding.state import with_values
from weft.strategy.verification.dataflow import Group
from weft.strategy.verification.rehearsal import Call
from weft.strategy.verification.weightless import Run, ShardContext, Weightless, drawn

Counts = Mapping[str, Mapping[str, int]]  # by name of a module inside the compared one: attribute -> value on a rank

_TOLERANCE = 1e-9
_ROUNDED_TOLERANCE = 5e-6  # for code that itself rounds to float32
_SINK_SEED, _LAYER_SEED, _OUTPUT_SEED = 11, 12, 13  # of cotangents, the random gradients that backwards start from
_MAX_ELEMENTS = 1 << 24  # of one parameter outside of linear layers, embeddings and convolutions


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a group.

    counts: one rank's values of attributes, such as numbers of heads; set only while their module's forward runs.
    summed: the modules whose own parameters get a partial gradient on each rank.
    dropouts: by the name of an nn.Dropout that gets a rank's shard of its input, the sharded dims.
    has_stored_tensors: whether modules keep tensors of one rank's heads in attributes, which other code may read.
    reason: why the group was not accepted, as the end of a sentence; "" if it was.
    difference: the largest relative difference from the reference; for a rejection, the one that is too large,
        or 0 if none was measured or the reason is another one.
    is_compared: False if the group was rejected without a comparison.
    """

    is_accepted: bool
    counts: Counts = dataclasses.field(default_factory=dict)
    summed: tuple[str, ...] = ()
    dropouts: Mapping[str, frozenset[ShardedDim]] = dataclasses.field(default_factory=dict)
    has_stored_tensors: bool = False
    reason: str = ""
    difference: float = 0.0
    is_compared: bool = True


def verdict_on(
    container: nn.Module,
    group: Group,
    calls: Sequence[Call],
    num_ranks: int,
    candidates: Sequence[Counts],
    ranks: Sequence[int] | None = None,
) -> Verdict:
    """Return the verdict on the first candidate that agrees with the reference in all calls.

    Without such a candidate, return the first rejection with a measured difference, or else the first rejection.

    Args:
        candidates: divided values of attributes that may count heads, likeliest first.
        ranks: the ranks whose shards are compared; None: all. Gradients that are sums over ranks are compared only if
            all ranks are.
    """
    largest = max((p.numel() for p in _parameters_outside_layers(container)), default=0)
    if largest > _MAX_ELEMENTS:
        reason = f"it has a parameter of {largest} elements outside its linear layers"
        return Verdict(False, reason=reason, is_compared=False)
    rejections: list[Verdict] = []
    for counts in candidates:
        verdict = _compare_candidate(container, group, calls, num_ranks, counts, ranks)
        if verdict.is_accepted:
            return verdict
        rejections.append(verdict)
    with_numbers = [each for each in rejections if each.difference > 0]
    rejection = (with_numbers or rejections)[0]
    in_eval = [call for call in calls if not call.training]
    if (
        in_eval
        and len(in_eval) < len(calls)
        and _compare_candidate(container, group, in_eval, num_ranks, rejection.counts, ranks).is_accepted
    ):
        if not _draws_random_numbers(container, calls):
            return dataclasses.replace(rejection, reason=f"{rejection.reason} in train mode")
        reason = (
            "it draws random numbers in train mode; for all heads, as F.dropout does, use an nn.Dropout module instead"
        )
        return dataclasses.replace(rejection, reason=reason, difference=0.0)
    return rejection


def _draws_random_numbers(container: nn.Module, calls: Sequence[Call]) -> bool:
    """Return whether the forward draws random numbers in train mode."""
    call = next(call for call in calls if call.training)
    before = torch.default_generator.get_state()
    args, kwargs = call.fresh()
    Weightless(container, call.scale, full_values=True).run(args, kwargs, training=True)
    return not torch.equal(before, torch.default_generator.get_state())


def _parameters_outside_layers(container: nn.Module) -> list[Tensor]:
    weightless = Weightless(container)
    return [p for p in container.parameters() if id(p) in weightless.parameters]


class _Differs(Exception):
    def __init__(self, reason: str, difference: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.difference = reason, difference


def _compare_candidate(
    container: nn.Module,
    group: Group,
    calls: Sequence[Call],
    num_ranks: int,
    counts: Counts,
    ranks: Sequence[int] | None,
) -> Verdict:
    worst, summed, has_stored_tensors = 0.0, set[str](), False
    dropouts: dict[str, frozenset[ShardedDim]] = {}
    for call in calls:
        comparison = _Comparison(container, group, call, num_ranks, counts, ranks)
        try:
            worst = max(worst, comparison.run())
        except _Differs as error:
            return Verdict(False, counts, reason=error.reason, difference=error.difference)
        except Exception as error:  # the user's code may raise anything; the verdict quotes it
            text = (str(error).strip() or "no text").splitlines()[0]
            heads = "one rank's" if comparison.has_reference else "all"
            return Verdict(
                False, counts, reason=f"its forward or backward fails on {heads} heads ({type(error).__name__}: {text})"
            )
        summed |= comparison.summed
        has_stored_tensors |= comparison.has_stored_tensors
        for name, dims in comparison.dropouts.items():
            dropouts[name] = dropouts.get(name, frozenset()) | dims
    return Verdict(True, counts, tuple(sorted(summed)), dropouts, has_stored_tensors, difference=worst)


class _Comparison:
    """Compares one call of a container on full outputs of the sources with the same call on each rank's shards."""

    def __init__(
        self,
        container: nn.Module,
        group: Group,
        call: Call,
        num_ranks: int,
        counts: Counts,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.runs = Weightless(container, call.scale, full_values=True)
        self.names = {id(p): name for name, p in container.named_parameters()}
        self.group, self.call, self.num_ranks, self.counts = group, call, num_ranks, counts
        self.ranks = range(num_ranks) if ranks is None else ranks
        self.worst = 0.0
        self.has_reference = False  # whether the reference has run
        self.rounds: bool | None = None  # the cached result of `_rounds_to_float32`
        self.summed: set[str] = set()
        self.dropouts: dict[str, frozenset[ShardedDim]] = {}
        self.has_stored_tensors = False
        self.cotangents: dict[tuple[int, int, torch.Size], Tensor] = {}

    def run(self) -> float:
        """Return the largest relative difference found; raise _Differs for the first that exceeds the tolerance."""
        full, full_args = self._run({}, {}, None)
        sink_grads, other_grads = self._gradients(full, full_args, None)
        self.has_reference = True
        self._check_other_inputs(sink_grads, full_args)
        sums: dict[int, Tensor] = {}
        for rank in self.ranks:
            shard_run, shard_args = self._run(
                self._replacements(rank), self.counts, ShardContext(full, rank, self.num_ranks)
            )
            self._compare_values(full, shard_run, rank)
            self._record_state(full, shard_run)
            shard_sink_grads, shard_other_grads = self._gradients(shard_run, shard_args, rank)
            self._compare_gradients(full, sink_grads, other_grads, shard_sink_grads, shard_other_grads, rank)
            for key, grad in shard_sink_grads.parameters.items():
                sums[key] = sums.get(key, torch.zeros_like(grad)) + grad
        for key, grad in sink_grads.parameters.items() if len(self.ranks) == self.num_ranks else ():
            self._check_close(sums.get(key, torch.zeros_like(grad)), grad, f"the gradient of '{self.names[key]}'")
        self._find_summed(sink_grads, other_grads)
        return self.worst

    def _run(
        self, replace: Mapping[str, Callable[[int, Tensor], Tensor]], counts: Counts, shard_context: ShardContext | None
    ) -> tuple[Run, list[Tensor]]:
        args, kwargs = self.call.fresh()
        torch.default_generator.manual_seed(0)
        wrap = (
            None
            if not counts
            else lambda name, shell, own_forward: _with_counts(shell, own_forward, counts.get(name, {}))
        )
        run = self.runs.run(
            args, kwargs, training=self.call.training, replace=replace, wrap=wrap, shard_context=shard_context
        )
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return run, tensors

    def _replacements(self, rank: int) -> dict[str, Callable[[int, Tensor], Tensor]]:
        def shard(_number: int, output: Tensor) -> Tensor:
            return output.chunk(self.num_ranks, -1)[rank].contiguous()

        # The sink gets one rank's features: with a replacement, the number of its input features is not checked.
        return {**dict.fromkeys(self.group.sources, shard), self.group.sink: lambda _number, output: output}

    # ---- values --------------------------------------------------------------------------------------------

    def _compare_values(self, full: Run, shard_run: Run, rank: int) -> None:
        if [c.layer for c in full.calls] != [c.layer for c in shard_run.calls]:
            raise _Differs("with one rank's heads it calls different layers")
        for shard_call, full_call in zip(shard_run.calls, full.calls, strict=True):
            expected = full_call.input
            if shard_call.layer == self.group.sink:
                expected = expected.chunk(self.num_ranks, -1)[rank]
            self._check_close(shard_call.input, expected, f"the input of '{shard_call.layer}'")
        actual, reference = _tensors(shard_run.output), _tensors(full.output)
        if len(actual) != len(reference):
            raise _Differs("with one rank's heads it returns a different number of tensors")
        for a, b in zip(actual, reference, strict=True):
            self._check_close(a, b, "its output")
        for name, value in full.buffers.items():
            self._check_close(shard_run.buffers[name], value, f"the buffer '{name}'")

    def _record_state(self, full: Run, shard_run: Run) -> None:
        """Note which dropouts get one rank's heads, and whether attributes keep tensors of one rank's heads."""
        for name, dims in shard_run.sharded_dropouts.items():
            if dims == {None}:
                continue
            if None in dims:
                raise _Differs(f"the dropout '{name}' is called for one rank's heads and for full tensors")
            self.dropouts[name] = frozenset(dim for dim in dims if dim is not None)
        for key, value in full.stored_tensors.items():
            actual = shard_run.stored_tensors.get(key)
            if (
                actual is None
                or actual.shape != value.shape
                or _relative(actual.detach(), value.detach()) > _ROUNDED_TOLERANCE
            ):
                self.has_stored_tensors = True

    def _check_close(self, actual: Tensor, reference: Tensor, what: str) -> None:
        if actual.shape != reference.shape:
            raise _Differs(f"{what} has the shape {list(actual.shape)} in place of {list(reference.shape)}")
        actual, reference = actual.detach(), reference.detach()
        if actual.dtype != reference.dtype:
            raise _Differs(f"{what} is {actual.dtype} in place of {reference.dtype}")
        if not (reference.is_floating_point() or reference.is_complex()):
            if not torch.equal(actual, reference):
                raise _Differs(f"{what} differs")
            return
        difference = _relative(actual, reference)
        if difference > _TOLERANCE and not (difference <= _ROUNDED_TOLERANCE and self._rounds_to_float32()):
            raise _Differs(f"{what} differs by {difference:.2g} of its norm", difference)
        self.worst = max(self.worst, difference)

    def _rounds_to_float32(self) -> bool:
        """Return whether the code computes some tensors in float32 or a half type."""
        if self.rounds is None:
            with _RoundingDetector() as detector:
                self._run({}, {}, None)
            self.rounds = detector.has_rounded
        return self.rounds

    # ---- gradients -----------------------------------------------------------------------------------------

    def _gradients(self, run: Run, args: list[Tensor], rank: int | None) -> tuple[_Gradients, _Gradients]:
        """Return the gradients that flow back from the sink's inputs, and those from all other results of a run.

        The backwards start from random cotangents. `rank`: the rank whose shard the run computed; None: the full run.
        """
        sinks, others = [], []
        for number, call in enumerate(run.calls):
            if call.layer == self.group.sink:
                width = call.input.shape[-1] * (1 if rank is None else self.num_ranks)
                cotangent = self._cotangent(_SINK_SEED, number, torch.Size((*call.input.shape[:-1], width)))
                cotangent = cotangent if rank is None else cotangent.chunk(self.num_ranks, -1)[rank]
                sinks.append((call.input, cotangent))
            else:
                others.append((call.input, self._cotangent(_LAYER_SEED, number, call.input.shape)))
        for number, output in enumerate(_tensors(run.output)):
            others.append((output, self._cotangent(_OUTPUT_SEED, number, output.shape)))
        leaves = [call.output for call in run.calls]
        sink_grads = _Gradients.of(sinks, leaves, self.runs.parameters, args)
        return sink_grads, _Gradients.of(others, leaves, self.runs.parameters, args)

    def _cotangent(self, seed: int, number: int, shape: torch.Size) -> Tensor:
        """Return the cotangent of a result, which is the same in the full run and on each rank."""
        key = (seed, number, shape)
        if key not in self.cotangents:
            self.cotangents[key] = drawn(shape, seed, number)
        return self.cotangents[key]

    def _check_other_inputs(self, sink_grads: _Gradients, args: list[Tensor]) -> None:
        for grad in sink_grads.args:
            if grad is not None and bool(grad.count_nonzero()):
                raise _Differs("the code between the layers uses another input, whose gradient needs all heads")

    def _compare_gradients(
        self,
        full: Run,
        sink_grads: _Gradients,
        other_grads: _Gradients,
        shard_sink_grads: _Gradients,
        shard_other_grads: _Gradients,
        rank: int,
    ) -> None:
        for call, reference, actual in zip(full.calls, sink_grads.leaves, shard_sink_grads.leaves, strict=True):
            if call.layer in self.group.sources and reference is not None:
                expected = reference.chunk(self.num_ranks, -1)[rank]
                self._check_close(
                    _or_zeros(actual, expected), expected, f"the gradient of the output of '{call.layer}'"
                )
        for call, reference, actual in zip(full.calls, other_grads.leaves, shard_other_grads.leaves, strict=True):
            if call.layer not in self.group.sources and reference is not None:
                self._check_close(
                    _or_zeros(actual, reference), reference, f"the gradient of the output of '{call.layer}'"
                )
        for reference, actual in zip(other_grads.args, shard_other_grads.args, strict=True):
            if reference is not None:
                self._check_close(_or_zeros(actual, reference), reference, "the gradient of an input")
        for key, reference in other_grads.parameters.items():
            actual = _or_zeros(shard_other_grads.parameters.get(key), reference)
            self._check_close(actual, reference, f"the gradient of '{self.names[key]}'")

    def _find_summed(self, sink_grads: _Gradients, other_grads: _Gradients) -> None:
        """Find the modules with parameters that are used between the layers.

        The group is rejected if such a module has a parameter that is used elsewhere.
        """
        used_elsewhere = {key for key, grad in other_grads.parameters.items() if bool(grad.count_nonzero())}
        for key, grad in sink_grads.parameters.items():
            if not bool(grad.count_nonzero()):
                continue
            owner = self.names[key].rpartition(".")[0]
            siblings = {k for k, name in self.names.items() if name.rpartition(".")[0] == owner}
            if siblings & used_elsewhere:
                raise _Differs(
                    f"'{self.names[key]}' is used between the layers, and its module has a parameter used elsewhere"
                )
            self.summed.add(owner)


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Gradients with respect to layers' outputs (`leaves`), parameters (by id) and arguments.

    Where there is no gradient, lists have None, and `parameters` has no entry.
    """

    leaves: list[Tensor | None]
    parameters: dict[int, Tensor]
    args: list[Tensor | None]

    @classmethod
    def of(
        cls,
        ends: list[tuple[Tensor, Tensor]],
        leaves: list[Tensor],
        parameters: Mapping[int, Tensor],
        args: list[Tensor],
    ) -> _Gradients:
        """Return the gradients that flow back from `ends`, each of which has a cotangent."""
        ends = [(end, cotangent) for end, cotangent in ends if end.requires_grad and not end.is_complex()]
        trainable = {key: value for key, value in parameters.items() if value.requires_grad}
        inputs = [*leaves, *trainable.values(), *args]
        if not ends or not inputs:
            return cls([None] * len(leaves), {}, [None] * len(args))
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            [end for end, _ in ends],
            inputs,
            [cotangent.to(end.dtype) for end, cotangent in ends],
            allow_unused=True,
            retain_graph=True,
        )
        leaf_grads, rest = list(grads[: len(leaves)]), list(grads[len(leaves) :])
        parameter_grads, arg_grads = rest[: len(trainable)], rest[len(trainable) :]
        by_id = {key: grad for key, grad in zip(trainable, parameter_grads, strict=True) if grad is not None}
        return cls(leaf_grads, by_id, arg_grads)


def _with_counts(module: nn.Module, forward: Callable[..., Any], counts: Mapping[str, int]) -> Callable[..., Any]:
    """Return a forward during which the module's attributes have the values `counts`."""

    def divided(*args: Any, **kwargs: Any) -> Any:
        return with_values(module, counts.items(), forward, args, kwargs)

    return divided if counts else forward


class _RoundingDetector(TorchDispatchMode):
    has_rounded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in (torch.float32, torch.bfloat16, torch.float16):
                self.has_rounded = True
        return result


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _relative(actual: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the reference.

    A NaN agrees with a NaN at the same index, and an infinity with an equal one.
    """
    nan = reference.isnan()
    if bool(nan.any()) or bool(actual.isnan().any()):
        if not torch.equal(nan, actual.isnan()):
            return float("inf")
        actual, reference = actual.masked_fill(nan, 0.0), reference.masked_fill(nan, 0.0)
    infinite = reference.isinf()
    if bool(infinite.any()) or bool(actual.isinf().any()):
        if not torch.equal(reference[infinite], actual[infinite]) or not torch.equal(infinite, actual.isinf()):
            return float("inf")
        actual, reference = actual.masked_fill(infinite, 0.0), reference.masked_fill(infinite, 0.0)
    # Values are of order 1: two gradients that are zero up to rounding agree.
    norm = max(float(reference.norm()), 1e-5 * reference.numel() ** 0.5)
    return float((actual - reference).norm()) / norm if reference.numel() else 0.0
