"""Fresh process trees for tests: a time limit, captured output, and a check that no process survives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.warm_server import WarmProcess

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4
TREE_VARIABLE = "WEFT_TEST_TREE"
_POLL_SECONDS = 0.02
WITHOUT_OPTIONAL = Path(__file__).with_name("without_optional")

# Execs the command after the prctl of `die_with_parent`. (A preexec_fn would run Python between fork and exec of a
# process that has threads.) Restores SIGINT's default action: a shell starts background jobs with SIGINT ignored,
# which children inherit, but a tree must handle signals as if it were started at a terminal.
_LAUNCHER = f"""
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""

# A Trainer that a test runs in the pytest process leaves these; its port may still be in use.
RENDEZVOUS_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"})
# Process group id -> the token that every descendant has in its environment. The token identifies descendants that have
# started a session of their own, which the process group id alone would miss.
_tokens: dict[int, str] = {}


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends; `parent_pid` is that thread's process."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the prctl took effect
        os._exit(1)


@dataclass(frozen=True)
class ProcessResult:
    """The result of a tree: the root's exit status (negative: a signal), the tree's output, its duration."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    pgid: int


class ProcessTree:
    """A command running in a process group of its own. Use as a context manager: its exit kills the tree.

    Output goes to files, not pipes: a grandchild that outlives the root cannot block the reader.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        has_optional_packages: bool = False,
        warm_processes: int = 0,
    ) -> None:
        """
        Args:
            has_optional_packages: whether the tree can import the packages that `without_optional` hides, with which
                its processes start more slowly.
            warm_processes: if positive, the command is a Python program, and it and the first programs that it starts,
                this many in all, are forks of a process that has imported torch and Lightning: see `warm_programs`.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="weft-tree-")
        self._out_path = Path(self._folder.name, "stdout")
        self._err_path = Path(self._folder.name, "stderr")
        token = uuid.uuid4().hex
        inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS_VARIABLES}
        environment = {**inherited, **(env or {}), TREE_VARIABLE: token}
        if not has_optional_packages:
            search_path = [str(WITHOUT_OPTIONAL), *filter(None, [environment.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(search_path)
        self._start = time.monotonic()
        self._process: subprocess.Popen[bytes] | WarmProcess
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            if warm_processes:
                from support.warm_server import SERVERS

                folder, text = os.fspath(cwd or os.getcwd()), list(map(str, command))
                self._process = SERVERS[has_optional_packages].start(
                    text, environment, folder, warm_processes - 1, (out, err)
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *map(str, command)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    cwd=cwd,
                    env=environment,
                    start_new_session=True,
                )
        self._command = " ".join(map(str, command))
        self.pgid = self._process.pid
        _tokens[self.pgid] = token

    def __enter__(self) -> ProcessTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()
        _tokens.pop(self.pgid, None)

    @property
    def stdout(self) -> str:
        """The tree's output on stdout so far."""
        return self._out_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The tree's output on stderr so far."""
        return self._err_path.read_text(errors="replace")

    def send_signal(self, signum: int, *, to_group: bool = False) -> None:
        """Signal only the root or, like Ctrl-C in a terminal, the entire process group."""
        if to_group:
            os.killpg(self.pgid, signum)
        else:
            self._process.send_signal(signum)

    def wait_for_text(self, text: str, timeout: float = 60.0) -> str:
        """Return the tree's stdout as soon as it contains `text`; otherwise raise TimeoutError."""
        timeout = on_busy_machine(timeout)
        deadline = time.monotonic() + timeout
        while text not in (stdout := self.stdout):
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"ended with status {self._process.returncode}" if ended else f"ran {timeout:g} s"
                raise TimeoutError(f"the process {why} without printing {text!r}\n{self._output()}")
            time.sleep(_POLL_SECONDS)
        return stdout

    def wait(self, timeout: float = 60.0) -> ProcessResult:
        """Wait for the root to end and return its result. Descendants may still run: see `processes_left`.

        On a time-out it kills the tree and raises TimeoutError with the output so far.
        """
        timeout = on_busy_machine(timeout)
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"{self._command!r} ran longer than {timeout:g} s\n{self._output()}") from None
        seconds = time.monotonic() - self._start
        return ProcessResult(returncode, self.stdout, self.stderr, seconds, self.pgid)

    def kill(self) -> None:
        """Kill all remaining processes of the tree, and reap the root."""
        limit = on_busy_machine(10.0)
        deadline = time.monotonic() + limit
        while left := processes_left(self.pgid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes survived SIGKILL for {limit:g} s: {left}")
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended between the listing and the signal
            time.sleep(_POLL_SECONDS)
        self._process.wait(limit)

    def _output(self) -> str:
        return f"--- stdout ---\n{self.stdout}\n--- stderr ---\n{self.stderr}"


def on_busy_machine(seconds: float) -> float:
    """Return a limit of 10 s or more, times the number of runnable processes per core if that is larger than one.

    Such a limit detects processes that hang, and tests in parallel run for longer. Shorter limits stay: tests that are
    about limits let them pass.
    """
    return seconds if seconds < 10.0 else seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run_process(
    command: Sequence[str | Path],
    *,
    timeout: float = 60.0,
    **options: object,
) -> ProcessResult:
    """Run `command` in a fresh process tree. Processes that outlive the root are killed and raise AssertionError.

    `options`: those of `ProcessTree`.
    """
    with ProcessTree(command, **options) as tree:  # type: ignore[arg-type]
        result = tree.wait(timeout)
        assert_nothing_left(tree.pgid)
        return result


def run_script(script: str | Path, *arguments: str, **options: object) -> ProcessResult:
    """`run_process` for Python: a Path is a script file, a str is source text as after `python -c`."""
    source = [str(script)] if isinstance(script, Path) else ["-c", script]
    return run_process([sys.executable, *source, *arguments], **options)  # type: ignore[arg-type]


def assert_nothing_left(pgid: int, *, within: float = 2.0) -> None:
    """Assert that the tree of `pgid` is gone within `within` seconds."""
    deadline = time.monotonic() + within
    while left := processes_left(pgid):
        assert time.monotonic() < deadline, f"processes still running after {within:g} s: {left}"
        time.sleep(_POLL_SECONDS)


def processes_left(pgid: int) -> dict[int, str]:
    """Return {pid: command line} of the running processes of process group or session `pgid`, and of its tree.

    Zombies do not count: they hold no resources, and the process that adopted them may never reap them. Exiting
    processes do not count either: they have lost their environment, so the result would depend on timing.
    """
    token = _tokens.get(pgid)
    marker = f"{TREE_VARIABLE}={token}".encode() if token else None
    left = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if not is_running(int(entry.name)):
                continue
            group, session = _stat(int(entry.name))[2:4]
            member = pgid in (int(group), int(session))
            if not member and marker is not None:
                member = marker in (entry / "environ").read_bytes().split(b"\0")
            if member:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                left[int(entry.name)] = command.strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or belongs to another user
    return left


def error_in_fork(body: Callable[[], object]) -> str:
    """Run `body` in a forked child; return its exception as "Class: text", or "" if it raises none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body()
            text = ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return text if status == 0 else f"the child ended with status {status}: {text}"


def run_on_forks(num_ranks: int, body: Callable[..., object], *args: object) -> list[int]:
    """Call `body(rank, *args)` on forks of this process, which are one process group and, if several, one gloo group.

    It is for ranks that kill each other; other tests use `ranks.run_on_ranks`. Returns the exit statuses by rank: 0, 1
    after an exception, or negative for a signal.
    """
    leader, parent = 0, os.getpid()
    pids = []
    with tempfile.TemporaryDirectory(prefix="weft-forks-") as folder:
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.setpgid(0, leader)
                    die_with_parent(parent)
                    if num_ranks > 1:
                        _join_gloo_group(Path(folder, "store"), rank, num_ranks)
                    body(rank, *args)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            pids.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(pid, leader)  # here, too, so that no rank kills the group before the next one has joined it
            leader = leader or pid
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _join_gloo_group(store: Path, rank: int, num_ranks: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks)


def is_running(pid: int) -> bool:
    """Return whether process `pid` is running; a zombie or an exiting process is not."""
    try:
        state, *_, flags = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and not int(flags) & _PF_EXITING


def _stat(pid: int) -> list[str]:
    # Fields after the command in parentheses: state, parent, process group, session, tty, tty's group, flags.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:7]
