"""The option `affinity`: each rank of a host runs on its share of the processors during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.strategy.affinity import Processors, run_on, spread_ranks

if TYPE_CHECKING:
    from weft._plugin.engine import Engine


class RankPlacement:
    """Spreads the ranks when a run begins, and lets them run where they could before when it ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before: Processors | None = None

    def begin(self) -> None:
        """Spread the ranks if the option says so, and a run that an error has ended has not done it; collective."""
        if self._engine.options.affinity is None or self._before is not None:
            return
        self._before = spread_ranks()
        if self._before is None and self._engine.strategy.num_processes > 1:
            self._engine.console.log(
                "weft: affinity='auto' leaves the ranks where they are: each is the only one of its host, or they may "
                "use different processors already."
            )

    def end(self) -> None:
        """Undo `begin`."""
        if self._before is not None:
            run_on(self._before)
            self._before = None
