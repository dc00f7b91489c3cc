"""Messages from CUDA devices through host memory: sends do not block the host. On the runtime without a device."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from support import cuda_runtime
from support.processes import run_process
from support.ranks import on_ranks
from weft.collectives import CollectiveMismatchError, CollectiveTimeoutError

pytestmark = pytest.mark.cuda_runtime
OPS = weft.ops
PATIENT_MS = 20_000  # no work begins because of the time that has passed
GATE_SECONDS = 10
PAUSE_SECONDS = 0.1

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_calls: list[ctypes._FuncPointer] = []  # a stream may still return from them


class Gate:
    """Work of the current stream that ends when the gate is opened; `timed_out`: after `GATE_SECONDS` instead."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.timed_out = False
        _calls.append(_HostFunction(self._wait))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        ctypes.CDLL(str(cuda_runtime.LIBRARIES / "libweft_cuda_runtime.so")).cudaLaunchHostFunc(
            stream, _calls[-1], None
        )

    def _wait(self, _: object) -> None:
        self.timed_out = not self._opened.wait(GATE_SECONDS)

    def open(self) -> None:
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()


@contextmanager
def closed_gate() -> Iterator[Gate]:
    """Block the current stream until the gate is opened, at the latest at the exit."""
    torch.cuda.synchronize()
    with cuda_runtime.delay(PATIENT_MS):
        gate = Gate()
        try:
            yield gate
        finally:
            gate.open()
        torch.cuda.synchronize()
    assert not gate.timed_out, "the host waited for the stream before it opened the gate"


def _new_group(rank: int, seconds: float = 20) -> str:
    torch.cuda.set_device(rank)
    return dist.new_group(backend="cpu:weft,cuda:nccl", timeout=timedelta(seconds=seconds)).group_name


@on_ranks(2)
def test_send_does_not_block_the_host(rank: int) -> None:
    """Messages of a blocked stream arrive in order; their memory has no other owner before they are copied."""
    name = _new_group(rank)
    x = torch.ones(48, 64, device="cuda")
    numbers = range(1, 5)
    if rank == 0:
        with closed_gate() as gate:
            tokens = []
            for number in numbers:
                message = x * number
                address = message.data_ptr()
                tokens.append(OPS.pipeline_send([message, message.T * 0.5], 1, 0, name))
                del message
                assert torch.full_like(x, -1.0).data_ptr() != address
            gate.open()
        assert [OPS.pipeline_wait(token) for token in tokens] == [[]] * len(tokens)
    else:
        tokens = [OPS.pipeline_recv([x, x.T], 0, 0, name) for _ in numbers]
        before = cuda_runtime.count("synchronizations")
        received = [[part * 2 for part in OPS.pipeline_wait(token)] for token in tokens]
        assert cuda_runtime.count("synchronizations") == before
        for number, (first, second) in zip(numbers, received, strict=True):
            assert torch.equal(first, x * 2 * number) and torch.equal(second, x.T * number)
    OPS.pipeline_flush(name)


@on_ranks(2)
@pytest.mark.parametrize("wait", ["wait", "flush", "gradients"])
def test_waits_for_a_send_end_after_its_copy(rank: int, wait: str) -> None:
    """The sender may then change the tensor in place."""
    name = _new_group(rank)
    x = torch.ones(4, device="cuda", requires_grad=wait == "gradients")
    if rank == 0:
        with closed_gate() as gate:
            token = OPS.pipeline_send([x], 1, 0, name)
            opener = threading.Timer(PAUSE_SECONDS, gate.open)
            opener.start()
            if wait == "gradients":
                OPS.join(torch.zeros(()), [token]).backward()
            elif wait == "flush":
                OPS.pipeline_flush(name)
            else:
                OPS.pipeline_wait(token)
            assert gate.is_open
            x.detach().zero_()
        opener.join()
        assert x.grad is None or torch.equal(x.grad, torch.full_like(x, 3.0))
    else:
        [received] = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 0, name))
        assert torch.equal(received, torch.ones_like(received))
        if wait == "gradients":
            (received * 3).sum().backward()
    OPS.pipeline_flush(name)


@on_ranks(2)
@pytest.mark.parametrize(
    ("wait", "text"), [("flush", "weft::pipeline_send"), ("gradients", "the backward of weft::pipeline_send")]
)
def test_copy_that_does_not_end_times_out(rank: int, wait: str, text: str) -> None:
    name = _new_group(rank, seconds=1)
    if rank == 0:
        with closed_gate() as gate:
            token = OPS.pipeline_send([torch.ones(4, device="cuda", requires_grad=wait == "gradients")], 1, 0, name)
            OPS.pipeline_send([torch.ones(2)], 1, 1, name)  # is transmitted, and drops transmitted messages
            text += r": the copy of message 0 on channel 0 .* on rank 0 within 1000 ms"
            with pytest.raises(CollectiveTimeoutError, match=text):
                OPS.pipeline_flush(name) if wait == "flush" else OPS.join(torch.zeros(()), [token]).backward()
            gate.open()
        OPS.pipeline_flush(name)
    dist.barrier()


@on_ranks(2)
def test_failed_transmission_raises_in_the_next_wait(rank: int) -> None:
    """The group fails after the header was sent, and before the tensor is."""
    name = _new_group(rank)
    if rank == 0:
        with closed_gate() as gate:
            OPS.pipeline_send([torch.ones(3, 4, device="cuda")], 1, 0, name)
            dist.barrier()
            gate.open()
        text = r"weft::pipeline_send: the message 0 on channel 0 .* failed on rank 0 of its group: .* \[4, 3\]"
        with pytest.raises(CollectiveMismatchError, match=text):
            OPS.pipeline_flush(name)
    else:
        token = OPS.pipeline_recv([torch.ones(4, 3, device="cuda")], 0, 0, name)
        with pytest.raises(CollectiveMismatchError):
            OPS.pipeline_wait(token)
        dist.barrier()


@on_ranks(2)
def test_send_in_a_capture_raises(rank: int) -> None:
    """The group can be used afterwards."""
    name, x, graph = _new_group(rank), torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        OPS.pipeline_send([x], 1 - rank, 0, name)
    token = OPS.pipeline_recv([x], 1 - rank, 0, name)
    OPS.pipeline_send([x + rank], 1 - rank, 0, name)
    assert torch.equal(OPS.pipeline_wait(token)[0], x + 1 - rank)
    OPS.pipeline_flush(name)


# A process of its own, because the error is for the rest of the process.
FAILED_COPY = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
x, too_large = torch.ones(4, device="cuda"), torch.tensor([9], device="cuda")
name = dist.group.WORLD.group_name
weft.ops.pipeline_send([x.gather(0, too_large)], 1, 0, name)
try:
    weft.ops.pipeline_flush(name)
except RuntimeError as error:
    print(error)
"""


def test_failed_copy_raises_in_the_next_wait() -> None:
    environment = {"WEFT_CUDA_RUNTIME_DELAY_MS": str(PATIENT_MS)}
    result = run_process([sys.executable, "-c", FAILED_COPY], env=environment)
    assert result.returncode == 0, result.stderr
    assert "weft::pipeline_send: the copy of message 0 on channel 0 from rank 0 to rank 1" in result.stdout
    assert "failed on rank 0" in result.stdout
