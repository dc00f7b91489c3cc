"""Tests of the rank pools: a test helper that hides a failure is worse than no helper."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.processes import ProcessTree, assert_nothing_left, is_running, processes_left, run_script
from support.rank_pool import POOLS
from support.ranks import RankFailure, on_ranks, run_on_ranks

TESTS_FOLDER = Path(__file__).parent


@on_ranks(1, 2, 3, 4)
def test_ranks_share_one_group(rank: int, world_size: int) -> None:
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "cpu:weft")
    assert total.item() == world_size * (world_size + 1) / 2
    assert torch.get_num_threads() == 1
    assert torch.initial_seed() == 0


@on_ranks(8)
def test_eight_ranks(rank: int) -> None:
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == 28


class Point:
    """A class of a test module, pickled as a parameter and as a result."""

    def __init__(self, x: int) -> None:
        self.x = x


@on_ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("point", [Point(3)], ids=["point"])
def test_parameters_and_fixtures_reach_the_ranks(rank: int, dtype: str, point: Point, tmp_path: Path) -> None:
    assert torch.zeros(1, dtype=getattr(torch, dtype)).dtype in (torch.float32, torch.float64)
    assert isinstance(point, Point) and point.x == 3
    (tmp_path / f"{rank}").write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


class TestInAClass:
    @on_ranks(2)
    def test_body_is_a_method(self, rank: int, world_size: int) -> None:
        assert isinstance(self, TestInAClass)
        assert rank < world_size


def _sum_and_point(rank: int, world_size: int, scale: float) -> tuple[torch.Tensor, Point]:
    total = torch.full((2,), scale * (rank + 1))
    dist.all_reduce(total)
    return total, Point(rank)


def test_run_on_ranks_returns_results_by_rank() -> None:
    results = run_on_ranks(2, _sum_and_point, scale=2.0)
    assert [point.x for _, point in results] == [0, 1]
    for total, _ in results:
        assert torch.equal(total, torch.tensor([6.0, 6.0]))
    by_path = run_on_ranks(2, f"{__file__}::_sum_and_point", scale=1.0)
    assert torch.equal(by_path[1][0], torch.tensor([3.0, 3.0]))


def _pid() -> int:
    return os.getpid()


def _make_groups_and_change_state() -> None:
    dist.new_group([0])
    dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    os.environ["WEFT_LEFT_BY_A_TEST"] = "1"


def _state() -> tuple[int, torch.dtype, float, bool]:
    num_groups = len(dist.distributed_c10d._world.pg_map)
    return num_groups, torch.get_default_dtype(), torch.rand(1).item(), "WEFT_LEFT_BY_A_TEST" in os.environ


def test_ranks_stay_warm_and_clean_between_cases() -> None:
    before = run_on_ranks(2, _pid)
    fresh = run_on_ranks(2, _state)
    run_on_ranks(2, _make_groups_and_change_state)
    assert run_on_ranks(2, _state) == fresh
    assert run_on_ranks(2, _pid) == before
    assert os.getpid() not in before


def _make_group() -> str:
    return dist.new_group([0, 1]).group_name


def _has_group(name: str) -> bool:
    return name in dist.distributed_c10d._world.pg_names.values()


def _patch_pi(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(math, "pi", 3.0)
    return math.pi


def _read_pi() -> float:
    return math.pi


def test_monkeypatch_on_ranks_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_on_ranks(1, _patch_pi, monkeypatch=monkeypatch) == [3.0]
    assert run_on_ranks(1, _read_pi) == [math.pi]


def test_groups_are_kept_on_request() -> None:
    [kept, _] = run_on_ranks(2, _make_group, keeps_groups=True)
    assert run_on_ranks(2, _has_group, name=kept) == [True, True]
    [destroyed, _] = run_on_ranks(2, _make_group)
    assert run_on_ranks(2, _has_group, name=kept) == run_on_ranks(2, _has_group, name=destroyed) == [False, False]


def test_least_recently_used_pools_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    POOLS.close()
    monkeypatch.setattr(POOLS, "MAX_LIVE_RANKS", 6)
    pids = {size: run_on_ranks(size, _pid) for size in (2, 1, 3)}
    assert all(is_running(pid) for pid in pids[1] + pids[2] + pids[3])
    assert run_on_ranks(2, _pid) == pids[2]
    pids[4] = run_on_ranks(4, _pid)
    assert not any(is_running(pid) for pid in pids[1] + pids[3])
    assert all(is_running(pid) for pid in pids[2] + pids[4])


def _fail_on(rank: int, bad_rank: int) -> None:
    print(f"rank {rank} says hello")
    if rank == bad_rank:
        left, right = [1, rank], [1, 7]
        assert left == right
    dist.barrier()


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_failing_rank_is_reported_first_and_replaced(bad_rank: int) -> None:
    before = run_on_ranks(3, _pid)
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(3, _fail_on, bad_rank=bad_rank)
    text = str(caught.value)
    assert text.startswith(f"rank {bad_rank} of 3 failed:\nTraceback")
    assert "in _fail_on" in text and "support/rank_process.py" not in text.partition("--- output")[0]
    assert f"assert [1, {bad_rank}] == [1, 7]" in text, "asserts on ranks show their values"
    assert f"rank {bad_rank} says hello" in text
    assert text.count("had not finished") == 2, "the ranks waiting in the barrier are told apart"
    assert time.monotonic() - start < 20
    after = run_on_ranks(3, _pid)
    assert not set(before) & set(after)
    assert not any(is_running(pid) for pid in before)


def _die(rank: int, how: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), how)
    dist.barrier()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT])
def test_dead_rank_is_reported_first(how: int) -> None:
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, _die, how=how)
    first, _, followers = str(caught.value).partition("rank 0 of 2")
    assert first.startswith(f"rank 1 of 2 died with {signal.Signals(how).name}")
    assert "in _die" in followers
    assert len(run_on_ranks(2, _pid)) == 2


def _hang_on_rank_one(rank: int) -> None:
    while rank == 1:
        time.sleep(0.05)


def test_time_out_reports_hung_rank_and_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, _hang_on_rank_one, timeout=1.0)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 had not finished _hang_on_rank_one within 1 s:")
    hung, _, finished = text.partition("rank 0 of 2 had finished")
    assert "in _hang_on_rank_one" in hung and "in _hang_on_rank_one" not in finished
    assert 1.0 <= time.monotonic() - start < 20
    assert len(run_on_ranks(2, _pid)) == 2


def _skip(rank: int, only: int | None = None) -> None:
    if only is None or rank == only:
        pytest.skip("not today")


@on_ranks(2)
def test_skip_in_body(rank: int) -> None:
    pytest.skip("always skipped: the outcome is asserted below")


def test_skips() -> None:
    before = run_on_ranks(2, _pid)
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_on_ranks(2, _skip)
    assert run_on_ranks(2, _pid) == before, "a skip does not cost a pool"
    with pytest.raises(RankFailure, match=r"rank 1 of 2 was skipped \(not today\) while others were not"):
        run_on_ranks(2, _skip, only=1)
    with pytest.raises(pytest.skip.Exception, match="always skipped"):
        test_skip_in_body(world_size=2)


def _destroy_the_group(rank: int) -> None:
    if rank == 0:
        dist.destroy_process_group()


def _call_one_collective_too_many(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.zeros(1), async_op=True)


def test_unsynchronized_case_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailure, match="destroyed the default process group"):
        run_on_ranks(2, _destroy_the_group)
    monkeypatch.setattr("support.rank_pool._RESET_SECONDS", 2.0)
    with pytest.raises(RankFailure, match="which left its ranks out of step"):
        run_on_ranks(2, _call_one_collective_too_many)
    assert len(run_on_ranks(2, _pid)) == 2


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ValueError, match=r"value=.*cannot be sent to ranks"):
        run_on_ranks(1, _skip, value=lambda: 0)
    with pytest.raises(ValueError, match="move it to the top level"):
        run_on_ranks(1, lambda: 0)
    with pytest.raises(ValueError, match="names no function of a file"):
        run_on_ranks(1, "nowhere.py::f")
    with pytest.raises(ValueError, match="not 0; change the world size"):
        run_on_ranks(0, _pid)


def _num_threads_of_server() -> int:
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def test_server_is_single_threaded() -> None:
    assert run_on_ranks(1, _num_threads_of_server) == [1]


FAILING_FILE = """
import pytest
import torch.distributed as dist
from support.ranks import on_ranks

@on_ranks(1, 2)
@pytest.mark.parametrize("n", [1, 2])
def test_some(rank, world_size, n):
    if n == 2 and world_size == 2:
        pytest.skip("no pairs")
    if n == 2 and rank == 0:
        assert n + 1 == 4

@pytest.mark.cuda
def test_gpu():
    assert False
"""

PYTEST = (sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", "-rA")
NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}


def _session(folder: Path, source: str) -> list[str]:
    (folder / "test_inner.py").write_text(source)
    (folder / "conftest.py").write_text((TESTS_FOLDER / "conftest.py").read_text())
    (folder / "support").symlink_to(TESTS_FOLDER / "support")
    return [*PYTEST, f"--rootdir={folder}", str(folder)]


def test_outcomes_in_a_session(tmp_path: Path) -> None:
    with ProcessTree(_session(tmp_path, FAILING_FILE), env=NO_CUDA, cwd=tmp_path) as tree:
        result = tree.wait(120)
        assert_nothing_left(tree.pgid)
    assert result.returncode == 1, result.stdout + result.stderr
    for outcome in (
        "PASSED test_inner.py::test_some[1-1ranks]",
        "PASSED test_inner.py::test_some[1-2ranks]",
        "FAILED test_inner.py::test_some[2-1ranks] - Failed: rank 0 of 1 failed",
        "SKIPPED [1] test_inner.py:6: no pairs",
        "needs a CUDA device, and torch finds none",
        "assert (2 + 1) == 4",
    ):
        assert outcome in result.stdout, result.stdout
    assert "1 failed, 2 passed, 2 skipped" in result.stdout
    assert result.stderr == ""


HANGING_FILE = """
import os, time
from pathlib import Path
import torch.distributed as dist
from support.ranks import on_ranks

@on_ranks(2)
def test_hang(rank):
    Path(__file__).with_name(f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        while True:
            time.sleep(1)
    dist.barrier()
"""


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_ranks_die_with_the_session(tmp_path: Path, signum: int) -> None:
    with ProcessTree(_session(tmp_path, HANGING_FILE), env=NO_CUDA, cwd=tmp_path) as tree:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        deadline = time.monotonic() + 90
        while not all(path.exists() and path.read_text() for path in files):
            assert time.monotonic() < deadline and is_running(tree.pgid), tree.stdout + tree.stderr
            time.sleep(0.05)
        pids = [int(path.read_text()) for path in files]
        assert set(pids) <= set(processes_left(tree.pgid)), "the ranks belong to the tree"
        tree.send_signal(signum)
        tree.wait(30)
        assert_nothing_left(tree.pgid, within=5)
        assert not any(is_running(pid) for pid in pids)


def test_pools_restart_after_close() -> None:
    before = run_on_ranks(1, _pid)
    POOLS.close()
    assert not is_running(before[0])
    assert run_on_ranks(1, _pid) != before


def test_process_helpers_capture_output_and_find_survivors(tmp_path: Path) -> None:
    result = run_script("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")
    with pytest.raises(TimeoutError, match=r"longer than 0.5 s\n--- stdout ---\nbefore"):
        run_script("import time; print('before', flush=True); time.sleep(60)", timeout=0.5)
    sleeper = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    escapes = f"import subprocess; print({sleeper}.pid, flush=True)"
    with pytest.raises(AssertionError, match=r"processes still running after 2 s: .*sleep 60"):
        run_script(escapes)
    with ProcessTree([sys.executable, "-c", escapes]) as tree:
        tree.wait()
        assert list(processes_left(tree.pgid).values()) == ["sleep 60"]
        pid = int(tree.stdout)
    assert not is_running(pid)
    with ProcessTree([sys.executable, "-c", "print('ready', flush=True); input()"]) as tree:
        with pytest.raises(TimeoutError, match="without printing 'never'"):
            tree.wait_for_text("never", timeout=5)
