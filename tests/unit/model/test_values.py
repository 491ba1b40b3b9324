"""Durations in words, names and uids, unknown as a value, amounts, errors."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.model.errors import KeeperError, LeaseHeld, LedgerError, PlatformError, PolicyError, UsageError
from gpukeeper.model.policy import Amount
from gpukeeper.model.subject import Ref
from gpukeeper.model.unknown import Unknown, is_known
from gpukeeper.model.words import in_words, size_in_words

EVAL = Ref("docker", "node-3", "container", "eval", "c0ffee")
RUN = Ref("kubernetes", "prod", "TrainJob", "run-7", "uid-7", "research")
TREE = Ref("host", "node-3", "tree", "/tmp/ray_tmp_1", "8:77")


@pytest.mark.parametrize(
    ("span", "words"),
    [
        (timedelta(), "0s"),
        (timedelta(seconds=0.4), "0s"),
        (timedelta(seconds=-0.4), "0s"),
        (timedelta(seconds=59.6), "1m"),
        (timedelta(minutes=90), "1h30m"),
        (timedelta(hours=9), "9h"),
        (timedelta(days=2, hours=4, minutes=59), "2d4h"),
        (timedelta(days=1, minutes=5), "1d"),
        (timedelta(minutes=-90), "-1h30m"),
        (timedelta(seconds=61), "1m1s"),
    ],
)
def test_a_span_is_told_in_its_two_largest_units(span: timedelta, words: str) -> None:
    assert in_words(span) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 * 1024, "150 KiB"),
        (35_000_000_000, "32.6 GiB"),
        (5000 * 1024**5, "5000 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_a_size_is_told_in_binary_units(size: int, words: str) -> None:
    assert size_in_words(size) == words


@pytest.mark.parametrize("words", ["eval", "EVAL", "node-3/eval", "/node-3/eval", "docker/node-3/eval", "c0ffee"])
def test_any_ending_of_the_path_or_the_uid_names_it(words: str) -> None:
    assert EVAL.ends_with(words)


@pytest.mark.parametrize("words", ["al", "3/eval", "", "/", "c0ff", "C0FFEE", "x/docker/node-3/eval"])
def test_half_a_word_names_nothing(words: str) -> None:
    assert not EVAL.ends_with(words)


def test_a_path_has_namespace_and_kind_where_there_is_a_namespace() -> None:
    assert RUN.path == "kubernetes/prod/research/TrainJob/run-7"
    assert RUN.ends_with("trainjob/run-7")
    assert TREE.path == "host/node-3/tmp/ray_tmp_1"
    assert TREE.ends_with("/tmp/ray_tmp_1")


def test_a_key_is_made_of_the_uid_because_names_are_reused() -> None:
    assert EVAL.key == "docker/node-3/c0ffee"


def test_an_unknown_fact_is_neither_true_nor_false() -> None:
    fact = Unknown("the driver did not answer")
    with pytest.raises(TypeError, match="driver did not answer"):
        bool(fact)
    assert str(fact) == "unknown: the driver did not answer"
    assert not is_known(fact)


@pytest.mark.parametrize("fact", [0, False, None, "", ()])
def test_an_empty_fact_is_a_known_fact(fact: object) -> None:
    assert is_known(fact)


@pytest.mark.parametrize(
    ("amount", "total", "allowed"),
    [
        (Amount(count=20), 5, 20),
        (Amount(share=0.1), 100, 10),
        (Amount(share=0.1), 3, 1),
        (Amount(count=4, share=0.1), 100, 4),
        (Amount(count=40, share=0.1), 100, 10),
        (Amount(), 7, 7),
        (Amount(count=0), 7, 0),
    ],
)
def test_an_amount_is_a_count_or_a_share_of_at_least_one(amount: Amount, total: int, allowed: int) -> None:
    assert amount.of(total) == allowed


def test_every_error_knows_its_exit_code() -> None:
    codes = {
        one: one.exit_code for one in (KeeperError, UsageError, PolicyError, LedgerError, LeaseHeld, PlatformError)
    }
    assert list(codes.values()) == [1, 2, 10, 1, 11, 1]


def test_a_policy_error_tells_all_problems_at_once() -> None:
    one, two = PolicyError(["line 3: no"]), PolicyError(["line 3: no", "line 5: neither"])
    assert "1 problem. Nothing was changed." in str(one)
    assert str(two).startswith("line 3: no\nline 5: neither\n2 problems.")
