"""Rules of CONTRIBUTING.md on source files that can be checked automatically, and the public names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 600
MAX_README_LINES = 40
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh", ".cmake"}


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout: the list of source files is git's")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


def test_no_source_file_is_longer_than_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in _tracked()
        if path.suffix in SUFFIXES and (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


@pytest.mark.parametrize(
    "folder", ["kernels", "ops", "strategy", "lightning_plugin", "tests", "examples", "benchmarks"]
)
def test_every_folder_has_a_short_readme(folder: str) -> None:
    readme = ROOT / folder / "README.md"
    assert len(readme.read_text().splitlines()) <= MAX_README_LINES or folder == "tests"


def test_cmake_files_name_each_source() -> None:
    for path in _tracked():
        if path.name == "CMakeLists.txt" or path.suffix == ".cmake":
            assert not re.search(r"file\s*\(\s*GLOB", path.read_text(), re.IGNORECASE), path


def test_public_names_of_weft() -> None:
    errors = ["CollectiveError", "CollectiveMismatchError", "CollectiveTimeoutError"]
    errors += ["GroupAbortedError", "PeerLostError"]
    modules = ["collectives", "memory", "nn", "ops", "overlap", "pipeline_links", "strategy"]
    assert sorted(weft.__all__) == sorted(
        [*errors, *modules, "Plan", "export_local", "load_pretrained", "parallelize", "save_pretrained"]
    )
    assert sorted(weft.nn.__all__) == [
        "AllGatherLinear",
        "ColumnLinear",
        "ColumnRowMLP",
        "Dropout",
        "LayerNorm",
        "LinearReduceScatter",
        "ParallelAttention",
        "RMSNorm",
        "RowLinear",
        "ShardedLinear",
        "VocabParallelCrossEntropy",
        "VocabParallelEmbedding",
        "VocabParallelLinearCrossEntropy",
        "join_gate_up",
        "kv_groups",
        "rebind_group",
        "shard_qkv",
        "shard_range",
    ]
    for name in weft.__all__:
        assert getattr(weft, name) is not None
