"""Lightning's own launcher, with checks before it starts processes and a guard that watches them afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from weft._plugin.error_reports import ErrorReports
from weft._plugin.process_guard import ERROR_REPORTS_VARIABLE, LAUNCHER_PID_VARIABLE, guard


class GuardedLauncherMixin:
    """A mixin in front of a subprocess launcher of Lightning or Fabric.

    `check_before_launch` is called without arguments when the launcher is about to start processes; if it raises,
    none are started.
    """

    check_before_launch: Callable[[], None]

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the host's other ranks, if this launcher starts any; return the result of `function` here."""
        self.check_before_launch()
        # Children that read this variable end with their parent: the kernel signals them when the *thread* that started
        # them ends. Only the main thread lives as long as the process.
        if threading.current_thread() is threading.main_thread():
            os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
        reports = ErrorReports.create()
        if reports is not None:
            os.environ[ERROR_REPORTS_VARIABLE] = reports.path

        def launched(*args: Any, **kwargs: Any) -> Any:
            _remove_variables()
            guard().print_errors_once(reports)
            guard().watch_children(self.procs)  # type: ignore[attr-defined]
            return function(*args, **kwargs)

        try:
            return super().launch(launched, *args, **kwargs)  # type: ignore[misc]
        finally:
            _remove_variables()


def _remove_variables() -> None:
    """Remove the environment variables for the launcher's children, so that other processes do not read them."""
    for variable in (LAUNCHER_PID_VARIABLE, ERROR_REPORTS_VARIABLE):
        os.environ.pop(variable, None)


def guarded(launcher: Any, check_before_launch: Callable[[], None]) -> Any:
    """Return a copy of `launcher` with GuardedLauncherMixin, or `launcher` itself if it has the mixin already.

    Launchers' classes are not public names of Lightning, so `type(launcher)` is used.
    """
    if isinstance(launcher, GuardedLauncherMixin):
        return launcher
    stock = type(launcher)
    made = type(f"Guarded{stock.__name__.lstrip('_')}", (GuardedLauncherMixin, stock), {})(
        launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
    )
    made.check_before_launch = check_before_launch
    return made
