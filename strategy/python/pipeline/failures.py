"""Why a rank of a pipeline left a step, told to those that wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

_counts: dict[str, int] = {}  # of the pipelines of a group, in this process


class Failures:
    """What failed first, in the store of a pipeline's group.

    The code after the model's call runs on the last stage alone, and so what it raises is raised there. The others find
    that its process has ended; why, they find here. Made on every rank of the group, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        number = _counts[group.group_name] = _counts.get(group.group_name, -1) + 1
        self._key = f"weft/pipeline/{group.group_name}/{number}"
        self._group = group
        self._is_telling = False

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """What is raised inside is told to the others; a lost peer's error says what the peer has told."""
        if self._is_telling:  # by who called this
            yield
            return
        self._is_telling = True
        try:
            yield
        except dist.DistError as error:
            cause = self._told_by_others()
            if cause is None:
                raise
            raise type(error)(f"{error} Before that {cause}") from error
        except Exception as error:
            self._tell(error)
            raise
        finally:
            self._is_telling = False

    def _tell(self, error: Exception) -> None:
        text = f"rank {dist.get_rank()} left the pipeline's step: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be gone with its process
            self._group.get_group_store().compare_set(self._key, "", text)

    def _told_by_others(self) -> str | None:
        with contextlib.suppress(Exception):
            store = self._group.get_group_store()
            if store.check([self._key]):
                return store.get(self._key).decode()
        return None
