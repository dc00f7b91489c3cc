"""Why a rank of a pipeline left a step, told to those that wait for it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch.distributed as dist

_numbers = itertools.count()  # of this process's pipelines


class Failures:
    """What failed first in a step, in the job's store.

    The code after the model's call runs on the last stage alone, and so what it raises is raised there. The others find
    that its process has ended; why, they find here. Every rank makes its pipelines in the same order and takes the same
    steps; where that is not so, nothing is found.
    """

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._step = 0
        self._is_telling = False

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """What is raised inside, a step, is told to the others; a lost peer's error says what was told."""
        if self._is_telling:  # by who called this
            yield
            return
        self._is_telling = True
        self._step += 1
        try:
            yield
        except dist.DistError as error:
            cause = self._found()
            if cause is None:
                raise
            raise type(error)(f"{cause}; rank {dist.get_rank()}, which waited, had this: {error}") from None
        except Exception as error:
            self._tell(error)
            raise
        finally:
            self._is_telling = False

    @property
    def _key(self) -> str:
        return f"weft/pipeline/{self._number}/{self._step}"

    def _tell(self, error: Exception) -> None:
        text = f"rank {dist.get_rank()} left the pipeline's step: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may be gone with its process
            dist.group.WORLD.get_group_store().compare_set(self._key, "", text)

    def _found(self) -> str | None:
        with contextlib.suppress(Exception):
            store = dist.group.WORLD.get_group_store()
            if store.check([self._key]):
                return store.get(self._key).decode()
        return None
