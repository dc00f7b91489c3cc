"""Random messages between the ranks of a pipeline, for pipeline_send, pipeline_recv, pipeline_wait, join and
pipeline_flush.

Every rank draws the same exchange: its messages, and one order of all ranks' steps in which no step waits for a later
one. Each rank runs its own steps in that order, so no rank can hang. Some exchanges are a single invalid call of
their operator instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ops.fuzz.draws import Draw
from ops.fuzz.rules import ExpectedError

NAMES = ("pipeline_send", "pipeline_recv", "pipeline_wait", "join", "pipeline_flush")
UNKNOWN_GROUP = "nowhere"  # not the name of a group
MAX_CHANNEL = 1022
DIFFERENTIABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
OTHERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# Memory layouts of the receiver's templates.
TEMPLATES = ("expanded", "full", "transposed")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    is_leaf: bool  # on the sender; otherwise it is computed from a leaf
    layout: str
    template: str
    is_used: bool  # whether the receiver's backward starts at it
    seed: int  # of its values and its gradient

    def __str__(self) -> str:
        gradient = "requires_grad" if self.needs_grad else "no gradient"
        facts = f"{self.layout}, {'leaf' if self.is_leaf else 'no leaf'}, template {self.template}"
        return f"{list(self.shape)} {self.dtype}, {gradient}, {facts}{'' if self.is_used else ', not used'}"


@dataclass(frozen=True)
class Message:
    source: int
    target: int
    channel: int
    specs: tuple[TensorSpec, ...]
    is_constant: bool  # sent and received under no_grad, even if tensors require gradients

    @property
    def has_backward(self) -> bool:
        return any(spec.needs_grad for spec in self.specs)

    @property
    def stream(self) -> tuple[int, int, int]:
        return self.source, self.target, self.channel


@dataclass(frozen=True)
class Step:
    """One rank's step: send, recv, wait, ack, backward (of received tensors), gradients (of sent tensors), or flush.

    One backward or gradients step may cover several messages of a rank.
    """

    kind: str
    rank: int
    messages: tuple[int, ...]


@dataclass
class Exchange:
    operator: str
    seed: int
    world_size: int
    group: str
    first_rank: int  # the global rank of the group's rank 0
    num_ranks: int
    is_on_gloo: bool = False
    messages: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    joined: TensorSpec | None = None  # the tensor that tokens are joined to
    # The invalid call: its arguments without tensors, and the errors that it may raise.
    invalid_arguments: dict[str, object] = field(default_factory=dict)
    expected_errors: list[ExpectedError] = field(default_factory=list)

    def __str__(self) -> str:
        where = f"group {self.group!r} of {self.num_ranks} ranks from global rank {self.first_rank} on"
        lines = [f"weft::{self.operator}, {where}"]
        for number, message in enumerate(self.messages):
            lines.append(f"  {number}: {message.source} -> {message.target} on channel {message.channel}")
            lines += [f"    {spec}" for spec in message.specs]
        lines += [f"  rank {step.rank}: {step.kind} {list(step.messages)}" for step in self.steps]
        lines += [f"  {name}: {value!r}" for name, value in self.invalid_arguments.items()]
        script = f"--operator {self.operator} --ranks {self.world_size} --seed {self.seed} --count 1"
        return "\n".join([*lines, f"  rerun: PYTHONPATH=tests python tests/soak/operators.py {script}"])


def draw_exchange(operator: str, seed: int, world_size: int, only_gloo: bool = False) -> Exchange:
    """Return the exchange of `seed`, the same on every rank; about a third of the exchanges are invalid calls.

    With `only_gloo`, every group may be a gloo group.
    """
    draw = Draw(seed * len(NAMES) + NAMES.index(operator))
    group = draw.random.choices(("world", "second", "gloo", "last two"), (50, 15, 20, 15))[0]
    first_rank = world_size - 2 if group == "last two" else 0
    exchange = Exchange(operator, seed, world_size, group, first_rank, world_size - first_rank)
    exchange.is_on_gloo = only_gloo or group == "gloo"
    if draw.chance(0.3):
        _draw_invalid_call(exchange, draw)
        return exchange
    exchange.joined = _draw_spec(draw, requires_grad=True)
    for _ in range(draw.random.randint(1, 5)):
        source, target = draw.random.sample(range(exchange.num_ranks), 2)
        exchange.messages.append(_draw_message(draw, source, target))
    exchange.steps = list(_draw_steps(exchange, draw))
    return exchange


def _draw_message(draw: Draw, source: int, target: int) -> Message:
    requires_grad = draw.chance(0.6)
    specs = tuple(_draw_spec(draw, requires_grad) for _ in range(draw.random.randint(1, 4)))
    channel = draw.random.choice((0, 0, 1, 7, MAX_CHANNEL))
    return Message(source, target, channel, specs, is_constant=not requires_grad and draw.chance(0.5))


def _draw_spec(draw: Draw, requires_grad: bool) -> TensorSpec:
    dtype = draw.random.choice(DIFFERENTIABLE if draw.chance(0.6) else OTHERS)
    return TensorSpec(
        shape=(draw.size(), 40_000) if draw.chance(0.02) else draw.sizes(0, 6),
        dtype=dtype,
        needs_grad=requires_grad and dtype in DIFFERENTIABLE and draw.chance(0.7),
        is_leaf=draw.chance(0.7),
        layout=draw.layout(),
        template=draw.random.choice(TEMPLATES),
        is_used=draw.chance(0.8),
        seed=draw.random.getrandbits(60),
    )


def _draw_steps(exchange: Exchange, draw: Draw) -> Iterator[Step]:
    """Yield all steps in a random order in which each step waits only for earlier steps."""
    done: set[tuple[str, int]] = set()
    ack_probability = 0.9 if exchange.operator == "pipeline_wait" else 0.4
    remaining = []
    for number, message in enumerate(exchange.messages):
        kinds = ["send", "recv", "wait", *(["backward", "gradients"] if message.has_backward else [])]
        remaining += [(kind, number) for kind in (*kinds, *(["ack"] if draw.chance(ack_probability) else []))]
    max_flushes = 3 if exchange.operator == "pipeline_flush" else 1
    num_flushes = draw.random.randint(max_flushes // 3, max_flushes)
    flushes = [draw.random.randrange(exchange.num_ranks) for _ in range(num_flushes)]
    while remaining or flushes:
        ready = [each for each in remaining if _may_follow(exchange, *each, done)]
        can_flush = [rank for rank in flushes if _may_flush(exchange, rank, done)]
        if can_flush and (not ready or draw.chance(0.15)):
            rank = draw.random.choice(can_flush)
            flushes.remove(rank)
            yield Step("flush", rank, ())
            continue
        kind, number = draw.random.choice(ready)
        rank = _rank_of(exchange.messages[number], kind)
        numbers = [number]
        if kind in ("backward", "gradients") and draw.chance(0.4):
            others = [other for other_kind, other in ready if other_kind == kind and other != number]
            numbers += [other for other in others if _rank_of(exchange.messages[other], kind) == rank]
            draw.random.shuffle(numbers)
        for each in numbers:
            remaining.remove((kind, each))
            done.add((kind, each))
        yield Step(kind, rank, tuple(numbers))


def _rank_of(message: Message, kind: str) -> int:
    return message.source if kind in ("send", "ack", "gradients") else message.target


def _may_follow(exchange: Exchange, kind: str, number: int, done: set[tuple[str, int]]) -> bool:
    message = exchange.messages[number]
    if kind in ("send", "recv"):  # the n-th send on a channel matches the n-th receive on it
        earlier = range(number)
        return all((kind, each) in done for each in earlier if exchange.messages[each].stream == message.stream)
    if kind == "wait":
        return {("send", number), ("recv", number)} <= done
    if kind == "ack":
        # Without gradients, a send waits for the receiver's confirmation; on gloo, the receiver receives in its wait.
        needed = "recv" if message.has_backward and not exchange.is_on_gloo else "wait"
        return {("send", number), (needed, number)} <= done
    return ("wait" if kind == "backward" else "backward", number) in done


def _may_flush(exchange: Exchange, rank: int, done: set[tuple[str, int]]) -> bool:
    """Return whether receivers wait for all messages and gradients that the rank has sent, so a flush returns."""
    for number, message in enumerate(exchange.messages):
        if message.source == rank and ("send", number) in done and ("wait", number) not in done:
            return False
        if message.target == rank and ("backward", number) in done and ("gradients", number) not in done:
            return False
    return True


def _draw_invalid_call(exchange: Exchange, draw: Draw) -> None:
    """Draw one or two invalid arguments."""
    choose = draw.random.choice
    if exchange.operator in ("pipeline_send", "pipeline_recv"):
        faults = {
            "tensors": [
                ("none", ValueError, "got no tensors"),
                ("sparse", ValueError, "got a tensor of layout Sparse"),
            ],
            "peer": [(peer, ValueError, "got peer ") for peer in ("self", -1, exchange.num_ranks, 2**40, -(2**63))],
            "channel": [(number, ValueError, "got channel ") for number in (-1, MAX_CHANNEL + 1, 2**32, 2**62)],
            "group": [(name, ValueError, "got a group of one rank") for name in ("", "alone")],
        }
        faults["tensors"].append(("meta", NotImplementedError, "got a tensor that torch.compile, "))
        faults["group"].append((UNKNOWN_GROUP, ValueError, f"got group_name '{UNKNOWN_GROUP}'"))
    elif exchange.operator == "pipeline_wait":
        faults = {
            "token": [(kind, ValueError, "that is no token") for kind in ("dense", "empty", "expanded", "meta")]
            + [("second", ValueError, "for the second time")]
        }
    elif exchange.operator == "join":
        faults = {"tokens": [(count, ValueError, "among the tokens") for count in (1, 2, 3)]}
    else:
        name = "".join(draw.random.choices("abcxyz /'-", k=draw.random.randint(1, 9)))
        faults = {"group": [(name, ValueError, f"got group_name '{name}'")]}
    for name in draw.random.sample(sorted(faults), min(len(faults), draw.random.randint(1, 2))):
        exchange.invalid_arguments[name], error, text = choose(faults[name])
        exchange.expected_errors.append(ExpectedError(error, text))
    exchange.invalid_arguments["seed"] = draw.random.getrandbits(60)
