"""The page: whole, self-contained, escaped; verdict and who must act stand first, failing things before good ones."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from gpukeeper.acceptance.record import Delta, Remedy
from gpukeeper.acceptance.reports.html import page_of_report
from gpukeeper.model.gpu import Grade
from tests.unit.acceptance.reports import examples

VOID = {"meta", "br", "hr", "link"}


class Page(HTMLParser):
    """Reads a page as strictly as we write it: every element is closed, by its own end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in {"href", "src"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_it_is_whole_and_needs_nothing_from_outside(name: str) -> None:
    """C4.7"""
    written = page_of_report(examples.EXAMPLES[name]())
    page = Page(written)
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert "url(http" not in written
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    assert ("content", policy) in page.attributes
    assert "prefers-color-scheme:dark" in written
    assert "@media print" in written


@pytest.mark.parametrize("name", examples.EXAMPLES)
def test_links_of_the_page_lead_somewhere(name: str) -> None:
    page = Page(page_of_report(examples.EXAMPLES[name]()))
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_ids_are_unique_but_for_the_stripes() -> None:
    ids = [one for one in Page(page_of_report(examples.eight_gpus())).ids if one != "hatch"]
    assert len(ids) == len(set(ids))


def test_the_verdict_and_who_must_act_stand_first() -> None:
    text = Page(page_of_report(examples.eight_gpus())).text
    start = text.index("FAIL: not accepted")
    assert (
        start < text.index("Action required: Vendor: replace the GPU (GPU 3, GPU 5).") < text.index("Needs attention")
    )


def test_failing_things_stand_before_good_ones() -> None:
    text = Page(page_of_report(examples.eight_gpus())).text
    cards = text[text.index("Nodes" if "Nodes" in text else "Needs attention") :]
    assert cards.index("FAIL GPU 3") < cards.index("WARN GPU 6")
    checks = text[text.rindex("Checks") :]
    assert checks.index("gemm") < checks.index("environment")


def test_what_was_not_tested_is_reported_with_the_reason_and_the_way() -> None:
    text = Page(page_of_report(examples.one_good_gpu())).text
    assert "it needs 2 GPUs, 1 is here" in text
    assert "--within 5m" in text
    assert "a loss of 5.0 %" in text
    assert "warns only" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("on the CPU", "No GPU was tested or accepted."),
        ("interrupted", "The run was interrupted."),
        ("empty", "the driver did not respond within 10 s"),
        ("empty", "Nothing was tested."),
    ],
)
def test_a_run_that_accepts_nothing_reports_it_at_the_top(name: str, words: str) -> None:
    text = Page(page_of_report(examples.EXAMPLES[name]())).text
    assert words in text[: text.index("GPUs by check") if "? gemm" in text else len(text)]
    assert "not accepted" in text


def test_nothing_is_claimed_of_what_was_not_read() -> None:
    text = Page(page_of_report(examples.empty())).text
    assert "Every check that applies here was run" not in text
    assert "No check ran, so no counter was read." in text
    assert "Driver unknown" in text


def test_a_simulated_run_and_a_self_test_say_what_they_are() -> None:
    text = Page(page_of_report(examples.one_good_gpu(device="simulated", self_test=True))).text
    assert "no value was measured on a real GPU" in text
    assert "Self-test: faults were injected." in text


def test_everything_from_outside_is_escaped() -> None:
    written = page_of_report(examples.hostile())
    page = Page(written)
    assert "<script" not in written
    assert "script" not in page.tags
    assert "\u202e" not in written
    assert '<script>alert("GPU")</script> &' in page.text


def test_every_picture_is_described_without_colour() -> None:
    written = page_of_report(examples.eight_gpus())
    pictures = re.findall(r"<svg.*?</svg>", written, re.DOTALL)
    assert len(pictures) > 12
    for one in pictures:
        assert 'role="img"' in one
        assert "<title>" in one
        assert "<desc>" in one
    slow = next(one for one in pictures if "gemm.bf16" in one)
    assert "✕ 683.9" in slow
    assert "floor 690" in slow


def test_changed_counters_and_history_are_shown() -> None:
    text = Page(page_of_report(examples.eight_gpus())).text
    assert "ecc_corrected_volatile" in text
    assert "+12" in text
    assert "No loss can be detected in" not in text
    assert "Compared with earlier runs of this GPU" in text
    many = examples.eight_gpus(deltas=(Delta(gpu="GPU-gone", check="gemm", counter="pcie_replays", before=1, after=3),))
    assert "GPU-gone" in Page(page_of_report(many)).text


def test_the_command_to_test_again_names_the_suspects() -> None:
    assert "gpukeeper accept --gpus 3,5" in Page(page_of_report(examples.eight_gpus())).text
    assert "gpukeeper accept --expect 1" in Page(page_of_report(examples.one_good_gpu())).text
    assert "gpukeeper accept --device cpu" in Page(page_of_report(examples.on_the_cpu())).text


def test_many_findings_of_one_gpu_unfold() -> None:
    only = examples.gpu(0)
    found = [
        examples.finding("health", only.uuid, Grade.WARN, metric=f"m{n}", action=Remedy.WATCH, message=f"Number {n}.")
        for n in range(40)
    ]
    text = Page(page_of_report(examples.report([only], found))).text
    assert "34 more" in text
    assert all(f"Number {n}." in text for n in range(40))


def test_a_day_of_readings_makes_a_page_that_can_be_sent() -> None:
    day = [
        examples.replace_reading(one, at=one.at + 56 * turn)
        for turn in range(300)
        for one in examples.readings(examples.gpu(0).uuid)
    ]
    assert len(page_of_report(examples.one_good_gpu(timeline=tuple(day)))) < 400_000
