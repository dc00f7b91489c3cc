"""pipeline_send, pipeline_recv, pipeline_wait and join: values and gradients of stages against the full model."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from ops.collectives.profiled import collectives_of
from ops.memory.counting import counted
from support.ranks import on_ranks
from weft.collectives import CollectiveMismatchError

OPS = weft.ops


def _groups() -> list[str]:
    """Return the names of the test's group, on the weft backend, and of one on gloo."""
    return [dist.group.WORLD.group_name, dist.new_group(backend="gloo").group_name]


def _like(*shape: int, dtype: torch.dtype = torch.float64, needs_grad: bool = True) -> Tensor:
    """Return a template of `shape` that allocates memory for one element only."""
    return torch.empty((), dtype=dtype, requires_grad=needs_grad).expand(shape)


def _layers(num_stages: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6, dtype=torch.float64) for _ in range(num_stages)]


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("order", ["all forward, all backward", "one forward, one backward"])
def test_stages_match_full_model(rank: int, world_size: int, order: str) -> None:
    for group in _groups():
        check_stages(rank, world_size, order, group)


def check_stages(rank: int, world_size: int, order: str, group: str) -> None:
    """Compare stages with the full model: micro-batches of different sizes, one empty, and a skip connection."""
    sizes = [4, 1, 0, 3, 5]
    torch.manual_seed(1)
    batches = [torch.randn(size, 6, dtype=torch.float64) for size in sizes]
    full_layers = _layers(world_size)
    for batch in batches:
        x, skip = batch, batch.sin()
        for layer in full_layers:
            x, skip = layer(x).tanh(), skip * 1.5
        (x * skip + x).sum().backward()

    local_layer = _layers(world_size)[rank]
    is_last = rank == world_size - 1
    received = [
        OPS.pipeline_recv([_like(size, 6), _like(size, 6, needs_grad=False)], rank - 1, 0, group)
        for size in sizes
        if rank > 0
    ]
    losses = []
    for number, batch in enumerate(batches):
        x, skip = OPS.pipeline_wait(received[number]) if rank else (batch, batch.sin())
        assert not skip.requires_grad and x.requires_grad == (rank > 0)
        x, skip = local_layer(x).tanh(), skip * 1.5
        if is_last:
            losses.append((x * skip + x).sum())
        else:
            losses.append(OPS.join(torch.zeros(()), [OPS.pipeline_send([x, skip], rank + 1, 0, group)]))
        if order == "one forward, one backward":
            losses.pop().backward()
    for loss in reversed(losses):
        loss.backward()
    OPS.pipeline_flush(group)
    torch.testing.assert_close(local_layer.weight.grad, full_layers[rank].weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(local_layer.bias.grad, full_layers[rank].bias.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_many_messages_of_all_dtypes_on_two_channels(rank: int) -> None:
    """Receives are posted before the data arrives and awaited in another order; some are large, strided or empty."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    for group in _groups():
        for shape in [(3, 5), (), (0, 4), (700, 700), (2, 1, 2, 1, 2, 1, 2, 1, 2, 2)]:
            torch.manual_seed(2)
            tensors = [torch.randn(shape).mul(3).to(dtype) for dtype in dtypes]
            if rank == 0:
                transposed = [tensor.T if tensor.dim() == 2 else tensor for tensor in tensors]
                tokens = [OPS.pipeline_send([tensor], 1, 5, group) for tensor in transposed]
                tokens.append(OPS.pipeline_send(tensors, 1, 1022, group))
                assert [OPS.pipeline_wait(token) for token in tokens] == [[]] * 8
                continue
            like = [torch.empty((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]
            singles = [OPS.pipeline_recv([one.T if one.dim() == 2 else one], 0, 5, group) for one in like]
            together = OPS.pipeline_wait(OPS.pipeline_recv(like, 0, 1022, group))
            separate = [OPS.pipeline_wait(token)[0] for token in reversed(singles)][::-1]
            for sent, one, other in zip(tensors, together, separate, strict=True):
                assert torch.equal(sent, one) and one.dtype == sent.dtype
                assert torch.equal(sent.T if sent.dim() == 2 else sent, other) and other.is_contiguous()


@on_ranks(2)
def test_number_of_messages(rank: int) -> None:
    """A message is a header and each tensor; its reply is a header and each gradient, or nothing."""
    group = dist.group.WORLD.group_name
    x = torch.ones(3, 4, requires_grad=True)

    def without_gradients() -> None:
        with torch.no_grad():
            token = OPS.pipeline_recv([x, x], 0, 0, group) if rank else OPS.pipeline_send([x, x], 1, 0, group)
            OPS.pipeline_wait(token)

    def with_gradients() -> None:
        if rank:
            (y,) = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 0, group))
            (2 * y).sum().backward()
        else:
            OPS.join(torch.zeros(()), [OPS.pipeline_send([x], 1, 0, group)]).backward()
        OPS.pipeline_flush(group)

    # A profile omits messages that are in flight when it ends.
    collectives_of(without_gradients, {"recv": 3} if rank else {"send": 3})
    dist.barrier()
    collectives_of(with_gradients, {"send": 2, "recv": 2})
    dist.barrier()
    if rank == 0:
        assert torch.equal(x.grad, torch.full((3, 4), 2.0))
    else:
        assert x.grad is None


def _send_or_receive(rank: int, group: str, value: float, size: int = 1 << 16) -> Tensor | None:
    """Send a tensor filled with `value` from rank 0; return it on rank 1."""
    if rank == 0:
        OPS.pipeline_wait(OPS.pipeline_send([torch.full((size,), value)], 1, 0, group))
        return None
    like = _like(size, dtype=torch.float32, needs_grad=False)
    (x,) = OPS.pipeline_wait(OPS.pipeline_recv([like], 0, 0, group))
    assert torch.equal(x, torch.full((size,), value))
    return x


@on_ranks(2)
def test_message_memory_is_reused(rank: int) -> None:
    """Memory is reused as soon as no tensor refers to it, and no sooner."""
    for group in _groups():
        first = _send_or_receive(rank, group, 1.0)
        address = first.data_ptr() if rank else 0
        view = first[5:] if rank else None
        del first
        second = _send_or_receive(rank, group, 2.0)
        if rank:
            assert second.data_ptr() != address, "a view must keep the first tensor's memory"
            assert view.sum() == (1 << 16) - 5
        del view
        third = _send_or_receive(rank, group, 3.0)
        if rank:
            assert third.data_ptr() == address
            assert torch.equal(second, torch.full_like(second, 2))
            weak = torch.multiprocessing.reductions.StorageWeakRef(third.untyped_storage())
        del third
        fourth = _send_or_receive(rank, group, 4.0)
        if rank:
            assert fourth.data_ptr() != address, "a weak reference must keep the memory: it may be locked again"
            del weak
        del second, fourth
        OPS.pipeline_flush(group)


@on_ranks(2)
def test_tensors_for_backward_are_not_overwritten(rank: int) -> None:
    group = dist.group.WORLD.group_name
    weight = torch.ones(1, requires_grad=True)
    total = torch.zeros(())
    for value in (1.0, 2.0, 3.0):
        x = _send_or_receive(rank, group, value)
        if rank:
            total = total + (x * weight).sum()
        del x
    if rank:
        total.backward()
        assert weight.grad.item() == 6 * (1 << 16)
    OPS.pipeline_flush(group)


@on_ranks(2)
def test_flush_frees_memory(rank: int) -> None:
    group = dist.group.WORLD.group_name
    with counted() as count:
        for size in (1 << 16, 1 << 16, 1 << 17):  # the last size evicts buffers that do not fit
            _send_or_receive(rank, group, 1.0, size)
        held = (4 << 17) + 64 if rank else 0  # and the header of the last message
        assert count.now() - count.now("communication") == held
        OPS.pipeline_flush(group)
        assert count.now() - count.now("communication") == 0


@on_ranks(2)
def test_unused_results_have_zero_gradients(rank: int) -> None:
    group = dist.group.WORLD.group_name
    if rank == 0:
        x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        OPS.join(torch.zeros(()), [OPS.pipeline_send([x, y], 1, 0, group)]).backward()
        assert torch.equal(x.grad, torch.ones(2)) and torch.equal(y.grad, torch.zeros(3))
    else:
        like = [_like(2, dtype=torch.float32), _like(3, dtype=torch.float32)]
        x, _ = OPS.pipeline_wait(OPS.pipeline_recv(like, 0, 0, group))
        x.sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("backend", ["cpu:weft", "gloo"])
@pytest.mark.parametrize(
    ("like", "text"),
    [
        ([_like(4, 3)], r"1 tensor, Double \[4, 3\] that needs a gradient"),
        ([_like(3, 4, dtype=torch.float32)], r"1 tensor, Float \[3, 4\] that needs a gradient"),
        ([_like(3, 4), _like(2)], r"2 tensors, the first Double \[3, 4\] that needs a gradient"),
        ([_like(3, 4, needs_grad=False)], r"1 tensor, Double \[3, 4\] but rank 0 sent"),
    ],
)
def test_mismatches_raise_on_both_sides(rank: int, backend: str, like: list[Tensor], text: str) -> None:
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=20))
    if rank == 0:
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        with pytest.raises(CollectiveMismatchError):  # the group may fail before the message is sent completely
            OPS.join(torch.zeros(()), [OPS.pipeline_send([x], 1, 7, group.group_name)]).backward()
        assert x.grad is None
    else:
        token = OPS.pipeline_recv(like, 0, 7, group.group_name)
        with pytest.raises(CollectiveMismatchError, match=text) as raised:
            OPS.pipeline_wait(token)
        assert "message 0 on channel 7 from rank 0 to rank 1" in str(raised.value)
        assert "rank 0 sent 1 tensor, Double [3, 4] that needs a gradient" in str(raised.value)


@on_ranks(2)
def test_mismatch_raises_in_next_send(rank: int) -> None:
    """A sender that never waits gets the error when it sends again, or at once if the receiver was first."""
    group = dist.new_group(backend="cpu:weft").group_name
    if rank == 0:
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 expected message 0 on channel 0 .* \[4, 3\]"):
            try:
                OPS.pipeline_send([torch.ones(3, 4)], 1, 0, group)
            finally:
                dist.barrier()
            for _ in range(1000):
                OPS.pipeline_send([torch.ones(2)], 1, 1, group)
    else:
        token = OPS.pipeline_recv([torch.ones(4, 3)], 0, 0, group)
        with pytest.raises(CollectiveMismatchError):
            OPS.pipeline_wait(token)
        dist.barrier()


@on_ranks(2)
def test_missing_message_times_out(rank: int) -> None:
    group = dist.new_group(backend="cpu:weft", timeout=timedelta(seconds=1)).group_name
    if rank == 1:
        token = OPS.pipeline_recv([torch.ones(3)], 0, 0, group)
        with pytest.raises(Exception, match="weft::pipeline_recv: the message 0 on channel 0 from rank 0"):
            OPS.pipeline_wait(token)
    dist.barrier()


@on_ranks(2)
def test_invalid_arguments_raise(rank: int) -> None:
    group = dist.group.WORLD.group_name
    x = torch.ones(2)
    for error, text, call in [
        (ValueError, "weft::pipeline_send: got no tensors", ([], 1 - rank, 0, group)),
        (ValueError, rf"got peer {rank} on rank {rank} of 2", ([x], rank, 0, group)),
        (ValueError, "got peer 2", ([x], 2, 0, group)),
        (ValueError, "got channel 1023; pass a number from 0 to 1022", ([x], 1 - rank, 1023, group)),
        (ValueError, "got a group of one rank", ([x], 1, 0, "")),
        (ValueError, "got group_name 'nowhere'", ([x], 1, 0, "nowhere")),
        (NotImplementedError, "are not part of a graph", ([x.to("meta")], 1 - rank, 0, group)),
    ]:
        with pytest.raises(error, match=text):
            OPS.pipeline_send(*call)
    with pytest.raises(ValueError, match=r"weft::pipeline_wait: got a tensor of shape \[2\] that is no token"):
        OPS.pipeline_wait(x)
    with pytest.raises(ValueError, match=r"weft::join: got a tensor of shape \[2\] among the tokens"):
        OPS.join(x, [x])
    with pytest.raises(Exception, match="messages between stages are not part of a graph"):
        torch.compile(lambda: OPS.pipeline_send([x], 1 - rank, 0, group), backend="eager", fullgraph=True)()
    token = OPS.pipeline_recv([x], 1 - rank, 0, group)
    sent = OPS.pipeline_send([x], 1 - rank, 0, group)
    OPS.pipeline_wait(token)
    OPS.pipeline_wait(sent)
    with pytest.raises(ValueError, match="for the second time"):
        OPS.pipeline_wait(token)


@on_ranks(2)
@pytest.mark.parametrize("backend", ["cpu:weft", "gloo"])
def test_second_backward_raises(rank: int, backend: str) -> None:
    group = dist.new_group(backend=backend).group_name
    x = torch.ones(3, requires_grad=True)
    if rank == 0:
        loss = OPS.join(torch.zeros(()), [OPS.pipeline_send([x], 1, 0, group)])
    else:
        loss = OPS.pipeline_wait(OPS.pipeline_recv([x], 0, 0, group))[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="got a second backward through message 0 on channel 0 from rank 0 to rank 1"):
        loss.backward()
    assert x.grad is None if rank else torch.equal(x.grad, torch.ones(3))


@on_ranks(2)
def test_wait_under_no_grad_raises(rank: int) -> None:
    group, x = dist.group.WORLD.group_name, torch.ones(3, requires_grad=True)
    if rank == 0:
        OPS.join(torch.zeros(()), [OPS.pipeline_send([x], 1, 0, group)]).backward()
        return
    token = OPS.pipeline_recv([x], 0, 0, group)
    with torch.no_grad(), pytest.raises(ValueError, match="whose tensors need gradients under"):
        OPS.pipeline_wait(token)
    OPS.pipeline_wait(token)[0].sum().backward()


class Echo(nn.Module):
    """Sends x twice and adds two received tensors; TorchScript must keep all of these calls, in order."""

    def __init__(self, peer: int, group_name: str) -> None:
        super().__init__()
        self.peer = peer
        self.group_name = group_name

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.weft.pipeline_send([x], self.peer, 3, self.group_name)
        torch.ops.weft.pipeline_send([x], self.peer, 3, self.group_name)
        first = torch.ops.weft.pipeline_recv([x], self.peer, 3, self.group_name)
        second = torch.ops.weft.pipeline_recv([x], self.peer, 3, self.group_name)
        return torch.ops.weft.pipeline_wait(first)[0] + torch.ops.weft.pipeline_wait(second)[0]


@on_ranks(2)
def test_script_keeps_messages_in_order(rank: int) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Echo(1 - rank, dist.group.WORLD.group_name)), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    for _ in range(4):
        assert torch.equal(loaded(torch.full((3,), rank + 1.0)), torch.full((3,), 2.0 * (2 - rank)))
