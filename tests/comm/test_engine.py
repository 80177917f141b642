"""The MPI thread without MPI: requests are numbers that a test completes."""

import threading

import pytest

from fugaku_megatron.comm.engine import LONGEST_NAP, Engine
from tests.time_limit import wait_until

pytestmark = pytest.mark.unit


class Library:
    """Requests like MPI's: started by name, complete once their name is in `complete`."""

    def __init__(self):
        self.started = []
        self.complete = set()
        self.threads = set()
        self.tests = 0
        self.engine = Engine(self.test)

    def test(self, requests):
        self.threads.add(threading.get_ident())
        self.tests += 1
        return all(name in self.complete for name in requests)

    def operation(self, *names, channel=None):
        def steps():
            for name in names:
                self.threads.add(threading.get_ident())
                self.started.append(name)
                yield [name]

        return self.engine.start(steps(), channel)

    def settle(self):
        """Wait until the thread has accepted every order."""
        self.engine.call(lambda: None)


@pytest.fixture
def library():
    return Library()


def test_one_thread_makes_all_calls(library):
    operation = library.operation("a", "b")
    library.complete |= {"a", "b"}
    operation.wait()
    assert len(library.threads) == 1 and threading.get_ident() not in library.threads
    assert library.engine.call(threading.get_ident) in library.threads
    assert library.engine.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        library.engine.call(lambda: 1 // 0)
    operations = [library.operation(name) for name in "def"]
    library.settle()
    assert library.started == ["a", "b", "d", "e", "f"]
    library.complete.add("f")
    operations[2].wait()
    assert not operations[0].done()


def test_operations_of_a_channel_follow_one_another(library):
    first, second = (library.operation(name + "1", name + "2", channel="dp") for name in "ab")
    other = library.operation("c", channel="tp")
    library.settle()
    assert library.started == ["a1", "c"] and not first.done()
    library.complete |= {"a1", "c"}
    other.wait()
    while len(library.started) < 3:
        library.settle()
    assert library.started == ["a1", "c", "a2"]
    library.complete |= {"a2", "b1", "b2"}
    second.wait()
    assert first.done() and library.started[-2:] == ["b1", "b2"]


@pytest.mark.parametrize("place", ["start", "test"])
def test_an_error_is_raised_by_wait_and_the_channel_goes_on(library, place):
    def steps():
        if place == "start":
            raise OSError("the link is down")
        yield [None]

    def test(requests):
        if None in requests:
            raise OSError("the link is down")
        return library.test(requests)

    library.engine.test = test
    failing = library.engine.start(steps(), "dp")
    following = library.operation("a", channel="dp")
    library.complete.add("a")
    for _ in range(2):
        with pytest.raises(OSError, match="the link is down"):
            failing.wait()
    following.wait()


@pytest.fixture
def naps(library, monkeypatch):
    """Collect the seconds of every sleep that the thread begins; None: until it is woken."""
    condition = library.engine._wake
    begun = []
    wait = condition.wait
    monkeypatch.setattr(
        condition, "wait", lambda seconds=None: (begun.append(seconds), wait(seconds))
    )
    return begun


def test_naps_while_nobody_waits_and_sleeps_with_nothing_under_way(library, naps):
    operation = library.operation("a")
    library.settle()
    begin = len(naps)
    before = library.tests
    assert wait_until(lambda: library.tests >= before + 20)
    tests = library.tests - before
    assert tests <= len(naps) - begin + 2, "a nap before each test"
    assert set(naps[begin + 10 :]) == {LONGEST_NAP}, "the first naps are shorter"
    library.complete.add("a")
    operation.wait()
    assert wait_until(lambda: naps[-1] is None)


def test_no_naps_on_a_core_of_its_own(library, naps):
    library.engine.own_core = True
    operation = library.operation("a")
    library.settle()
    before = library.tests
    assert wait_until(lambda: library.tests >= before + 100)
    library.complete.add("a")
    operation.wait()
    library.settle()
    assert set(naps) <= {None}  # it sleeps only while nothing is under way


def test_nothing_is_tested_after_the_end(library):
    """MPI aborts a process that tests a request after MPI_Finalize."""
    library.operation("a")
    library.settle()
    tests = []
    library.engine.end(lambda: tests.append(library.tests))
    library.engine._thread.join(10)
    assert not library.engine._thread.is_alive()
    assert tests == [library.tests]
    with pytest.raises(RuntimeError, match="MPI has ended"):
        library.operation("b")
