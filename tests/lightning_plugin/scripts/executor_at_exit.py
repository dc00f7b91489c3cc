"""A thread that uses an executor after the main thread has ended, which the argument "fail" ends by an error."""

from __future__ import annotations

import concurrent.futures
import sys
import threading
import time

from weft._plugin.process_guard import guard


def save() -> None:
    time.sleep(0.3)
    print(concurrent.futures.ThreadPoolExecutor(1).submit(str, 7).result(), flush=True)


if __name__ == "__main__":
    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    for _ in range(2):  # the second call changes nothing
        guard().before_executors_end(thread.join)
    if sys.argv[1] == "fail":
        raise ValueError("no wait")
