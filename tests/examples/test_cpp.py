"""The C++ examples, built against an installed weft and run on NUM_RANKS processes, give the same numbers as Python."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support.example_modules import EXAMPLES
from support.installed import BUILD, build_project, install
from support.processes import ProcessResult, ProcessTree, run_script

# float32: the compared results come from the same kernels, or from kernels of another compiler.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
NUM_RANKS = 2
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

Numbers = dict[tuple[int, str], torch.Tensor]


def read_numbers(stdout: str) -> Numbers:
    """Return {(rank, name): numbers} of the lines like "rank 0 name: 1.5 2"."""
    lines = re.findall(r"^rank (\d+) ([\w ]+): (.*)$", stdout, re.MULTILINE)
    return {(int(rank), name): torch.tensor([float(text) for text in line.split()]) for rank, name, line in lines}


def run_ranks(program: Path, store: Path, *arguments: str | Path) -> list[ProcessResult]:
    commands = [[program, store, str(rank), str(NUM_RANKS), *arguments] for rank in range(NUM_RANKS)]
    with ExitStack() as stack:
        trees = [stack.enter_context(ProcessTree(command, env=ENV)) for command in commands]
        return [tree.wait(120) for tree in trees]


def numbers_of(program: Path, store: Path, *arguments: str | Path) -> Numbers:
    results = run_ranks(program, store, *arguments)
    for result in results:
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return read_numbers("".join(result.stdout for result in results))


def assert_same(got: Numbers, expected: Numbers, names: set[str]) -> None:
    assert set(got) == {(rank, name) for rank in range(NUM_RANKS) for name in names}
    for key, numbers in got.items():
        torch.testing.assert_close(numbers, expected[key], **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.fixture(scope="module")
def programs() -> Path:
    """Return the folder of the built programs. It is kept between runs, so that only changes are compiled."""
    prefix = install(BUILD / "installed" / "examples")
    build = BUILD / "installed" / "examples_build"
    # Without debug information, which takes longer to write than the code takes.
    build_project(EXAMPLES / "cpp", build, prefix, "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0")
    return build


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    """Return the folder with the exported models, and their results in Python."""
    folder = tmp_path_factory.mktemp("exported")
    # Inductor's cache is kept between runs, too. One compile thread, because a pool takes longer to start.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(BUILD / "installed" / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env = {**ENV, **cache}
    result = run_script(
        EXAMPLES / "cpp" / "export_models.py", str(folder / "models"), "--compiled", env=env, timeout=400
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return folder / "models", read_numbers(result.stdout)


def test_scripted_models_match_python(programs: Path, exported: tuple[Path, Numbers], tmp_path: Path) -> None:
    models, expected = exported
    numbers = numbers_of(programs / "run_scripted", tmp_path / "store", models)
    assert_same(numbers, expected, {"mlp", "logits", "continuation"})
    assert all(len(numbers[rank, "logits"]) == 64 and len(numbers[rank, "continuation"]) == 8 for rank in range(2))


def test_compiled_model_matches_python(programs: Path, exported: tuple[Path, Numbers], tmp_path: Path) -> None:
    models, expected = exported
    numbers = numbers_of(programs / "run_compiled", tmp_path / "store", models)
    assert_same(numbers, expected, {"logits"})


def test_comparison_fails_with_wrong_shard(programs: Path, exported: tuple[Path, Numbers], tmp_path: Path) -> None:
    """Rank 1 loads the shards of rank 0: all processes exit with 0, but with other numbers."""
    models, expected = exported
    for name in ("mlp", "language_model"):
        for rank in range(2):
            (tmp_path / f"{name}.rank{rank}.pt").symlink_to(models / f"{name}.rank0.pt")
    numbers = numbers_of(programs / "run_scripted", tmp_path / "store", tmp_path)
    with pytest.raises(AssertionError, match=r"\(0, 'mlp'\): Tensor-likes are not close"):
        assert_same(numbers, expected, {"mlp", "logits", "continuation"})


def test_training_matches_unsharded_model_and_python(programs: Path, tmp_path: Path) -> None:
    numbers = numbers_of(programs / "train", tmp_path / "store")
    losses = train_in_python()
    assert losses[-1] < 0.2 * losses[0]
    expected = {(rank, name): losses for rank in range(NUM_RANKS) for name in ("sharded", "unsharded")}
    assert_same(numbers, expected, {"sharded", "unsharded"})


def train_in_python() -> torch.Tensor:
    """Return the losses of examples/cpp/train.cpp, computed with torch only."""
    torch.manual_seed(0)
    shapes = {"embedding": (50, 16), "w1": (40, 16), "w3": (40, 16), "w2": (16, 40), "output": (50, 16)}
    weights = {name: torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5 for name, shape in shapes.items()}
    weights["embedding"] *= 4
    optimizer = torch.optim.SGD([weight.requires_grad_() for weight in weights.values()], lr=0.5)
    tokens = torch.arange(64) * 7 % 50
    losses = []
    for _ in range(20):
        x = F.embedding(tokens, weights["embedding"])
        hidden = F.linear(F.silu(F.linear(x, weights["w1"])) * F.linear(x, weights["w3"]), weights["w2"])
        loss = F.cross_entropy(F.linear(x + hidden, weights["output"]), (tokens + 3) % 50)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_failing_rank_reports_cause_and_peer_fails(
    programs: Path, exported: tuple[Path, Numbers], tmp_path: Path
) -> None:
    models, _ = exported
    for name in ("mlp.rank0.pt", "language_model.rank0.pt"):
        (tmp_path / name).symlink_to(models / name)
    first, second = run_ranks(programs / "run_scripted", tmp_path / "store", tmp_path)
    assert (first.returncode, second.returncode) == (1, 1)
    assert "mlp.rank1.pt" in second.stderr
    assert "rank 1" in first.stderr and "weft::column_row_mlp" in first.stderr
