"""Checks one exchange on this rank: tensors arrive as sent, senders get the receivers' gradients, faults raise."""

from __future__ import annotations

import torch
from torch import Tensor

import weft
from ops.fuzz.draws import Draw, constant_along_first_dim, laid_out
from ops.fuzz.messages import DIFFERENTIABLE, Exchange, Message, Step, TensorSpec

OPS = weft.ops


def check_exchange(exchange: Exchange, rank: int, groups: dict[str, str], device: str = "cpu") -> str:
    """Return "agreed" or "raised"; raise AssertionError with the exchange in its text if a check fails."""
    rank -= exchange.first_rank
    try:
        if rank >= 0:
            with torch.device(device):
                if exchange.expected_errors:
                    _check_error(exchange, rank, groups)
                else:
                    _Rank(exchange, rank, groups[exchange.group]).run()
    except Exception as error:
        found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{found}\n{exchange}") from error
    return "raised" if exchange.expected_errors else "agreed"


class _Rank:
    """One rank's tensors and tokens of an exchange, by message."""

    def __init__(self, exchange: Exchange, rank: int, group: str) -> None:
        self._exchange, self._rank, self._group = exchange, rank, group
        self._leaves: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[Tensor]] = {}
        self._sends: dict[int, Tensor] = {}
        self._receives: dict[int, Tensor] = {}
        self._received: dict[int, list[Tensor]] = {}
        self._overwritten: set[int] = set()

    def run(self) -> None:
        if self._exchange.operator == "join":
            _check_join(self._exchange.joined)
        for step in self._exchange.steps:
            if step.rank == self._rank:
                getattr(self, f"_{step.kind}")(step)
        OPS.pipeline_flush(self._group)
        for number, tensors in self._sent.items():
            if number not in self._overwritten:
                for spec, tensor in zip(self._specs(number), tensors, strict=True):
                    assert _same_bits(tensor.detach(), _values(spec)), f"sent tensor of message {number} has changed"

    def _message(self, step: Step) -> tuple[int, Message]:
        (number,) = step.messages
        return number, self._exchange.messages[number]

    def _specs(self, number: int) -> tuple[TensorSpec, ...]:
        return self._exchange.messages[number].specs

    def _send(self, step: Step) -> None:
        number, message = self._message(step)
        leaves = [_leaf(spec, message) for spec in message.specs]
        pairs = zip(leaves, message.specs, strict=True)
        self._leaves[number], self._sent[number] = (
            leaves,
            [leaf if spec.is_leaf else leaf.clone() for leaf, spec in pairs],
        )
        with torch.set_grad_enabled(not message.is_constant):
            token = OPS.pipeline_send(self._sent[number], message.target, message.channel, self._group)
        assert list(token.shape) == [0] and token.requires_grad == message.has_backward
        self._sends[number] = token

    def _recv(self, step: Step) -> None:
        number, message = self._message(step)
        like = [_template(spec, message) for spec in message.specs]
        with torch.set_grad_enabled(not message.is_constant):
            self._receives[number] = OPS.pipeline_recv(like, message.source, message.channel, self._group)

    def _wait(self, step: Step) -> None:
        number, message = self._message(step)
        tensors = self._received[number] = OPS.pipeline_wait(self._receives[number])
        assert len(tensors) == len(message.specs)
        for spec, tensor in zip(message.specs, tensors, strict=True):
            assert tensor.requires_grad == spec.needs_grad and tensor.is_contiguous()
            assert _same_bits(tensor.detach(), _values(spec)), f"message {number}: {tensor}, expected {_values(spec)}"

    def _ack(self, step: Step) -> None:
        """Wait for the send, after which the sent tensors may be changed, and overwrite them."""
        number, _ = self._message(step)
        assert OPS.pipeline_wait(self._sends[number]) == []
        self._overwritten.add(number)
        for tensor in self._sent[number]:
            tensor.untyped_storage().fill_(0xFF)

    def _backward(self, step: Step) -> None:
        outputs, grads = [], []
        for number in step.messages:
            specs = self._specs(number)
            for spec, tensor, is_used in zip(specs, self._received[number], _used(specs), strict=True):
                if is_used:
                    outputs.append(tensor)
                    grads.append(laid_out(_gradient(spec), spec.layout))
        torch.autograd.backward(outputs, grads)

    def _gradients(self, step: Step) -> None:
        _join(self._exchange.joined, [self._sends[number] for number in step.messages])
        for number in step.messages:
            specs = self._specs(number)
            for spec, leaf, is_used in zip(specs, self._leaves[number], _used(specs), strict=True):
                if not spec.needs_grad:
                    assert leaf.grad is None
                    continue
                expected = _gradient(spec) if is_used else torch.zeros(spec.shape, dtype=spec.dtype)
                assert _same_bits(leaf.grad, expected), f"gradient of message {number}: {leaf.grad}, not {expected}"

    def _flush(self, step: Step) -> None:
        OPS.pipeline_flush(self._group)


def _used(specs: tuple[TensorSpec, ...]) -> list[bool]:
    """Return for each tensor whether the receiver's backward starts at it; it starts at one or more."""
    used = [spec.needs_grad and spec.is_used for spec in specs]
    if not any(used):
        used[[spec.needs_grad for spec in specs].index(True)] = True
    return used


def _values(spec: TensorSpec) -> Tensor:
    return _drawn(spec, spec.seed)


def _gradient(spec: TensorSpec) -> Tensor:
    return _drawn(spec, spec.seed + 1)


def _drawn(spec: TensorSpec, seed: int) -> Tensor:
    values = Draw(seed).values(spec.shape, spec.dtype).to(torch.get_default_device())
    return constant_along_first_dim(values) if spec.layout == "expanded" else values


def _leaf(spec: TensorSpec, message: Message) -> Tensor:
    return laid_out(_values(spec), spec.layout).requires_grad_(_requires_grad(spec, message))


def _requires_grad(spec: TensorSpec, message: Message) -> bool:
    return spec.needs_grad or (message.is_constant and spec.dtype in DIFFERENTIABLE)


def _template(spec: TensorSpec, message: Message) -> Tensor:
    requires_grad = _requires_grad(spec, message)
    if spec.template == "expanded":
        return torch.empty((), dtype=spec.dtype, requires_grad=requires_grad).expand(spec.shape)
    if spec.template == "transposed":
        reversed_dims = torch.empty(spec.shape[::-1], dtype=spec.dtype, requires_grad=requires_grad)
        return reversed_dims.permute(tuple(range(reversed_dims.dim()))[::-1])
    return torch.empty(spec.shape, dtype=spec.dtype, requires_grad=requires_grad)


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _join(spec: TensorSpec, tokens: list[Tensor]) -> None:
    """Join the tokens to a tensor and run a backward, which receives the sends' gradients."""
    x = laid_out(_values(spec), spec.layout)
    if x.dtype not in DIFFERENTIABLE:
        x = x.float()
    x.requires_grad_(spec.needs_grad)
    y, grad = OPS.join(x, tokens), _gradient(spec).to(x.dtype)
    assert _same_bits(y.detach(), x.detach()), f"joined: {y}, expected {x}"
    y.backward(grad)
    assert (x.grad is None) != spec.needs_grad
    assert x.grad is None or _same_bits(x.grad, grad)


def _check_join(spec: TensorSpec) -> None:
    """Check `join` without messages: it accepts any dtype, and its result shares no memory with the input."""
    x = laid_out(_values(spec), spec.layout).requires_grad_(spec.needs_grad)
    y = OPS.join(x, [torch.empty(0)] * (spec.seed % 3))
    assert _same_bits(y.detach(), _values(spec)) and y.requires_grad == spec.needs_grad
    assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if spec.needs_grad:
        y.backward(_gradient(spec))
        assert _same_bits(x.grad, _gradient(spec))


def _check_error(exchange: Exchange, rank: int, groups: dict[str, str]) -> None:
    try:
        _call_with_invalid_arguments(exchange, rank, groups)
    except Exception as error:
        text = str(error)
        is_known = any(type(error) is each.error and each.text in text for each in exchange.expected_errors)
        assert is_known, f"{type(error).__name__}: {text}; expected one of {exchange.expected_errors}"
        is_sentence = text.startswith(f"weft::{exchange.operator}: got ") and text.endswith(".") and "\n" not in text
        assert is_sentence, f"not a sentence that begins with the operator's name and 'got': {text}"
        return
    raise AssertionError(f"the call succeeded; expected one of {exchange.expected_errors}")


def _call_with_invalid_arguments(exchange: Exchange, rank: int, groups: dict[str, str]) -> None:
    invalid_arguments, draw = exchange.invalid_arguments, Draw(exchange.invalid_arguments["seed"])
    name = invalid_arguments.get("group", exchange.group)
    group = groups.get(name, name)
    here = torch.get_default_device()
    tensors = [draw.values(draw.sizes(1, 4), draw.dtype()).to(here) for _ in range(draw.random.randint(1, 3))]
    if exchange.operator == "pipeline_flush":
        OPS.pipeline_flush(group)
    elif exchange.operator == "join":
        tokens = [torch.empty(0) for _ in range(3)]
        for position in draw.random.sample(range(3), invalid_arguments["tokens"]):
            tokens[position] = draw.values([size + 1 for size in draw.sizes(0, 3)], draw.dtype()).to(here)
        OPS.join(tensors[0], tokens)
    elif exchange.operator == "pipeline_wait":
        OPS.pipeline_wait(_invalid_token(invalid_arguments["token"], tensors[0], exchange, rank, group))
    else:
        peer = invalid_arguments.get("peer", (rank + 1) % exchange.num_ranks)
        if invalid_arguments.get("tensors") == "none":
            tensors = []
        elif "tensors" in invalid_arguments:
            position = draw.random.randrange(len(tensors))
            tensors[position] = (
                tensors[position].to_sparse()
                if invalid_arguments["tensors"] == "sparse"
                else tensors[position].to("meta")
            )
        call = getattr(OPS, exchange.operator)
        call(tensors, rank if peer == "self" else peer, invalid_arguments.get("channel", 0), group)


def _invalid_token(kind: str, tensor: Tensor, exchange: Exchange, rank: int, group: str) -> Tensor:
    if kind == "empty":
        return torch.empty(0)
    if kind == "expanded":
        return torch.empty(()).expand(2, 3)
    if kind == "meta":
        return tensor.to("meta")
    if kind == "second":
        token = OPS.pipeline_recv([tensor], (rank - 1) % exchange.num_ranks, 3, group)
        OPS.pipeline_send([tensor], (rank + 1) % exchange.num_ranks, 3, group)
        assert _same_bits(OPS.pipeline_wait(token)[0], tensor)
        return token
    return tensor
