"""Reports to the other ranks of a pipeline why a rank left a step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch.distributed as dist

from weft.strategy.agreement import start_name

_pipeline_numbers = itertools.count()  # counts this process's pipelines


class Failures:
    """The first failure of a step, published in the job's store.

    A layer runs only on the rank of its stage, and code after the model's call only on the rank of the last stage, so
    an error in either is raised on one rank. The other ranks find that this rank's process has ended, and read the
    reason here. This requires that every rank creates its pipelines in the same order and runs the same steps;
    otherwise a rank finds no reason or that of a different step.
    """

    def __init__(self) -> None:
        self._number = next(_pipeline_numbers)
        self._step = 0
        self._is_reporting = False

    @contextlib.contextmanager
    def report_failures(self) -> Iterator[None]:
        """Enclose a step: publish its error to the other ranks; add another rank's published error to a DistError."""
        if self._is_reporting:  # a caller is publishing already
            yield
            return
        self._is_reporting = True
        self._step += 1
        try:
            yield
        except dist.DistError as error:
            cause = self._published_failure()
            if cause is None:
                raise
            raise type(error)(f"{cause}; rank {dist.get_rank()}, which waited for it, raised: {error}") from None
        except Exception as error:
            self._publish(error)
            raise
        finally:
            self._is_reporting = False

    @property
    def _key(self) -> str:
        return f"weft/pipeline/{start_name()}/{self._number}/{self._step}"

    def _publish(self, error: Exception) -> None:
        text = f"rank {dist.get_rank()} left the pipeline's step: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):  # the store may have ended with its process
            assert dist.group.WORLD is not None
            dist.group.WORLD.get_group_store().compare_set(self._key, "", text)

    def _published_failure(self) -> str | None:
        with contextlib.suppress(Exception):
            assert dist.group.WORLD is not None
            store = dist.group.WORLD.get_group_store()
            if store.check([self._key]):
                return store.get(self._key).decode()
        return None
