"""Pytest plugin: a test that leaves something behind fails.

The program is a set of processes which own threads, children, sockets and shared memory. A test that forgets one of
them still passes, and then slows, blocks or breaks a later test, where the cause cannot be seen. So this plugin
compares what exists before and after, and fails the test itself (a teardown error, never a warning; no marker opts out
of it).

What is compared:

1. live threads, 2. child processes at any depth, zombies too, 3. open file descriptors: for each test, each module and
   the session;
4. files in the temp folder that bear the program's name, 5. POSIX shared memory, 6. abstract unix sockets that bear the
   program's name: for each module and the session.

When: a fixture wider than a test keeps what it owns across tests, rightly. Autouse fixtures would have to be the first
of their scope, and a session fixture that only the second test of a module asks for would still come after the module's
snapshot. Hooks need no such order: each comparison starts in a wrapper around ``pytest_runtest_setup`` and ends in one
around ``pytest_runtest_teardown``, outside all fixtures, and what appears while a wide fixture is set up is taken as
known to every narrower comparison, whenever that fixture is first asked for. Its own scope still checks that it goes.

Limits: what a library keeps until the process exits (a device runtime's descriptors, say) has to exist before the first
snapshot, so start it in ``pytest_configure`` of a conftest. Entries 4 to 6 are visible to the whole machine: shared
memory that a process older than the run has mapped is left out, but two runs at once in one temp folder, ``/dev/shm``
or network namespace can see each other's. A process whose parent has ended is no longer a descendant and is not found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

HELPER_THREADS = frozenset(
    {
        "tqdm._monitor.TMonitor",  # tqdm: one for the process, started by the first progress bar
        "subproc_worker_timer",  # torch: ends idle compile workers
        "_telemetry_worker",  # huggingface_hub: one for the process, started by the first report
    }
)
"""Daemon threads that libraries start once for the whole process, by name, target's name or class."""

RUNNER_THREADS = ("pytest_timeout ",)
"""Name prefixes of the test runner's own threads: the watchdog of a test still in progress during these hooks."""

HELPER_TARGETS = ("/dev/nvidia",)
"""Prefixes of descriptor targets that libraries open once for the whole process: the CUDA driver's device nodes."""

PREFIX = "diffcluster"
"""How the program's own temp files and abstract sockets begin."""

DEADLINE_S = 2.0
"""How long threads and children, which end asynchronously, may take before they count as left behind."""

POLL_S = 0.02

SCOPES = ("function", "class", "module", "package", "session")
"""Pytest's fixture scopes, narrowest first."""

Thing = tuple[object, ...]
"""A kind and what identifies one thing of that kind while it exists."""

Snapshot = dict[Thing, str]
"""What exists now, each with the words that describe it."""


def live_threads() -> Snapshot:
    found = (thread for thread in threading.enumerate() if not _is_helper(thread) and not _is_ended(thread))
    return {("thread", thread.native_id): _describe_thread(thread) for thread in found}


def _is_helper(thread: threading.Thread) -> bool:
    if thread.name.startswith(RUNNER_THREADS):
        return True
    # An unnamed thread is called "Thread-7 (target)" after its target.
    target = thread.name.partition(" (")[2].removesuffix(")")
    return thread.daemon and not HELPER_THREADS.isdisjoint({thread.name, target, _class_name(thread)})


def _is_ended(thread: threading.Thread) -> bool:
    # Python lists a thread that it did not start until the process exits (before 3.13), so the kernel is asked instead.
    foreign = _class_name(thread) == "threading._DummyThread"
    return foreign and not Path(f"/proc/self/task/{thread.native_id}").exists()


def _class_name(thread: threading.Thread) -> str:
    return f"{type(thread).__module__}.{type(thread).__qualname__}"


def _describe_thread(thread: threading.Thread) -> str:
    return f"thread {thread.name!r} ({_class_name(thread)}{', daemon' if thread.daemon else ''})"


def child_processes() -> Snapshot:
    # multiprocessing starts one tracker for the whole process, on first use, and keeps it until the process exits.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    children = psutil.Process().children(recursive=True)
    return {("child", child.pid): _describe_child(child) for child in children if child.pid != tracker}


def _describe_child(child: psutil.Process) -> str:
    status, command = "ended", ""
    with contextlib.suppress(psutil.Error):  # it can end between any two of these lines
        status, command = child.status(), child.name()
        command = " ".join(child.cmdline()) or command  # a zombie has a name only
    return f"child process {child.pid} ({status}): {command}"


def open_descriptors() -> Snapshot:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)  # see child_processes
    found: Snapshot = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor is among them and closed by now
            target = os.readlink(f"/proc/self/fd/{fd}")
            if fd != tracker and not target.startswith(HELPER_TARGETS):
                found[_identify(fd, target)] = f"fd {fd} ({_descriptor_kind(target)}) -> {target}"
    return found


def _identify(fd: int, target: str) -> Thing:
    # A file's target changes when it is renamed or removed; its inode does not. All anonymous inodes share one.
    info = os.fstat(fd)
    return "fd", fd, info.st_dev, info.st_ino, target if target.startswith("anon_inode:") else ""


def _descriptor_kind(target: str) -> str:
    if target.startswith("/memfd:"):
        return "memfd"
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    kind = target.partition(":[")[0]
    return kind if kind in ("socket", "pipe") else "file"


def temp_files() -> Snapshot:
    return {("file", str(path)): f"file {path}" for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}


def shared_memory() -> Snapshot:
    found: Snapshot = {}
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):  # it can be removed between these lines
            info = path.stat()
            mark = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x} {info.st_ino}"  # as /proc/*/maps has it
            found["shm", path.name, mark] = f"shared memory {path}"
    return found


def _is_mapped_by(pids: frozenset[int], thing: Thing) -> bool:
    # By inode: the C library makes a named semaphore under another name, and the maps go on showing that one.
    for pid in pids if thing[0] == "shm" else ():
        with contextlib.suppress(OSError):
            if f" {thing[2]} " in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
    return False


def abstract_sockets() -> Snapshot:
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    # Seven columns come before the name; sockets without one have no eighth.
    names = (columns[7] for columns in (line.split(maxsplit=7) for line in lines) if len(columns) > 7)
    return {("abstract", name): f"abstract socket {name}" for name in names if name.startswith(f"@{PREFIX}")}


def of_process() -> Snapshot:
    return live_threads() | child_processes() | open_descriptors()


def everything() -> Snapshot:
    return of_process() | temp_files() | shared_memory() | abstract_sockets()


@dataclass
class Watch:
    """One comparison: who is watched, how to look, and what is known not to be its doing."""

    owner: str
    look: Callable[[], Snapshot]
    known: set[Thing]

    def new(self) -> Snapshot:
        return {thing: words for thing, words in self.look().items() if thing not in self.known}

    def settle(self, deadline_s: float) -> Snapshot:
        """What is still new after a wait, and what only the garbage collector put away meanwhile."""
        end = time.monotonic() + deadline_s
        left = self.new()
        with _complaints() as complaints:
            while left and time.monotonic() < end:
                gc.collect()
                time.sleep(POLL_S)
                left = self.new()
        return left | {("garbage", words): f"put away by the garbage collector only: {words}" for words in complaints}


@contextlib.contextmanager
def _complaints() -> Iterator[list[str]]:
    # A finalizer that raises (a ResourceWarning, where warnings are errors) would be held against the next test by
    # pytest's own hook. Only the words are kept: the exception would keep its objects alive.
    heard: list[str] = []
    previous = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: heard.append(f"{unraisable.exc_value!r}")
    try:
        yield heard
    finally:
        sys.unraisablehook = previous


class LeakPlugin:
    """Keeps one comparison for the test, one for its module and one for the session."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Only those older than the run: a process that a test started and lost must not excuse what it holds.
        self._strangers = frozenset(psutil.pids()) - {os.getpid()}
        self._watches: dict[str, Watch] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._begin("session", "the session", everything)
        self._begin("module", f"module {_module_of(item)}", everything)
        self._begin("function", item.nodeid, of_process)
        return (yield)

    def _begin(self, scope: str, owner: str, look: Callable[[], Snapshot]) -> None:
        if scope not in self._watches:
            self._watches[scope] = Watch(owner, look, set(look()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        narrower = self._narrower(fixturedef.scope)
        if not narrower:
            return (yield)
        before = set(everything())
        try:
            return (yield)
        finally:  # a fixture that fails half way owns what it made until its scope ends, too
            made = everything().keys() - before
            for watch in narrower:
                watch.known |= made

    def _narrower(self, scope: str) -> list[Watch]:
        width = SCOPES.index(scope)
        return [watch for name, watch in self._watches.items() if SCOPES.index(name) < width]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        try:
            result = yield
        except (Exception, pytest.fail.Exception, pytest.skip.Exception):
            self._judge(item, nextitem, pytrace=True)  # with its trace, pytest shows the first failure as well
            raise
        self._judge(item, nextitem, pytrace=False)
        return result

    def _judge(self, item: pytest.Item, nextitem: pytest.Item | None, *, pytrace: bool) -> None:
        reports = [self._end(scope) for scope in _ended_scopes(item, nextitem)]
        if any(reports):
            pytest.fail("\n".join(filter(None, reports)), pytrace=pytrace)

    def _end(self, scope: str) -> str:
        watch = self._watches.pop(scope)
        left = watch.settle(self._deadline_s)
        left = {thing: words for thing, words in left.items() if not _is_mapped_by(self._strangers, thing)}
        for wider in self._watches.values():
            wider.known |= left.keys()  # reported once is enough: the module's last test is not to blame
        return "\n  ".join([f"{watch.owner} left behind:", *left.values()]) if left else ""


def _module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _ended_scopes(item: pytest.Item, nextitem: pytest.Item | None) -> tuple[str, ...]:
    """The watched scopes that end with this test, narrowest first: what the next test does not share is torn down."""
    if nextitem is None:
        return "function", "module", "session"
    return ("function",) if _module_of(item) == _module_of(nextitem) else ("function", "module")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--leak-deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help="how long threads and children may take to end before a test fails for them (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeakPlugin(config.getoption("--leak-deadline")), "diffcluster-leaks")
