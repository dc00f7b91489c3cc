"""The messages between stages that a dry run has sent, and that may not have arrived yet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# The parts of a tag, see ops/src/pipeline/wire.h.
_SEQUENCE_BITS, _CHANNEL_BITS = 18, 10
# Those of ring_attention (ops/src/ring_attention.cpp), which has sent its messages when it returns.
_RING_TAGS = (2**29 - 2, 2**29 - 1)


def channel_of(tag: int) -> int | None:
    """Return the channel of a message of a pipeline; None: of another message.

    Channel 2s has the inputs of stage s, and 2s + 1 their gradients.
    """
    return None if tag in _RING_TAGS else (tag >> _SEQUENCE_BITS) % (1 << _CHANNEL_BITS)


class SentMessages:
    """Keeps the tensors of each message until this rank sends the next one on its channel, or waits for all of them.

    In a training, a message is in flight until the peer has received it. When that happens depends on the speeds of the
    ranks. A rank that computes a value to send usually still holds the one before.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int], tuple[int, list[Tensor]]] = {}  # by channel: tag, tensors

    def add(self, group_name: str, peer: int, tag: int, tensors: Sequence[Tensor]) -> None:
        """Add tensors of a message; all tensors of a message have its tag."""
        if tag in _RING_TAGS:
            return
        key = (group_name, peer, tag >> _SEQUENCE_BITS)
        last_tag, kept = self._last.get(key, (None, []))
        self._last[key] = tag, [*(kept if tag == last_tag else ()), *tensors]

    def in_flight(self) -> list[Tensor]:
        """Return the tensors of the last message of each channel."""
        return [tensor for _, tensors in self._last.values() for tensor in tensors]

    def complete(self) -> None:
        """Release all messages."""
        self._last.clear()
