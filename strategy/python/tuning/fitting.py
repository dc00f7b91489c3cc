"""Finds the fastest variant of a layout that fits into the memory of a device."""

from __future__ import annotations

import dataclasses

from weft.strategy.tuning.module_choices import Choices
from weft.strategy.tuning.trials import Trial, Trials, Variant


class FittingVariants:
    """Finds variants for `limit` bytes of a device; `global_rows`: see `Choices.batch_counts`.

    Assumes that checkpoints take no less time, so that for each number of batches, the first kind that fits is the
    fastest; and, without a pipeline, that more batches take no less time, either. More batches also take less memory,
    except that the second one adds sums of gradients. So none fits if, with the last kind of checkpointing, neither the
    fewest batches nor the most that are possible do.
    """

    def __init__(self, trials: Trials, choices: Choices, global_rows: int | None, limit: int) -> None:
        self._trials = trials
        self._choices = choices
        self._global_rows = global_rows
        self._limit = limit

    def fastest(self, base: Variant) -> Trial | None:
        """Return the fastest variant of a layout that fits; None: none does."""
        found = (self._fastest(variant) for variant in self._choices.variants_of(base))
        return min((trial for trial in found if trial is not None), key=_seconds, default=None)

    def _fastest(self, variant: Variant) -> Trial | None:
        """Return the fastest of all numbers of batches and kinds of checkpointing that fits."""
        counts, kinds = self._choices.batch_counts(variant, self._global_rows), self._choices.checkpointing
        most = (self._trial(variant, number, kinds[-1]) for number in counts[:0:-1])
        ends = [self._trial(variant, counts[0], kinds[-1]), next((trial for trial in most if trial is not None), None)]
        fitting = min((each for each in ends if each is not None and self._fits(each)), key=_seconds, default=None)
        if fitting is None:
            return None
        # Each inner list is in the order of the times.
        if variant.has_stages:
            lists = [[(number, kind) for kind in kinds] for number in counts]
        else:
            lists = [[(number, kind) for number in counts] for kind in kinds]
        for pairs in lists:
            for number, kind in pairs:
                trial = self._trial(variant, number, kind)
                if trial is None:
                    continue
                if trial.seconds >= fitting.seconds:
                    break
                if self._fits(trial):
                    fitting = trial
                    break
        return fitting

    def _trial(self, variant: Variant, num_batches: int, checkpointing: str) -> Trial | None:
        with_batches = variant.with_batches(num_batches)
        return self._trials.try_to_run(dataclasses.replace(with_batches, activation_checkpointing=checkpointing))

    def _fits(self, trial: Trial) -> bool:
        return trial.peak_bytes <= self._limit


def _seconds(trial: Trial) -> float:
    return trial.seconds
