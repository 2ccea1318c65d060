"""What one session of the store protocol asks of its transport and of the keys behind it."""

from __future__ import annotations

import runpy
import struct

import pytest

HELLO = b"\0" + struct.pack("=I", 0x3C85F7CE)
SET, GET, WAIT, GETNUMKEYS, MULTI_GET, MULTI_SET, CANCEL_WAIT, PING = 1, 3, 6, 7, 10, 11, 12, 13


# The first test also compiles the module.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def native(repository):
    return runpy.run_path(str(repository / "tests/cpp/native_build.py"))["build"]()


def text(value):
    return struct.pack("=Q", len(value)) + value


def keyed(op, *names, values=()):
    count = struct.pack("=Q", len(names)) if op in (WAIT, MULTI_GET, MULTI_SET) else b""
    return bytes([op]) + count + b"".join(text(b"/t/" + n) for n in names) + b"".join(values)


class Keys:
    """Answers nothing by itself."""

    def __init__(self):
        self.asked = []

    def __call__(self, op, key):
        self.asked.append(key)


@pytest.fixture
def keys():
    return Keys()


@pytest.fixture
def session(native, keys):
    made = native.Bare(keys)
    made.feed(HELLO)
    return made


def test_the_token_goes_no_further(session, keys):
    session.feed(keyed(GET, b"a/t/b"))
    assert keys.asked == [b"a/t/b"]
    assert session.token == b"t"


def test_a_bare_key_is_one_of_the_job_that_the_connection_has_named(session, keys):
    session.feed(keyed(GET, b"a"))
    session.answer(0, value="x")
    session.feed(bytes([GET]) + text(b"/exception_dump"))
    assert keys.asked == [b"a", b"exception_dump"]
    assert session.dropped == ""


def test_the_next_frame_begins_when_the_last_is_answered(session, keys):
    session.feed(keyed(SET, b"a", values=[text(b"v")]) + keyed(GET, b"b"))
    assert keys.asked == [b"a"]
    session.answer(0)
    assert keys.asked == [b"a", b"b"]
    assert session.sent() == b""
    session.answer(1, value="x")
    assert session.sent() == text(b"x")


def test_the_keys_of_one_frame_are_asked_for_together_and_joined_in_order(session, keys):
    session.feed(keyed(MULTI_GET, b"a", b"b", b"c"))
    assert keys.asked == [b"a", b"b", b"c"]
    session.answer(2, value="C")
    session.answer(1, found=False)
    assert session.sent() == b""
    session.answer(0, value="A")
    assert session.sent() == text(b"A") + text(b"") + text(b"C")


def test_what_came_with_a_wait_answers_the_get_right_after_it_and_nothing_else(session, keys):
    session.feed(keyed(WAIT, b"a", b"b"))
    session.answer(0, value="A", number=-1)
    session.answer(1)
    session.feed(keyed(MULTI_GET, b"a", b"b"))
    assert keys.asked == [b"a", b"b", b"b"]
    session.answer(2, value="B")
    assert session.sent() == b"\0" + text(b"A") + text(b"B")

    # Whatever comes between may have told the client of a newer value.
    for between in (
        keyed(GET, b"c"),
        keyed(SET, b"c", values=[text(b"v")]),
        bytes([PING]) + b"1234",
    ):
        session.feed(keyed(WAIT, b"a"))
        session.answer(session.unanswered()[0], value="A", number=-1)
        session.feed(between)
        for slot in session.unanswered():
            session.answer(slot)
        session.sent()
        before = len(keys.asked)
        session.feed(keyed(GET, b"a"))
        assert keys.asked[before:] == [b"a"]
        session.answer(session.unanswered()[0], value="new")
        assert session.sent() == text(b"new")


def test_a_wait_that_is_half_answered_is_cancelled_whole(session):
    session.feed(keyed(WAIT, b"a", b"b", b"c"))
    assert session.waiting
    session.answer(1)
    session.feed(bytes([CANCEL_WAIT]) + bytes([PING]) + b"1234")
    assert session.unanswered() == []
    assert not session.waiting
    assert session.sent() == b"\1" + b"1234"


def test_a_wait_that_can_never_end_drops_the_client(session):
    session.feed(keyed(WAIT, b"a", b"b"))
    session.answer(0, found=False, value="rank 3 died")
    assert session.dropped == "WAIT was refused: rank 3 died"
    assert session.unanswered() == []
    session.feed(keyed(GET, b"a"))
    assert session.sent() == b""


def test_the_end_of_a_session_cancels_what_it_asked(session):
    session.feed(keyed(WAIT, b"a", b"b"))
    assert session.unanswered() == [0, 1]
    session.end()
    assert session.unanswered() == []


def test_a_refusal_in_the_middle_of_a_frame_asks_for_nothing_more(native):
    def ask(op, key):
        return (False, 0, "full") if key == b"b" else None

    session = native.Bare(ask)
    pairs = b"".join(text(b"/t/" + name) + text(b"") for name in (b"a", b"b", b"c"))
    session.feed(HELLO + bytes([MULTI_SET]) + struct.pack("=Q", 3) + pairs)
    assert session.dropped == "MULTI_SET was refused: full"
    assert session.unanswered() == []


def test_input_is_held_back_while_an_operation_is_under_way(session, keys):
    session.feed(keyed(SET, b"a", values=[text(b"")]))
    assert session.want_read
    session.feed(keyed(SET, b"b", values=[text(b"x" * 100_000)]))
    assert not session.want_read
    assert session.resumed == 0
    session.answer(0)
    assert session.want_read
    assert session.resumed == 1
    assert keys.asked == [b"a", b"b"]


def test_input_that_came_all_the_same_is_bounded(session):
    session.feed(keyed(WAIT, b"never"))
    for _ in range(65):
        session.feed("x" * (1 << 20))
    assert session.dropped == "more than 67108864 bytes wait behind WAIT"


def test_a_held_session_begins_no_frame(session):
    session.hold(True)
    session.feed(bytes([PING]) + b"1234")
    assert session.sent() == b""
    session.hold(False)
    assert session.sent() == b"1234"


def test_a_held_session_reads_no_further_values_of_a_frame_that_has_begun(session, keys):
    """A client that asks for many large values and does not read them must not fill the memory."""
    asked = keyed(MULTI_GET, b"a", b"b", b"c")
    first = 1 + 8 + len(text(b"/t/a"))
    session.feed(asked[:first])
    session.answer(session.unanswered()[0], value=b"1")
    session.hold(True)
    session.feed(asked[first:])
    assert keys.asked == [b"a"] and session.unanswered() == []
    session.hold(False)
    assert keys.asked == [b"a", b"b", b"c"]
    for number in session.unanswered():
        session.answer(number, value=b"2")
    assert session.sent() == text(b"1") + text(b"2") + text(b"2")


def test_thousands_of_answered_frames_need_no_stack(native):
    session = native.Bare(lambda op, key: (True, 1, ""))
    session.feed(HELLO + keyed(SET, b"k", values=[text(b"")]) * 50_000 + keyed(GET, b"k"))
    assert session.sent() == text(b"")


def test_a_question_about_the_whole_store_needs_a_job(session):
    session.feed(bytes([GETNUMKEYS]))
    assert session.dropped == "GETNUMKEYS before any key has named the job"
