"""Layout strings, and the sizes that "auto" resolves to."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.strategy.planning.layout import Sizes


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "per_host", "expected"),
    [
        (Sizes(), 8, 8, (1, 1, 1, 1, 8)),
        (Sizes(), 16, 8, (1, 1, 2, 1, 8)),  # tensor parallel inside a host
        (Sizes(data_parallel=2), 8, 8, (1, 1, 2, 1, 4)),
        (Sizes(data_parallel=1), 16, 8, (1, 1, 1, 1, 16)),  # the tensor-parallel size alone is free
        (Sizes(tensor_parallel=2), 8, 4, (1, 1, 4, 1, 2)),
        (Sizes(tensor_parallel=1), 4, 4, (1, 1, 4, 1, 1)),
        (Sizes(data_replicate=2), 16, 4, (1, 2, 2, 1, 4)),
        (Sizes("auto", 2, 2), 8, 8, (1, 2, 2, 1, 2)),
        (Sizes("auto", "auto", "auto"), 12, 4, (1, 1, 3, 1, 4)),
        (Sizes("auto", 3, "auto"), 24, 4, (1, 2, 3, 1, 4)),
        (Sizes.parse("rep2,dp4,tp8"), 64, 8, (1, 2, 4, 1, 8)),
        (Sizes.parse(" dp2 , tp2"), 4, 4, (1, 1, 2, 1, 2)),
        (Sizes.parse("tp4"), 4, 4, (1, 1, 1, 1, 4)),
        (Sizes.parse("dpauto,tp4"), 8, 8, (1, 1, 2, 1, 4)),
        (Sizes.parse("tpauto"), 6, 6, (1, 1, 1, 1, 6)),
        (Sizes.parse("pp2,tp2"), 4, 4, (2, 1, 1, 1, 2)),
        (Sizes.parse("pp2,rep2,dpauto,tp2"), 24, 8, (2, 2, 3, 1, 2)),
        (Sizes(pipeline_parallel=4), 16, 8, (4, 1, 1, 1, 4)),
        (Sizes.parse("cp2"), 2, 2, (1, 1, 1, 2, 1)),
        (Sizes.parse("dp2,cp2,tp2"), 8, 8, (1, 1, 2, 2, 2)),
        (Sizes.parse("rep2,dpauto,cp4,tp2"), 48, 8, (1, 2, 3, 4, 2)),
        (Sizes(context_parallel=2), 16, 8, (1, 1, 1, 2, 8)),
        (Sizes(context_parallel=2, tensor_parallel=1), 8, 8, (1, 1, 4, 2, 1)),
        (Sizes.parse("dp4,ep4"), 4, 4, (1, 1, 4, 1, 1, 4)),
        (Sizes.parse("pp2,rep2,dp2,cp2,tp2,ep4"), 32, 8, (2, 2, 2, 2, 2, 4)),
        (Sizes.parse("ep2,dpauto"), 6, 6, (1, 1, 6, 1, 1, 2)),
        (Sizes(expert_parallel=2, tensor_parallel=1), 8, 8, (1, 1, 8, 1, 1, 2)),
        (Sizes.parse("dp4"), 4, 4, (1, 1, 4, 1, 1, 1)),
    ],
)
def test_sizes_are_resolved(sizes: Sizes, num_ranks: int, per_host: int, expected: tuple[int, ...]) -> None:
    assert sizes.resolve(num_ranks, per_host)[: len(expected)] == expected


@pytest.mark.parametrize("text", ["", "dp", "dp2 tp2", "dp2,,tp2", "sp2", "dp0x", "DP2", "dp2,tp2,dp2", "dp-1"])
def test_invalid_layouts_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"write each axis once, pp \(pipeline parallel\), rep"):
        Sizes.parse(text)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "two", None])
def test_invalid_sizes_raise(size: object) -> None:
    with pytest.raises(ValueError, match=r"data_parallel_size is .*; pass a number of ranks from 1 on, or 'auto'"):
        Sizes(data_parallel=size)


@pytest.mark.parametrize(
    ("axis", "short"), [("pipeline_parallel", "pp"), ("context_parallel", "cp"), ("expert_parallel", "ep")]
)
def test_sizes_of_other_axes_must_be_numbers(axis: str, short: str) -> None:
    for size in (0, "auto", None):
        with pytest.raises(ValueError, match=rf"{axis}_size is .*; pass a number of ranks from 1 on\.$"):
            Sizes(**{axis: size})
    with pytest.raises(ValueError, match=f"{axis}_size is 'auto'"):
        Sizes.parse(f"{short}auto,tp2")


@pytest.mark.parametrize(("layout", "num_ranks"), [("ep4", 1), ("dp6,ep4", 6), ("tp4,ep2", 4), ("dp1,cp2,ep4", 2)])
def test_expert_parallel_ranks_are_part_of_the_data_ranks(layout: str, num_ranks: int) -> None:
    with pytest.raises(
        ValueError, match=r"got \d expert-parallel ranks in \d data-.*parallel ranks; pass a number that"
    ):
        Sizes.parse(layout).resolve(num_ranks, num_ranks)


def test_zero_size_in_layout_raises() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 0"):
        Sizes.parse("tp0")


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "fitting"),
    [
        (Sizes(data_parallel=3), 8, "'data_parallel=4,tensor_parallel=2'|'data_parallel=2,tensor_parallel=4'"),
        (Sizes(1, 2, 2), 8, "'data_parallel=2,tensor_parallel=4', 'data_parallel=4,tensor_parallel=2'"),
        (Sizes(3, "auto", 2), 8, "'data_replicate=2,data_parallel=2,tensor_parallel=2'|'data_replicate=4"),
        (Sizes.parse("tp4"), 2, "'tp2', 'dp2'"),
        (Sizes.parse("rep2,dp2"), 6, "'rep2,dp3', 'rep3,dp2'"),
        (Sizes.parse("cp2,tp2"), 2, "'cp2'"),
        (Sizes(1, 1, 2, context_parallel=2), 8, "'data_parallel=1,context_parallel=4,tensor_parallel=2'"),
    ],
)
def test_error_suggests_fitting_sizes(sizes: Sizes, num_ranks: int, fitting: str) -> None:
    with pytest.raises(ValueError, match=rf"has {num_ranks}; use sizes whose product is {num_ranks}, .*({fitting})"):
        sizes.resolve(num_ranks, num_ranks)


def test_estimates_from_files_without_context_parallelism_raise() -> None:
    from weft.strategy.estimate.config import read_config

    config = {"model": {"feed_forward": {}}, "batch": {"sequences": 1, "tokens": 8}}
    for mesh in ({"layout": "dp2,cp2"}, {"mesh": "data_parallel=2,context_parallel=2"}):
        with pytest.raises(ValueError, match="has the axis 'context_parallel', for which there is no estimate"):
            read_config({**config, **mesh}, Path())
