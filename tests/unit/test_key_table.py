"""The in-memory keys of one owner: torch's semantics, waiters, queues, handing over."""

from __future__ import annotations

import runpy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

(SET, COMPARE_SET, GET, ADD, CHECK, WAIT, DELETE, APPEND) = range(1, 9)
(NUM_KEYS, LIST_KEYS, PUSH, POP, BARRIER, LENGTH) = range(9, 15)


# The first test also compiles the module.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def native(repository):
    return runpy.run_path(str(repository / "tests/cpp/native_build.py"))["build"]()


class Table:
    """Answers in order of arrival, each as (label, found, number, value)."""

    def __init__(self, native):
        self.table = native.KeyTable()
        self.answers = []

    def ask(self, label, op, key=b"", value=b"", expected=b"", amount=0):
        def done(found, number, answer, keys):
            self.answers.append((label, found, number, answer, sorted(keys)))

        return self.table.apply(op, key, value, expected, amount, done)

    def now(self, op, key=b"", value=b"", expected=b"", amount=0):
        """(found, number, value) of an operation that is answered at once."""
        before = len(self.answers)
        self.ask("now", op, key, value, expected, amount)
        (label, *answer, _) = self.answers.pop(before)
        assert label == "now"
        return tuple(answer)

    def take(self):
        """Labels of what has been answered since the last time."""
        labels = [label for label, *_ in self.answers]
        self.answers.clear()
        return labels


@pytest.fixture
def table(native):
    return Table(native)


def test_compare_set_follows_torch(table):
    assert table.now(COMPARE_SET, b"k", b"new", b"old") == (True, 0, b"old")
    assert table.now(CHECK, b"k")[0] is False
    assert table.now(COMPARE_SET, b"k", b"v", b"") == (True, 0, b"v")
    assert table.now(COMPARE_SET, b"k", b"w", b"x") == (True, 0, b"v")
    assert table.now(COMPARE_SET, b"k", b"w", b"v") == (True, 0, b"w")


@pytest.mark.parametrize(
    ("text", "amount", "total"),
    [
        (b"5", 2, 7),
        (b" \t\n-5", 2, -3),
        (b"+7", 0, 7),
        (b"12abc", 1, 13),
        (b"0x10", 1, 1),
        (b"9223372036854775807", 0, 2**63 - 1),
        (b"-9223372036854775808", 0, -(2**63)),
        (b"9223372036854775807", 1, -(2**63)),
    ],
)
def test_add_reads_what_torch_reads(table, text, amount, total):
    table.now(SET, b"k", text)
    assert table.now(ADD, b"k", amount=amount) == (True, total, b"")
    assert table.now(GET, b"k")[2] == str(total).encode()


@pytest.mark.parametrize(
    "text", [b"", b" ", b"-", b"abc", b"\0" + b"1", b"9223372036854775808", b"-9223372036854775809"]
)
def test_add_to_what_is_not_a_number_is_refused_and_changes_nothing(table, text):
    table.now(SET, b"k", text)
    found, _, why = table.now(ADD, b"k", amount=1)
    assert not found
    assert why.startswith(b"key k holds '")
    assert table.now(GET, b"k")[2] == text


def test_waiters_are_answered_in_their_order_and_after_the_writer(table):
    for label in ("first", "second"):
        table.ask(label, WAIT, b"k")
    table.ask("else", WAIT, b"other")
    assert table.take() == []
    table.ask("writer", SET, b"k")
    assert table.take() == ["writer", "first", "second"]
    assert table.table.counters()["waiting"] == 1


@pytest.mark.parametrize("op", [SET, COMPARE_SET, ADD, APPEND, BARRIER, PUSH])
def test_every_way_to_make_a_key_ends_a_wait(table, op):
    table.ask("waiter", WAIT, b"k")
    table.ask("writer", op, b"k", amount=1)
    assert sorted(table.take()) == ["waiter", "writer"]


def test_a_cancelled_request_is_never_answered(table):
    wait = table.ask("wait", WAIT, b"k")
    pop = table.ask("pop", POP, b"q", amount=1)
    for request in (wait, pop, 12345):
        table.table.cancel(request)
        table.table.cancel(request)
    table.now(SET, b"k", b"v")
    assert table.now(PUSH, b"q", b"e") == (True, 1, b"")
    assert table.now(LENGTH, b"q") == (True, 1, b"")
    assert table.take() == []


def test_callbacks_may_ask_and_cancel(native):
    table = native.KeyTable()
    answers = []
    ids = {}

    def cancel_the_other(*_):
        answers.append("first")
        table.cancel(ids["second"])
        table.apply(SET, b"from within", b"", b"", 0, lambda *_: answers.append("inner"))
        answers.append("first goes on")

    ids["first"] = table.apply(WAIT, b"k", b"", b"", 0, cancel_the_other)
    ids["second"] = table.apply(WAIT, b"k", b"", b"", 0, lambda *_: answers.append("second"))
    table.apply(SET, b"k", b"", b"", 0, lambda *_: answers.append("writer"))
    assert answers == ["writer", "first", "first goes on", "inner"]


def test_a_long_chain_of_callbacks_needs_no_stack(native):
    table = native.KeyTable()
    left = 100_000

    def again(*_):
        nonlocal left
        left -= 1
        if left:
            table.apply(ADD, b"n", b"", b"", 1, again)

    table.apply(ADD, b"n", b"", b"", 1, again)
    assert left == 0


def test_an_element_goes_to_the_first_who_pops(table):
    table.ask("waits", WAIT, b"q")
    table.ask("pops 1", POP, b"q", amount=1)
    table.ask("pops 2", POP, b"q", amount=1)
    assert table.now(PUSH, b"q", b"a") == (True, 1, b"")
    assert table.answers == [("pops 1", True, 1, b"a", [])]
    table.take()
    table.now(PUSH, b"q", b"b")
    assert table.take() == ["pops 2"]
    table.now(PUSH, b"q", b"c")
    assert table.take() == ["waits"]
    assert table.now(POP, b"q") == (True, 1, b"c")
    assert table.now(POP, b"q") == (False, 0, b"")


def test_an_element_that_nobody_fetched_wakes_the_next_waiter(table):
    """Whoever was woken first died; the second must not sleep beside a queue that is not empty."""
    table.ask("dead", WAIT, b"q")
    table.ask("alive", WAIT, b"q")
    table.now(PUSH, b"q", b"a")
    assert table.take() == ["dead"]
    table.now(PUSH, b"q", b"b")
    assert table.take() == ["alive"]
    table.ask("third", WAIT, b"q")
    assert table.take() == ["third"]


def test_what_a_pop_leaves_wakes_the_next_waiter(table):
    for label in ("dead", "dead too", "alive"):
        table.ask(label, WAIT, b"q")
    table.now(PUSH, b"q", b"a")
    table.now(PUSH, b"q", b"b")
    assert table.take() == ["dead", "dead too"]
    assert table.now(POP, b"q") == (True, 2, b"a")
    assert table.take() == ["alive"]


def test_a_wait_says_whether_an_element_or_a_key_ended_it(table):
    for key in (b"k", b"q"):
        table.ask(key, WAIT, key)
    table.now(PUSH, b"q", b"")
    table.now(SET, b"k", b"")
    assert [answer[:3] for answer in table.answers] == [(b"q", True, 1), (b"k", True, -1)]
    assert table.now(WAIT, b"q")[1] == 1
    assert table.now(WAIT, b"k")[1] == -1


def test_a_short_value_comes_with_the_end_of_a_wait_for_it(table):
    long = b"x" * 4097
    for key, value in ((b"k", b"v"), (b"n", b""), (b"long", long), (b"e", long[1:])):
        table.ask(key, WAIT, key)
        table.ask("writer", SET, key, value)
    ends = [answer[:4] for answer in table.answers if answer[0] != "writer"]
    assert ends == [
        (b"k", True, -1, b"v"),
        (b"n", True, -1, b""),
        (b"long", True, 0, b""),
        (b"e", True, -1, long[1:]),
    ]
    assert table.now(WAIT, b"k") == (True, -1, b"v")
    assert table.now(WAIT, b"long") == (True, 0, b"")
    assert table.now(SET, b"k", b"w") and table.now(WAIT, b"k") == (True, -1, b"w")


def test_a_barrier_ends_for_all_with_the_last_arrival(table):
    table.ask("a", BARRIER, b"b", amount=3)
    table.ask("b", BARRIER, b"b", amount=3)
    table.ask("looks on", WAIT, b"b")
    assert table.take() == ["looks on"]
    table.ask("c", BARRIER, b"b", amount=3)
    assert table.take() == ["c", "a", "b"]
    assert table.now(GET, b"b")[2] == b"3"
    table.now(DELETE, b"b")
    table.ask("again", BARRIER, b"b", amount=2)
    assert table.take() == []


def test_keys_and_queues_of_one_name_are_apart(table):
    table.now(SET, b"k", b"v")
    table.now(PUSH, b"k", b"e")
    assert table.now(NUM_KEYS) == (True, 1, b"")
    assert table.now(DELETE, b"k") == (True, 1, b"")
    assert table.now(DELETE, b"k") == (False, 0, b"")
    assert table.now(CHECK, b"k")[0] is True
    assert table.now(POP, b"k") == (True, 1, b"e")
    assert table.now(CHECK, b"k")[0] is False


def test_an_operation_nobody_knows_is_refused(table):
    assert table.now(200, b"k") == (False, 0, b"operation 200 is unknown")


blobs = st.binary(max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.dictionaries(blobs, blobs, max_size=8),
    queues=st.dictionaries(blobs, st.lists(blobs, min_size=1, max_size=4), max_size=4),
)
def test_what_is_handed_over_is_all_there(native, keys, queues):
    old, new = Table(native), Table(native)
    for key, value in keys.items():
        old.now(SET, key, value)
    for key, elements in queues.items():
        for element in elements:
            old.now(PUSH, key, element)
    new.table.restore(old.table.dump())
    assert old.table.counters()["bytes"] == new.table.counters()["bytes"]
    new.ask("list", LIST_KEYS)
    assert new.answers.pop()[4] == sorted(keys)
    assert all(new.now(GET, key)[2] == value for key, value in keys.items())
    for key, elements in queues.items():
        assert [new.now(POP, key)[2] for _ in elements] == elements
    for key in keys:
        new.now(DELETE, key)
    counters = new.table.counters()
    assert (counters["keys"], counters["queues"], counters["bytes"]) == (0, 0, 0)


def test_handing_over_answers_those_who_wait_at_the_heir(table, native):
    heir = Table(native)
    heir.ask("key", WAIT, b"k")
    heir.ask("element", POP, b"q", amount=1)
    heir.ask("not yet", WAIT, b"missing")
    heir.now(SET, b"newer", b"heir's")
    heir.now(PUSH, b"r", b"2")
    for op, key, value in [
        (SET, b"k", b"v"),
        (PUSH, b"q", b"e"),
        (SET, b"newer", b"old"),
        (PUSH, b"r", b"1"),
    ]:
        table.now(op, key, value)
    heir.table.restore(table.table.dump())
    assert sorted(heir.take()) == ["element", "key"]
    assert heir.now(GET, b"newer")[2] == b"heir's"
    assert [heir.now(POP, b"r")[2] for _ in range(2)] == [b"1", b"2"]
    assert heir.now(LENGTH, b"q") == (True, 0, b"")


def test_a_broken_dump_changes_nothing(table, native):
    table.now(SET, b"k", b"value")
    table.now(PUSH, b"q", b"element")
    whole = table.table.dump()
    heir = native.KeyTable()
    for size in range(len(whole)):
        with pytest.raises(RuntimeError):
            heir.restore(whole[:size])
    for broken in (whole + b"x", b"\2" + whole[1:], whole[:1] + b"\xff\xff\xff\xff" + whole[5:]):
        with pytest.raises(RuntimeError):
            heir.restore(broken)
    assert heir.counters()["keys"] == heir.counters()["queues"] == 0
