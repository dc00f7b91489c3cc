"""The description of an operator for the fuzz test, and one random call of an operator.

Every rank draws the same call: full tensors, and how each tensor is sharded. They determine a rank's arguments, the
errors that a rank must raise, and the result of the unsharded computation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ops.fuzz.draws import (
    FLOATS,
    OTHERS,
    REPLICATED,
    Draw,
    Placement,
    RankInGroup,
    Value,
    constant_along_first_dim,
    laid_out,
    local_shard,
)
from ops.fuzz.rules import ExpectedError, MustMatchAcrossRanks, Undetectable, Violations

Values = dict[str, Any]
Options = dict[str, Any]
EdgeCaseOptions = dict[str, Sequence[object]]  # values of options that are often wrong

UNKNOWN_GROUP = "nowhere"  # not the name of a group
MAX_DRAWS = 1000


class Operator(ABC):
    """One operator: draws its arguments, states its documented errors and computes its reference."""

    name: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()  # tensors that have a default
    on_cpu: ClassVar[tuple[str, ...]] = ()  # tensors that stay on the CPU on every device
    edge_case_options: ClassVar[EdgeCaseOptions] = {}
    num_results: ClassVar[int] = 1
    has_group: ClassVar[bool] = True
    # The largest allowed error, relative to the largest magnitude in the call or 1.
    tolerances: ClassVar[dict[torch.dtype, float]] = {
        torch.float64: 1e-12,
        torch.float32: 1e-5,
        torch.bfloat16: 3e-2,
        torch.float16: 4e-3,
    }
    # Use the tolerance of the result's dtype, not of the call's: no intermediate value has a narrower dtype.
    tolerates_by_result: ClassVar[bool] = False

    @abstractmethod
    def draw(self, draw: Draw) -> tuple[Values, Options]:
        """Return valid arguments: full tensors, or lists with one tensor per rank if the ranks' tensors differ."""

    @abstractmethod
    def placements(self, values: Values, options: Options) -> dict[str, Placement]:
        """Return the placements of the tensors; the default is REPLICATED."""

    def options_of(self, values: Values, options: Options, rank_in_group: RankInGroup) -> Options:
        """Return a rank's options, which may differ between ranks."""
        return options

    @abstractmethod
    def violations(self, given: SimpleNamespace, rank_in_group: RankInGroup) -> Violations:
        """Yield the errors in a rank's arguments, `given` by name."""

    @abstractmethod
    def results(self, values: Values, options: Options) -> tuple[Placement, ...]:
        """Return the placements of the results."""

    @abstractmethod
    def reference(
        self, values: SimpleNamespace, options: SimpleNamespace, ranks_in_group: list[RankInGroup]
    ) -> tuple[Value, ...]:
        """Return the full, differentiable results for full float64 tensors; options.dtype is the call's dtype."""

    def result_dtype(self, values: Values) -> torch.dtype:
        return values["x"].dtype

    def run(self, arguments: dict[str, object]) -> tuple[Tensor, ...]:
        """Call the operator through the typed wrapper."""
        import weft

        result = getattr(weft.ops, self.name)(**arguments)
        return result if isinstance(result, tuple) else (result,)


@dataclass
class Call:
    """Random arguments of an operator, for all ranks of its group."""

    operator: Operator
    seed: int
    world_size: int
    group: str  # a key of the groups that `run_calls` creates, or UNKNOWN_GROUP
    values: Values
    options: Options
    layouts: dict[str, str]
    requires_grad: set[str]  # tensors that require a gradient
    mode: str  # "backward", "grad" of some tensors, or "no_grad"
    wanted: list[str]  # the tensors whose gradients a "grad" computes
    grad_layout: str
    graded: list[int] = field(default_factory=list)  # indices of the results that get a gradient
    expected_errors: list[list[ExpectedError]] = field(default_factory=list)  # by rank

    @property
    def num_ranks(self) -> int:
        return self.world_size if self.group in ("world", "second", UNKNOWN_GROUP) else 1

    def rank_in_group(self, rank: int) -> RankInGroup:
        return RankInGroup(self.num_ranks, rank if self.num_ranks > 1 else 0)

    def placements(self) -> dict[str, Placement]:
        given = self.operator.placements(self.values, self.options)
        return {name: given.get(name, REPLICATED) for name in self.values}

    def tensors(self) -> list[Tensor]:
        """Return all tensors of all ranks."""
        present = [value for value in self.values.values() if value is not None]
        return [one for value in present for one in (value if isinstance(value, list) else [value])]

    def tensors_of(self, rank_in_group: RankInGroup) -> dict[str, Tensor | None]:
        placements = self.placements()
        return {name: local_shard(value, placements[name], rank_in_group) for name, value in self.values.items()}

    def arguments_of(self, rank_in_group: RankInGroup, device: str = "cpu") -> dict[str, object]:
        """Return a rank's arguments without the group's name; leaves in new memory, on `device` unless on meta."""
        arguments: dict[str, object] = {}
        for name, tensor in self.tensors_of(rank_in_group).items():
            if tensor is None:
                arguments[name] = None
                continue
            stays = tensor.is_meta or name in self.operator.on_cpu
            leaf = laid_out(tensor.detach() if stays else tensor.detach().to(device), self.layouts[name])
            arguments[name] = leaf.requires_grad_(name in self.requires_grad)
        return arguments | self.operator.options_of(self.values, self.options, rank_in_group)

    def violations(self, rank_in_group: RankInGroup) -> list[ExpectedError | MustMatchAcrossRanks | Undetectable]:
        given = self.tensors_of(rank_in_group) | self.operator.options_of(self.values, self.options, rank_in_group)
        found = list(self.operator.violations(SimpleNamespace(**given), rank_in_group))
        if self.group == UNKNOWN_GROUP:
            found.append(ExpectedError(ValueError, f"got group_name '{UNKNOWN_GROUP}', which is no process group"))
        return found

    def is_consistent_across_ranks(self) -> bool:
        """Return whether all ranks or none must raise, and no rank has an error that it cannot detect."""
        if all(one.is_meta for one in self.tensors()):
            return False  # nothing to compute; tests/ops/test_registration.py tests the Meta kernels
        found = [self.violations(RankInGroup(self.num_ranks, rank)) for rank in range(self.num_ranks)]
        self.expected_errors = [[each for each in of_rank if isinstance(each, ExpectedError)] for of_rank in found]
        if any(self.expected_errors):
            return all(self.expected_errors)
        if any(isinstance(each, Undetectable) for of_rank in found for each in of_rank):
            return False
        return all(of_rank == found[0] for of_rank in found)

    def __str__(self) -> str:
        placements = self.placements()
        lines = [f"weft::{self.operator.name}, group {self.group!r} of {self.num_ranks}, {self.mode} {self.wanted}"]
        if len(self.graded) < self.operator.num_results:
            lines.append(f"  only results {self.graded} get a gradient")
        for name, value in self.values.items():
            if value is None:
                lines.append(f"  {name}: None")
                continue
            each = value if isinstance(value, list) else [value]
            shapes = ", ".join(str(list(tensor.shape)) for tensor in each)
            gradient = "requires_grad" if name in self.requires_grad else "no gradient"
            facts = f"{each[0].dtype} on {each[0].device}, {placements[name]}, {self.layouts[name]}, {gradient}"
            lines.append(f"  {name}: {shapes} {facts}")
        lines += [f"  {name}: {value!r}" for name, value in self.options.items()]
        script = f"--operator {self.operator.name} --ranks {self.world_size} --seed {self.seed} --count 1"
        return "\n".join([*lines, f"  rerun: PYTHONPATH=tests python tests/soak/operators.py {script}"])


def draw_call(operator: Operator, seed: int, world_size: int) -> Call:
    """Return the call of `seed`, the same on every rank; somewhat more than half of the calls are valid."""
    draw = Draw(seed)
    group = draw.random.choices(("world", "second", "", "alone"), (70, 15, 8, 7))[0]
    draw.num_ranks = world_size if group in ("world", "second") else 1
    for _ in range(MAX_DRAWS):
        values, options = operator.draw(draw)
        num_changes = draw.random.choices((0, 1, 2), (63, 29, 8))[0]
        call = Call(operator, seed, world_size, group, values, dict(options), {}, set(), "backward", [], "contiguous")
        for _ in range(num_changes):
            _mutate(call, draw)
        for name in call.values:
            call.layouts[name] = draw.layout()
            if call.layouts[name] == "expanded":
                call.values[name] = constant_along_first_dim(call.values[name])
        if call.is_consistent_across_ranks():
            _draw_gradients(call, draw)
            return call
    raise AssertionError(f"weft::{operator.name}: {MAX_DRAWS} draws gave no consistent arguments, seed {seed}")


def _draw_gradients(call: Call, draw: Draw) -> None:
    for name, value in call.values.items():
        first = value[0] if isinstance(value, list) else value
        if first is not None and first.dtype in FLOATS and draw.chance(0.75):
            call.requires_grad.add(name)
    call.mode = draw.random.choices(("backward", "grad", "no_grad"), (70, 22, 8))[0]
    call.grad_layout = draw.layout()
    if call.mode == "grad":
        candidates = sorted(call.requires_grad)
        num_wanted = draw.random.randint(min(1, len(candidates)), len(candidates))
        call.wanted = sorted(draw.random.sample(candidates, num_wanted))
    call.graded = list(range(call.operator.num_results))
    if len(call.graded) > 1:
        call.graded = sorted(draw.random.sample(call.graded, draw.random.randint(1, len(call.graded))))


def _mutate(call: Call, draw: Draw) -> None:
    """Change one argument at random. The arguments may remain valid."""
    operator, values = call.operator, call.values
    present = [name for name, value in values.items() if value is not None]
    kinds = ["dtype", "dtypes", "shape", "shape", "device", "group"]
    kinds += ["option"] * (2 if operator.edge_case_options else 0) + ["absent"] * (1 if operator.optional else 0)
    kind = draw.random.choice(kinds)
    if kind == "dtype":
        name, dtype = draw.random.choice(present), draw.random.choice(FLOATS + OTHERS)
        values[name] = _mapped(values[name], lambda tensor: _converted(tensor, dtype))
    elif kind == "dtypes":
        dtype = draw.random.choice(FLOATS + OTHERS)
        for name in present:
            values[name] = _mapped(values[name], lambda tensor: _converted(tensor, dtype))
    elif kind == "shape":
        name = draw.random.choice(present)
        seed = draw.random.getrandbits(30)
        values[name] = _mapped(values[name], lambda tensor: _reshaped(tensor, Draw(seed)))
    elif kind == "device":
        name = draw.random.choice(present)
        values[name] = _mapped(values[name], lambda tensor: tensor.to("meta"))
    elif kind == "option":
        name = draw.random.choice(sorted(operator.edge_case_options))
        call.options[name] = draw.random.choice(operator.edge_case_options[name])
    elif kind == "absent":
        name = draw.random.choice(operator.optional)
        like = values[present[0]]
        dtype = (like[0] if isinstance(like, list) else like).dtype
        values[name] = draw.values(draw.sizes(1, 2), dtype) if values[name] is None else None
    elif call.num_ranks > 1 and operator.has_group:
        call.group = UNKNOWN_GROUP


def _mapped(value: Value, function) -> Value:
    return [function(each) for each in value] if isinstance(value, list) else function(value)


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    real = tensor.real if tensor.is_complex() else tensor
    return real.float().mul(2).to(dtype) if dtype in OTHERS else real.to(dtype)


def _reshaped(tensor: Tensor, draw: Draw) -> Tensor:
    """Return a tensor with a dim that is longer, shorter, empty, new or removed."""
    shape = list(tensor.shape)
    change = draw.random.choice(("longer", "shorter", "empty", "new", "gone"))
    position = draw.random.randrange(len(shape)) if shape else 0
    if change == "new" or not shape:
        shape.insert(position, draw.size())
    elif change == "gone":
        del shape[position]
    else:
        shape[position] = {"longer": shape[position] + 1, "shorter": max(0, shape[position] - 1), "empty": 0}[change]
    return draw.values(shape, tensor.dtype).to(tensor.device)
