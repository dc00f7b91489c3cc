"""Reports of all ranks on the parameters that they hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn

from weft.strategy.reports.report_table import Report, report, table_of


@dataclasses.dataclass(frozen=True)
class RankReports:
    """The reports and the pipeline stages of the ranks of a group, in rank order.

    `str` gives a table with a line for each rank: its stages, the number of names of parameters (a tied parameter has
    several), the bytes of the parameters, and the first and the last name. Without a pipeline, stages are ().
    """

    reports: tuple[Report, ...]
    stages: tuple[tuple[int, ...], ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain data: for each rank a dict of "rank", "stages" and the items of `Report.to_dict`."""
        return [
            {"rank": rank, "stages": list(stages), **each.to_dict()}
            for rank, (stages, each) in enumerate(zip(self.stages, self.reports, strict=True))
        ]

    def __str__(self) -> str:
        header = ("rank", "stages", "parameters", "bytes", "from", "to")
        lines = [
            (
                str(rank),
                " ".join(map(str, stages)),
                str(len(each.rows)),
                f"{each.total_bytes:,}",
                each.rows[0].parameter if each.rows else "",
                each.rows[-1].parameter if each.rows else "",
            )
            for rank, (stages, each) in enumerate(zip(self.stages, self.reports, strict=True))
        ]
        return "\n".join(table_of(header, lines, right=("rank", "parameters", "bytes")))


def rank_reports(model: nn.Module, group: dist.ProcessGroup | None = None) -> RankReports:
    """Return the reports of all ranks of a group (None: the default group) on the parameters they hold; collective."""
    from weft.strategy.pipeline import find_staged

    found = find_staged(model)
    local = (report(model), () if found is None else found[1].stages)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, local, group=group)
    return RankReports(tuple(each for each, _ in gathered), tuple(stages for _, stages in gathered))
