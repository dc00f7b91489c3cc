"""Checks one exchange on this rank: tensors arrive as sent, gradients are the receiver's, invalid calls raise."""

from __future__ import annotations

import torch
from torch import Tensor

import weft
from ops.fuzz.draws import Draw, constant_along_first_dim, laid_out
from ops.fuzz.messages import LEARNING, Exchange, Message, Part, Step

OPS = weft.ops


def check_exchange(exchange: Exchange, rank: int, groups: dict[str, str], device: str = "cpu") -> str:
    """Return "agreed" or "refused"; raise AssertionError with the exchange in its text."""
    rank -= exchange.first_rank
    try:
        if rank >= 0:
            with torch.device(device):
                if exchange.refusals:
                    _check_refusal(exchange, rank, groups)
                else:
                    _Rank(exchange, rank, groups[exchange.group]).run()
    except Exception as error:
        found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise AssertionError(f"{found}\n{exchange}") from error
    return "refused" if exchange.refusals else "agreed"


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
                for part, tensor in zip(self._parts(number), tensors, strict=True):
                    assert _same_bits(tensor.detach(), _values(part)), f"what message {number} sent has changed"

    def _message(self, step: Step) -> tuple[int, Message]:
        (number,) = step.messages
        return number, self._exchange.messages[number]

    def _parts(self, number: int) -> tuple[Part, ...]:
        return self._exchange.messages[number].parts

    def _send(self, step: Step) -> None:
        number, message = self._message(step)
        leaves = [_leaf(part, message) for part in message.parts]
        pairs = zip(leaves, message.parts, strict=True)
        self._leaves[number], self._sent[number] = (
            leaves,
            [leaf if one.is_leaf else leaf.clone() for leaf, one in pairs],
        )
        with torch.set_grad_enabled(not message.is_constant):
            token = OPS.pipeline_send(self._sent[number], message.target, message.channel, self._group)
        assert list(token.shape) == [0] and token.requires_grad == message.has_backward
        self._sends[number] = token

    def _recv(self, step: Step) -> None:
        number, message = self._message(step)
        like = [_template(part, message) for part in message.parts]
        with torch.set_grad_enabled(not message.is_constant):
            self._receives[number] = OPS.pipeline_recv(like, message.source, message.channel, self._group)

    def _wait(self, step: Step) -> None:
        number, message = self._message(step)
        tensors = self._received[number] = OPS.pipeline_wait(self._receives[number])
        assert len(tensors) == len(message.parts)
        for part, tensor in zip(message.parts, tensors, strict=True):
            assert tensor.requires_grad == part.needs_grad and tensor.is_contiguous()
            assert _same_bits(tensor.detach(), _values(part)), f"message {number}: {tensor}, expected {_values(part)}"

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
            parts = self._parts(number)
            for part, tensor, is_used in zip(parts, self._received[number], _used(parts), strict=True):
                if is_used:
                    outputs.append(tensor)
                    grads.append(laid_out(_gradient(part), part.layout))
        torch.autograd.backward(outputs, grads)

    def _gradients(self, step: Step) -> None:
        _join(self._exchange.joined, [self._sends[number] for number in step.messages])
        for number in step.messages:
            parts = self._parts(number)
            for part, leaf, is_used in zip(parts, self._leaves[number], _used(parts), strict=True):
                if not part.needs_grad:
                    assert leaf.grad is None
                    continue
                expected = _gradient(part) if is_used else torch.zeros(part.shape, dtype=part.dtype)
                assert _same_bits(leaf.grad, expected), f"gradient of message {number}: {leaf.grad}, not {expected}"

    def _flush(self, step: Step) -> None:
        OPS.pipeline_flush(self._group)


def _used(parts: tuple[Part, ...]) -> list[bool]:
    """Return at which tensors the receiver's backward starts: one at least."""
    used = [part.needs_grad and part.is_used for part in parts]
    if not any(used):
        used[[part.needs_grad for part in parts].index(True)] = True
    return used


def _values(part: Part) -> Tensor:
    return _drawn(part, part.seed)


def _gradient(part: Part) -> Tensor:
    return _drawn(part, part.seed + 1)


def _drawn(part: Part, seed: int) -> Tensor:
    values = Draw(seed).values(part.shape, part.dtype).to(torch.get_default_device())
    return constant_along_first_dim(values) if part.layout == "expanded" else values


def _leaf(part: Part, message: Message) -> Tensor:
    return laid_out(_values(part), part.layout).requires_grad_(_requires_grad(part, message))


def _requires_grad(part: Part, message: Message) -> bool:
    return part.needs_grad or (message.is_constant and part.dtype in LEARNING)


def _template(part: Part, message: Message) -> Tensor:
    requires_grad = _requires_grad(part, message)
    if part.template == "expanded":
        return torch.empty((), dtype=part.dtype, requires_grad=requires_grad).expand(part.shape)
    if part.template == "transposed":
        turned = torch.empty(part.shape[::-1], dtype=part.dtype, requires_grad=requires_grad)
        return turned.permute(tuple(range(turned.dim()))[::-1])
    return torch.empty(part.shape, dtype=part.dtype, requires_grad=requires_grad)


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    return torch.equal(_bytes(actual), _bytes(expected))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _join(part: Part, tokens: list[Tensor]) -> None:
    """Join the tokens to a tensor and run a backward, which reaches them."""
    x = laid_out(_values(part), part.layout)
    if x.dtype not in LEARNING:
        x = x.float()
    x.requires_grad_(part.needs_grad)
    y, grad = OPS.join(x, tokens), _gradient(part).to(x.dtype)
    assert _same_bits(y.detach(), x.detach()), f"joined: {y}, expected {x}"
    y.backward(grad)
    assert (x.grad is None) != part.needs_grad
    assert x.grad is None or _same_bits(x.grad, grad)


def _check_join(part: Part) -> None:
    """Check `join` without messages: any dtype, and a result in memory of its own."""
    x = laid_out(_values(part), part.layout).requires_grad_(part.needs_grad)
    y = OPS.join(x, [torch.empty(0)] * (part.seed % 3))
    assert _same_bits(y.detach(), _values(part)) and y.requires_grad == part.needs_grad
    assert x.numel() == 0 or y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if part.needs_grad:
        y.backward(_gradient(part))
        assert _same_bits(x.grad, _gradient(part))


def _check_refusal(exchange: Exchange, rank: int, groups: dict[str, str]) -> None:
    try:
        _call_wrongly(exchange, rank, groups)
    except Exception as error:
        text = str(error)
        is_known = any(type(error) is each.error and each.text in text for each in exchange.refusals)
        assert is_known, f"{type(error).__name__}: {text}; documented is one of {exchange.refusals}"
        is_sentence = text.startswith(f"weft::{exchange.operator}: got ") and text.endswith(".") and "\n" not in text
        assert is_sentence, f"not a sentence of weft's: {text}"
        return
    raise AssertionError(f"accepted; documented is one of {exchange.refusals}")


def _call_wrongly(exchange: Exchange, rank: int, groups: dict[str, str]) -> None:
    wrong, draw = exchange.wrong, Draw(exchange.wrong["seed"])
    name = wrong.get("group", exchange.group)
    group = groups.get(name, name)
    here = torch.get_default_device()
    tensors = [draw.values(draw.sizes(1, 4), draw.dtype()).to(here) for _ in range(draw.random.randint(1, 3))]
    if exchange.operator == "pipeline_flush":
        OPS.pipeline_flush(group)
    elif exchange.operator == "join":
        tokens = [torch.empty(0) for _ in range(3)]
        for place in draw.random.sample(range(3), wrong["tokens"]):
            tokens[place] = draw.values([size + 1 for size in draw.sizes(0, 3)], draw.dtype()).to(here)
        OPS.join(tensors[0], tokens)
    elif exchange.operator == "pipeline_wait":
        OPS.pipeline_wait(_no_token(wrong["token"], tensors[0], exchange, rank, group))
    else:
        peer = wrong.get("peer", (rank + 1) % exchange.num_ranks)
        if wrong.get("tensors") == "none":
            tensors = []
        elif "tensors" in wrong:
            place = draw.random.randrange(len(tensors))
            tensors[place] = tensors[place].to_sparse() if wrong["tensors"] == "sparse" else tensors[place].to("meta")
        call = getattr(OPS, exchange.operator)
        call(tensors, rank if peer == "self" else peer, wrong.get("channel", 0), group)


def _no_token(kind: str, tensor: Tensor, exchange: Exchange, rank: int, group: str) -> Tensor:
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
