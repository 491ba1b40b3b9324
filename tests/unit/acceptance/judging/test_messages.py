"""Messages that teach (C17.2): real words of torch, CUDA and NCCL, told apart, each with what to do.

The words are data files below tests/cases/acceptance/words, one for each kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.acceptance.judging.replies import FAILURE_KINDS, broken_finding, classify
from gpukeeper.acceptance.record import ProbeFailure, Remedy
from gpukeeper.model.gpu import Grade

WORDS = Path(__file__).parents[3] / "cases" / "acceptance" / "words"
CASES = [(path.stem, case) for path in sorted(WORDS.glob("*.json")) for case in json.loads(path.read_text())]
IDS = [f"{kind}: {case['why']}" for kind, case in CASES]


@pytest.mark.parametrize(("kind", "case"), CASES, ids=IDS)
def test_real_words_are_distinguished(kind: str, case: dict[str, Any]) -> None:
    assert classify(case["words"], exit_code=1) == kind, case["why"]


@pytest.mark.parametrize("kind", sorted(set(FAILURE_KINDS) - {"crashed"}))
def test_every_kind_has_real_words(kind: str) -> None:
    assert (WORDS / f"{kind}.json").exists(), f"add words below {WORDS}"


@pytest.mark.parametrize("kind", sorted(FAILURE_KINDS))
def test_every_kind_teaches(kind: str) -> None:
    """What is wrong, and what to do: sentences, and a remedy that is not nothing."""
    lesson = FAILURE_KINDS[kind]
    for words in (lesson.sentence, lesson.advice):
        assert re.fullmatch(r"[A-Z].*\S.*", words, re.DOTALL), words
        assert len(words) > 20
    assert lesson.sentence.endswith(".")
    assert lesson.remedy is not Remedy.NONE
    assert lesson.grade is (Grade.FAIL if kind in ("ecc", "lost_gpu") else Grade.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("kind", "hint"),
    [
        ("no_gpu", "--gpus all"),
        ("no_gpu", "nvidia.com/gpu"),
        ("rendezvous", "29500"),
        ("dns", "MASTER_ADDR"),
        ("dns", "publishNotReadyAddresses"),
        ("port_taken", "MASTER_PORT"),
        ("cuda_mismatch", ".[accept]"),
        ("no_torch", "--python"),
        ("driver_too_old", "Update the driver"),
        ("out_of_memory", "nvidia-smi"),
        ("busy_gpu", "Another process"),
        ("fabric", "nvidia-fabricmanager"),
    ],
)
def test_the_message_names_what_helps(kind: str, hint: str) -> None:
    found = broken_finding("gemm", "GPU-0", ProbeFailure(kind=kind, words="RuntimeError: as it came"))
    assert hint in found.message
    assert "RuntimeError: as it came" in found.message


def test_a_probe_without_a_figure_is_inconclusive_and_keeps_its_words() -> None:
    answer = ProbeFailure(kind="out_of_memory", words="a\nb\nCUDA out of memory", seconds=3.0)
    found = broken_finding("memory_pattern", "GPU-0", answer, metric="errors")
    assert (found.verdict, found.code, found.metric, found.gpu) == ("INCONCLUSIVE", "out-of-memory", "errors", "GPU-0")
    assert found.evidence == {"words": "a\nb\nCUDA out of memory"}
    assert found.seconds == 3.0


@pytest.mark.parametrize(("kind", "code"), [("ecc", "ecc"), ("lost_gpu", "lost-gpu")])
def test_a_gpu_that_says_it_is_broken_fails(kind: str, code: str) -> None:
    found = broken_finding("gemm", "GPU-0", ProbeFailure(kind=kind, words="x"))
    assert (found.verdict, found.code) == (Grade.FAIL, code)


def test_a_kind_that_is_unknown_is_read_from_the_words() -> None:
    assert broken_finding("gemm", None, ProbeFailure(kind="odd", words="CUDA out of memory")).code == "out-of-memory"


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "kind"),
    [
        (None, True, "timeout"),
        (-9, True, "timeout"),
        (-11, False, "crashed"),
        (137, False, "crashed"),
        (1, False, "failed"),
    ],
)
def test_how_it_ended_tells_where_the_words_do_not(exit_code: int | None, timed_out: bool, kind: str) -> None:
    assert classify("", exit_code, timed_out) == kind


def test_words_come_before_the_way_it_ended() -> None:
    assert classify("uncorrectable ECC error encountered", -6, True) == "ecc"


def test_the_cause_comes_before_those_who_waited_for_it() -> None:
    """The port was taken, so the others could not connect."""
    both = "[c10d] The client socket has failed to connect to [localhost]:29500\nEADDRINUSE"
    assert classify(both) == "port_taken"
    assert classify("NCCL error in: x, remote error\nncclRemoteError: Connection refused") == "nccl"
