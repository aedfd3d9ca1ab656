"""The leak plugin, run on small suites in their own process: what leaks fails and is named, what is clean passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
SHM = "leaktest"


class Kind(NamedTuple):
    """One kind of thing: the suite's lines that make ``thing`` and put it away, and how a report names it."""

    make: str
    put_away: str
    named: str


class Run(Protocol):
    """Runs modules, given as name and body, as one suite."""

    def __call__(self, *args: str, **modules: str) -> pytest.RunResult: ...


KINDS = {
    "thread": Kind(
        "stop = threading.Event(); "
        "thing = threading.Thread(target=stop.wait, name='leaky', daemon=True); thing.start()",
        "stop.set(); thing.join()",
        "thread 'leaky' (threading.Thread, daemon)",
    ),
    # Python goes on listing such a thread after it has ended.
    "foreign_thread": Kind(
        "thing = threading.Lock(); thing.acquire(); up = threading.Event(); "
        "_thread.start_new_thread(lambda: (threading.current_thread(), up.set(), thing.acquire()), ()); up.wait()",
        "thing.release()",
        "(threading._DummyThread, daemon)",
    ),
    # cat ends by itself with this process, which holds the other end of its input.
    "child": Kind("thing = subprocess.Popen(['cat'], stdin=subprocess.PIPE)", "thing.communicate()", "): cat"),
    "grandchild": Kind(
        "thing = subprocess.Popen(['sh', '-c', 'exec 3<&0; cat -u <&3 & echo; wait'], stdin=-1, stdout=-1); "
        "thing.stdout.readline()",
        "thing.communicate()",
        "): cat -u",
    ),
    "zombie": Kind(
        "thing = os.fork() or os._exit(0); os.waitid(os.P_PID, thing, os.WEXITED | os.WNOWAIT)",
        "os.waitpid(thing, 0)",
        "(zombie): python",
    ),
    "socket": Kind("thing = socket.socket()", "thing.close()", "(socket) -> socket:["),
    "pipe": Kind("thing = os.pipe()", "[os.close(end) for end in thing]", "(pipe) -> pipe:["),
    "memfd": Kind("thing = os.memfd_create('leaky')", "os.close(thing)", "(memfd) -> /memfd:leaky"),
    "eventfd": Kind("thing = os.eventfd(0)", "os.close(thing)", "(eventfd) -> anon_inode:[eventfd]"),
    "open_file": Kind("thing = open(__file__)", "thing.close()", "(file) -> "),
    "temp_file": Kind(
        "thing = pathlib.Path(tempfile.gettempdir(), f'diffcluster-{__name__}'); thing.touch()",
        "thing.unlink()",
        "/temp/diffcluster-test_suite",
    ),
    "socket_file": Kind(
        "thing = pathlib.Path(tempfile.gettempdir(), f'diffcluster-{__name__}.sock'); "
        "end = socket.socket(socket.AF_UNIX); end.bind(os.path.relpath(thing)); end.close()",
        "thing.unlink()",
        ".sock",
    ),
    "shared_memory": Kind(
        f"thing = pathlib.Path(f'/dev/shm/{SHM}-{{os.getpid()}}-{{__name__}}'); thing.touch()",
        "thing.unlink()",
        f"shared memory /dev/shm/{SHM}-",
    ),
    "abstract_socket": Kind(
        "thing = socket.socket(socket.AF_UNIX); thing.bind(f'\\0diffcluster leaky {os.getpid()} {__name__}')",
        "thing.close()",
        "abstract socket @diffcluster leaky ",
    ),
}

HEAD = """
import _thread, gc, os, pathlib, socket, subprocess, tempfile, threading, time, pytest

KEPT = []
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs with warnings as errors in a temp folder of its own; removes the shared memory that is leaked on purpose."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the others take seconds to import
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("temp")))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nfilterwarnings = ["error"]')

    def run_suite(*args: str, **modules: str) -> pytest.RunResult:
        pytester.makepyfile(**{name: HEAD + textwrap.dedent(body) for name, body in modules.items()})
        options = ("-p", "tests.leaks", "-p", "no:cacheprovider", "--leak-deadline=0.3")
        return pytester.runpytest_subprocess(*options, *args)

    yield run_suite
    for path in Path("/dev/shm").glob(f"{SHM}-*"):
        path.unlink()


def _suites(put_away: bool) -> dict[str, str]:
    """A module for each kind, with one test that makes the thing."""
    end = "{0.put_away}" if put_away else "KEPT.append((thing, locals()))"
    body = "def test_{1}():\n    {0.make}\n    " + end
    return {f"test_suite_{name}": body.format(kind, name) for name, kind in KINDS.items()}


def _errors(result: pytest.RunResult) -> dict[str, str]:
    """Each failing teardown's report by its test's name."""
    parts = re.split(r"_+ ERROR at teardown of test_(\w+) _+", result.stdout.str().partition("= short test summary")[0])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_leak_of_each_kind_fails_its_test_and_is_named(run: Run) -> None:
    result = run(**_suites(put_away=False))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=len(KINDS), errors=len(KINDS))
    errors = _errors(result)
    assert {name: errors[name] for name, kind in KINDS.items() if kind.named not in errors[name]} == {}


def test_what_a_test_puts_away_is_no_leak(run: Run) -> None:
    run(**_suites(put_away=True)).assert_outcomes(passed=len(KINDS))


def _fixtures(scope: str, *, clean: bool) -> str:
    """A fixture of this scope for each kind, and their names in ALL."""
    lines = []
    for number, kind in enumerate(KINDS.values()):
        lines += [f"@pytest.fixture(scope={scope!r})", f"def thing{number}():", f"    {kind.make}", "    yield thing"]
        lines += [f"    {kind.put_away}" if clean else "    KEPT.append((thing, locals()))"]
    return "\n".join([*lines, f"ALL = {[f'thing{number}' for number in range(len(KINDS))]}", ""])


THREE_TESTS = """
def test_before():
    pass

@pytest.mark.usefixtures(*ALL)
def test_user():
    pass

def test_after():
    pass
"""

ASKED_FOR_LATE = """
def test_user(request):
    for name in ALL:
        request.getfixturevalue(name)

def test_after():
    pass
"""

IN_A_CLASS = """
class TestIt:
    @pytest.mark.usefixtures(*ALL)
    def test_user(self):
        pass

    def test_after(self):
        pass
"""


@pytest.mark.parametrize("tests", [THREE_TESTS, ASKED_FOR_LATE, IN_A_CLASS], ids=["named", "late", "class"])
def test_a_clean_fixture_may_keep_things_for_its_scope(run: Run, tests: str) -> None:
    scopes = ("session", "package", "module", "class", "function")
    modules = {f"test_{number}_{scope}": _fixtures(scope, clean=True) + tests for number, scope in enumerate(scopes)}
    result = run(**modules)
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()


@pytest.mark.parametrize(
    ("scope", "owner"), [("module", "module test_suite.py"), ("session", "the session")], ids=["module", "session"]
)
def test_a_wide_fixture_that_leaks_fails_where_its_scope_ends(run: Run, scope: str, owner: str) -> None:
    another = "def test_elsewhere():\n    pass"
    result = run(test_suite=_fixtures(scope, clean=False) + THREE_TESTS, test_z_another=another)
    result.assert_outcomes(passed=4, errors=1)
    last = "test_after" if scope == "module" else "test_elsewhere"
    result.stdout.fnmatch_lines([f"*ERROR at teardown of {last}*", f"{owner} left behind:"])
    assert [kind.named for kind in KINDS.values() if kind.named not in result.stdout.str()] == []


def test_a_fixture_that_is_remade_for_each_parameter_is_no_leak(run: Run) -> None:
    fixture = _fixtures("module", clean=True).replace("scope='module'", "scope='module', params=[1, 2]", 1)
    run(test_suite=fixture + THREE_TESTS).assert_outcomes(passed=4)


def test_a_function_fixture_that_leaks_fails_its_test_only(run: Run) -> None:
    result = run(test_suite=_fixtures("function", clean=False) + THREE_TESTS)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_user*", "test_suite.py::test_user left behind:"])
    # The machine-wide kinds are compared once a module, so they are named at its end.
    result.assert_outcomes(passed=3, errors=2)


def test_a_leak_is_reported_once(run: Run) -> None:
    result = run(test_suite=f"def test_a():\n    {KINDS['socket'].make}\n    KEPT.append(thing)\n\ndef test_b(): pass")
    result.assert_outcomes(passed=2, errors=1)
    assert "ERROR at teardown of test_a" in result.stdout.str()


def test_one_selected_test_is_judged_alone(run: Run) -> None:
    suite = f"def test_a():\n    {KINDS['socket'].make}\n    KEPT.append(thing)\n\ndef test_b(): pass"
    run("test_suite.py::test_b", test_suite=suite).assert_outcomes(passed=1)
    run("test_suite.py::test_a", test_suite=suite).assert_outcomes(passed=1, errors=1)


def test_things_may_take_a_moment_to_end(run: Run) -> None:
    suite = "def test_it():\n    threading.Thread(target=time.sleep, args=(0.5,)).start()"
    run("--leak-deadline=5", test_suite=suite).assert_outcomes(passed=1)


def test_a_failing_teardown_does_not_hide_a_leak(run: Run) -> None:
    suite = f"""
    @pytest.fixture
    def thing():
        {KINDS["memfd"].make}
        yield
        assert False, "a fault of its own"

    def test_it(thing):
        pass
    """
    result = run(test_suite=suite)
    result.assert_outcomes(passed=1, errors=1)
    assert "a fault of its own" in result.stdout.str()
    assert KINDS["memfd"].named in result.stdout.str()


def test_what_only_the_garbage_collector_closes_fails_its_own_test(run: Run) -> None:
    suite = """
    def test_a():
        gc.disable()
        loop = [socket.socket()]
        loop.append(loop)

    def test_b():
        pass
    """
    result = run(test_suite=suite)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_a*", "*garbage collector only: ResourceWarning*socket*"])


def test_the_helpers_of_libraries_are_no_leak(run: Run) -> None:
    # A progress bar starts tqdm's monitor thread; a lock, multiprocessing's tracker: a child with a pipe.
    suite = """
    import multiprocessing
    from multiprocessing import resource_tracker
    from tqdm import tqdm

    def test_it():
        assert list(tqdm(range(3))) == [0, 1, 2]
        assert tqdm.monitor in threading.enumerate()
        multiprocessing.get_context("spawn").Lock()
        assert resource_tracker._resource_tracker._pid
    """
    run(test_suite=suite).assert_outcomes(passed=1)


def test_the_runners_watchdog_thread_is_no_leak(run: Run) -> None:
    suite = "def test_a():\n    pass\n\ndef test_b():\n    pass"
    run("-p", "pytest_timeout", "--timeout=60", "--timeout-method=thread", test_suite=suite).assert_outcomes(passed=2)


STRANGER = """
import mmap, pathlib, sys, time
while not pathlib.Path("go").exists():
    time.sleep(0.01)
with open(sys.argv[1], "wb+") as file:
    file.truncate(mmap.PAGESIZE)
    memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
sys.stdin.read()
"""


def test_the_shared_memory_of_an_older_process_is_no_leak(run: Run) -> None:
    path = Path(f"/dev/shm/{SHM}-{os.getpid()}-stranger")
    suite = f"""
    def test_it():
        pathlib.Path("go").touch()
        while not os.path.exists({str(path)!r}):
            time.sleep(0.01)
    """
    with subprocess.Popen([sys.executable, "-c", STRANGER, path], stdin=subprocess.PIPE) as stranger:
        result = run(test_suite=suite)
        stranger.communicate()
    assert path.exists()
    result.assert_outcomes(passed=1)
