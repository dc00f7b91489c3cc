"""One rank: joins the process group, then runs the cases that it receives until its socket closes."""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib.util
import itertools
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

# Longer than the searches that one rank does while the others wait, on a busy machine; a hang ends with the case.
GROUP_TIMEOUT = timedelta(seconds=300)
STACK_SIGNAL = signal.SIGUSR1

_CASES_PER_CHECK = 50
_CHECKS_PER_FULL_COLLECTION = 8
_MAX_SURVIVORS = 20_000  # objects of earlier cases, for which a full collection is made at the next check

_modules: dict[str, tuple[int, ModuleType]] = {}
_resets = itertools.count(1)
_kept: list[int] = []  # one number: of exempt objects after the first case, then after the last full collection


def run_rank(fd: int, folder: Path, rank: int, world_size: int) -> None:
    """Serve cases on the socket `fd`. `folder` holds this rank's log, its stack dumps and the group's store.

    Each request gets one reply {"outcome": "passed" | "failed" | "skipped", "time": monotonic seconds, ...}. The
    first reply comes without a request and says whether the rank has joined the group.
    """
    _redirect_output(folder / f"log-{rank}")
    with (folder / f"stack-{rank}").open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        connection = Connection(fd)
        _answer(connection, lambda: _join_group(folder, rank, world_size))
        environment = dict(os.environ)
        keeps_groups = False
        while True:
            try:
                request = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            if request is None:
                _answer(connection, lambda keeps=keeps_groups: _reset(environment, keeps))
            else:
                keeps_groups = request["keeps_groups"]
                _answer(connection, lambda case=request: _run_case(case, rank, world_size))


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _join_group(folder: Path, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    import weft  # noqa: F401  (registers the backend)
    from support import cuda_runtime

    cuda_runtime.load()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("cpu:weft", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    _seed()
    dist.barrier()


def _run_case(case: dict, rank: int, world_size: int) -> object:
    import pytest

    module = _load(case["path"], case["module"])
    body = _find_body(module, case["qualname"])
    arguments = pickle.loads(case["arguments"])
    given = {"rank": rank, "world_size": world_size}
    arguments.update({name: given[name] for name in case["wanted"]})
    try:
        return body(**arguments)
    finally:
        # The test process undoes its own monkeypatch, not this copy.
        for argument in arguments.values():
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()


def _answer(connection: Connection, action: Callable[[], object]) -> None:
    import pytest

    try:
        reply = {"outcome": "passed", "value": pickle.dumps(action())}
    except pytest.skip.Exception as skip:
        reply = {"outcome": "skipped", "text": str(skip.msg)}
    except BaseException as error:
        # NOTE: read the clock first: failures are reported in the order of these times, the cause first.
        failed_at = time.monotonic()
        trace = error.__traceback__
        while trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # the reader does not need this file's frames
        text = "".join(traceback.format_exception(type(error), error, trace))
        reply = {"outcome": "failed", "text": text, "time": failed_at}
        # The frames keep tensors and groups alive.
        del trace
        error.__traceback__ = None
    reply.setdefault("time", time.monotonic())
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(pickle.dumps(reply))


def _load(path: str, name: str) -> ModuleType:
    """Return the test module at `path`, registered as `name` and reloaded if the file has changed."""
    mtime_ns = os.stat(path).st_mtime_ns
    cached = _modules.get(path)
    if cached is not None and cached[0] == mtime_ns and sys.modules.get(name) is cached[1]:
        return cached[1]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ImportError(f"{path} is not a Python file that a rank could load; name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(_compile(path), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    _modules[path] = (mtime_ns, module)
    return module


def _compile(path: str) -> object:
    # Rewrite assertions like pytest, so that a failing assert on a rank shows its values.
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    return compile(tree, path, "exec", dont_inherit=True)


def _find_body(module: ModuleType, qualname: str) -> Callable[..., object]:
    owner: object = None
    found: object = module
    for attribute in qualname.split("."):
        owner, found = found, getattr(found, attribute)
    body = getattr(found, "rank_body", found)
    return body.__get__(owner()) if isinstance(owner, type) else body


def _forget_meshes() -> None:
    """Clear the plugin's meshes, and DTensor's caches, which confuse a new mesh with an earlier one of equal sizes."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _call_on_backward_threads(debug._clear_sharding_prop_cache)  # each thread has a cache of its own
        _redistribute._gen_transform_infos.cache_clear()
    if "weft._plugin.meshes" in sys.modules:
        sys.modules["weft._plugin.meshes"]._meshes.clear()


def _call_on_backward_threads(function: Callable[[], object]) -> None:
    """Call `function` on the threads that run the backward of the CUDA devices that have been used."""
    import torch

    class CallInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            function()
            return grad

    if not torch.cuda.is_initialized():
        return
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(index):
            CallInBackward.apply(torch.zeros(1, device=f"cuda:{index}", requires_grad=True)).backward()


def _reset(environment: dict[str, str], keeps_groups: bool) -> None:
    """Reset the rank between two cases. The barriers fail if ranks have not called the same collectives.

    `keeps_groups`: keep sub-groups, and DTensor's caches of the meshes on them, for the next case.
    """
    import torch
    import torch.distributed as dist

    gc.collect()  # frees what the case has dropped, before the other ranks go on
    if not dist.is_initialized():
        raise RuntimeError(
            "the test destroyed the default process group, which later tests need; destroy sub-groups only"
        )
    world = dist.group.WORLD
    dist.barrier()
    if not keeps_groups:
        for group in [g for g in dist.distributed_c10d._world.pg_map if g is not world]:
            dist.destroy_process_group(group)
        _forget_meshes()
    # Only after a case that compiled something: a reset also clears the cache of fake tensors, which recordings of
    # pipelines use.
    if "torch._dynamo" in sys.modules and torch._dynamo.convert_frame.FRAME_COUNTER > 0:
        torch._dynamo.reset()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    os.environ.clear()
    os.environ.update(environment)
    _seed()
    _collect_survivors()
    dist.barrier()


def _collect_survivors() -> None:
    """Collect again without groups and caches, and exempt the objects that are left from later collections.

    They may be dropped later. But a collection of all objects takes 0.4 s, because it includes the 270,000 objects of
    all imported modules. It is made when many objects are left or, rarely, in any case.
    """
    number = next(_resets)
    is_due = number % (_CASES_PER_CHECK * _CHECKS_PER_FULL_COLLECTION) == 0
    if number % _CASES_PER_CHECK == 0:
        is_due |= gc.get_freeze_count() - _kept[0] > _MAX_SURVIVORS
    if is_due:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if is_due or not _kept:
        _kept[:] = [gc.get_freeze_count()]


def _seed() -> None:
    import torch

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
