"""Resolves sizes of mesh axes, given as numbers, "auto" or a layout string, for the number of ranks of a job."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NamedTuple

from weft.strategy._plan import Mesh

AUTO = "auto"
Size = int | str
_SHORT_NAMES = {
    "pp": "pipeline_parallel",
    "rep": "data_replicate",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "tp": "tensor_parallel",
}
_EXPERTS = "ep"  # a part of the ranks of dp and cp, not an axis beside them
_NEVER_AUTO = ("pipeline_parallel", "context_parallel", "expert_parallel")
_HIDDEN = ("pipeline_parallel", "data_replicate", "context_parallel")  # from errors, where they have one rank
_QUOTED_MESH = re.compile(r"'([a-z_]+=\d+(?:,[a-z_]+=\d+)*)'")
_AXIS_SIZE = re.compile(r"\s*([a-z]+)\s*(\d+|auto)\s*")


class MeshSizes(NamedTuple):
    """The number of ranks on each axis of a job's mesh, outer to inner.

    expert_parallel: the number of those ranks along data_parallel and context_parallel that shard experts.
    """

    pipeline_parallel: int
    data_replicate: int
    data_parallel: int
    context_parallel: int
    tensor_parallel: int
    expert_parallel: int = 1

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the job."""
        return math.prod(self[:5])

    @property
    def sharding_ranks(self) -> int:
        """Return the number of ranks over which FSDP2 and ZeRO shard each replica."""
        return self.data_parallel * self.context_parallel


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The number of ranks on each axis; "auto": derived from the job's number of ranks.

    data_replicate: replicas of the axes inside it (data_parallel, context_parallel and tensor_parallel), each with
        different data.
    data_parallel: ranks with different data, which shard parameters, gradients or optimizer states as `zero_stage`
        says, together with the context-parallel ranks.
    tensor_parallel: ranks that shard the layers' arithmetic on the same data; the innermost axis, so that neighbouring
        ranks, which are usually on one host, form a group.
    pipeline_parallel: ranks with different layers; the outermost axis. Its size is never "auto".
    context_parallel: ranks with the same data that compute different tokens of each sequence; between data_parallel and
        tensor_parallel. Its size is never "auto".
    expert_parallel: ranks that shard the experts of a mixture of experts; neighbours along data_parallel and
        context_parallel, whose product it divides. Its size is never "auto".
    is_layout: whether the sizes come from a layout string; errors then suggest layout strings.
    """

    data_replicate: Size = 1
    data_parallel: Size = AUTO
    tensor_parallel: Size = AUTO
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    is_layout: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, size in (*self._items(), ("expert_parallel", self.expert_parallel)):
            is_number = isinstance(size, int) and not isinstance(size, bool) and size >= 1
            may_be_auto = name not in _NEVER_AUTO
            if not is_number and not (may_be_auto and size == AUTO):
                choice = ", or 'auto'" if may_be_auto else ""
                raise ValueError(f"{name}_size is {size!r}; pass a number of ranks from 1 on{choice}.")

    @classmethod
    def parse(cls, layout: str) -> Sizes:
        """Read a layout such as "dp2,tp2", "rep2,dp4,cp2,tp8", "dp8,ep4" or "dpauto,tp4".

        Axes that it leaves out have one rank.

        Raises:
            ValueError: the text is not a layout, or has an axis twice.
        """
        sizes: dict[str, Any] = {}
        for item in layout.split(","):
            match = _AXIS_SIZE.fullmatch(item)
            name = {**_SHORT_NAMES, _EXPERTS: "expert_parallel"}.get(match[1]) if match else None
            if match is None or name is None or name in sizes:
                raise ValueError(
                    f"layout {layout!r} has the part {item.strip()!r}; write each axis once, pp "
                    "(pipeline parallel), rep (replicas), dp (data parallel), cp (context parallel), tp (tensor "
                    "parallel) or ep (expert parallel, a part of dp) and its size, as in 'rep2,dp4,tp8' or "
                    "'dpauto,tp4'."
                )
            sizes[name] = AUTO if match[2] == AUTO else int(match[2])
        return cls(**{"data_replicate": 1, "data_parallel": 1, "tensor_parallel": 1, **sizes}, is_layout=True)

    def resolve(self, num_ranks: int, ranks_per_host: int) -> MeshSizes:
        """Return sizes whose product is `num_ranks`.

        "auto" axes take the remaining ranks in the order tensor_parallel, data_parallel, data_replicate. If other axes
        are "auto", too, tensor_parallel takes the greatest common divisor of the remaining ranks and `ranks_per_host`.
        In all other cases an axis takes all ranks that remain.

        Raises:
            ValueError: no sizes fit; the error suggests some that do.
        """
        fixed = math.prod(size for _, size in self._items() if size != AUTO)
        remaining_ranks = num_ranks // fixed if num_ranks % fixed == 0 else 1
        sizes = dict(self._items())
        num_auto = sum(size == AUTO for size in sizes.values())
        for name in ("tensor_parallel", "data_parallel", "data_replicate"):
            if sizes[name] == AUTO:
                is_last = num_auto == 1
                on_host = math.gcd(remaining_ranks, ranks_per_host) if name == "tensor_parallel" else remaining_ranks
                sizes[name] = remaining_ranks if is_last else on_host
                remaining_ranks //= sizes[name]
                num_auto -= 1
        result = MeshSizes(**sizes, expert_parallel=self.expert_parallel)
        shown = {name: size for name, size in sizes.items() if name not in _HIDDEN or size != 1}
        shown = {name: shown[name] for name in MeshSizes._fields if name in shown}
        try:
            Mesh.parse(",".join(f"{name}={size}" for name, size in shown.items())).check_world_size(num_ranks)
        except ValueError as error:
            if not self.is_layout:
                raise
            text = str(error).replace("mesh '", "layout '", 1)
            raise ValueError(_QUOTED_MESH.sub(lambda match: f"'{_layout_of(match[1])}'", text)) from None
        if result.sharding_ranks % self.expert_parallel:
            kind = "data- and context-parallel" if result.context_parallel > 1 else "data-parallel"
            raise ValueError(
                f"got {self.expert_parallel} expert-parallel ranks in {result.sharding_ranks} {kind} ranks; pass a "
                "number that divides these, because each expert-parallel rank computes with data of its own."
            )
        return result

    def _items(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in (*MeshSizes._fields[1:5], MeshSizes._fields[0])]


def _layout_of(mesh: str) -> str:
    """Return the layout string for a mesh in the text form of `Mesh`; "dp1" for one rank."""
    sizes = Mesh.parse(mesh)
    axes = [(short, sizes.size(name)) for short, name in _SHORT_NAMES.items() if sizes.has_axis(name)]
    return ",".join(f"{short}{size}" for short, size in axes if size > 1) or "dp1"
