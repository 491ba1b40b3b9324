"""What the kernel's GPU errors mean."""

from __future__ import annotations

import pytest

from gpukeeper.acceptance.judging.health_rules import meaning_of_xid
from gpukeeper.acceptance.record import Remedy
from gpukeeper.model.gpu import Xid


@pytest.mark.parametrize(
    ("number", "grade", "remedy"),
    [
        *((n, "FAIL", "replace_gpu") for n in (48, 64, 79, 95, 140, 143, 157, 158, 167, 168, 169, 171, 172, 173)),
        *((n, "FAIL", "reseat_or_cable") for n in (54, 74, *range(144, 151))),
        *((n, "FAIL", "reset_gpu") for n in (62, 109, 110, 119, 120, 136, 155, 156)),
        (151, "FAIL", "reboot"),
        *((n, "WARN", "reset_gpu") for n in (63, 92, 94, 121, *range(160, 166))),
        *((n, "WARN", "retest") for n in (13, 31, 32, 43, 45, 68, 69, 137)),
        (999, "WARN", "contact_vendor"),
    ],
)
def test_every_tier(number: int, grade: str, remedy: str) -> None:
    found = meaning_of_xid(Xid(number, "whatever the log said"))
    assert (found.grade, found.remedy) == (grade, remedy)
    assert found.words


@pytest.mark.parametrize(
    ("words", "grade", "remedy"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "FAIL", "reset_gpu"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "FAIL", "reboot"),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "PASS", "none"),
        ("something new", "WARN", "contact_vendor"),
    ],
)
def test_154_repeats_the_drivers_advice(words: str, grade: str, remedy: str) -> None:
    found = meaning_of_xid(Xid(154, words))
    assert (found.grade, found.remedy) == (grade, remedy)


def test_an_nvlink_error_says_itself_how_bad_it_is() -> None:
    fatal = Xid(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000)")
    mild = Xid(145, "RLW_SRC_TRACK Nonfatal XC0 i0 Link 12 (0x00000004 0x80000000)")
    assert (meaning_of_xid(fatal).grade, meaning_of_xid(mild).grade) == ("FAIL", "WARN")
    assert meaning_of_xid(fatal).remedy is Remedy.RESEAT_OR_CABLE
