"""Prices are for reports: read strictly, by model, in the order of the file."""

from __future__ import annotations

import pytest

from gpukeeper.config.load import load_text
from gpukeeper.model.errors import PolicyError
from gpukeeper.model.policy import Prices
from gpukeeper.views.usage import price_of


def prices(text: str) -> Prices:
    return load_text(f"scope: {{docker: {{}}}}\nprices: {text}\n").policy.prices


def test_there_are_none_by_default() -> None:
    assert load_text("scope: {docker: {}}\n").policy.prices == Prices()


def test_the_first_pattern_that_matches_applies() -> None:
    found = prices('{currency: EUR, per_gpu_hour: {"*H100*": 2.5, "NVIDIA *": 1, "*": 0}}')
    assert found.currency == "EUR"
    models = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "other")
    assert [price_of(model, found) for model in models] == [2.5, 1.0, 0.0]
    assert price_of("other", Prices(per_gpu_hour={"*H100*": 2.5})) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{per_gpu_hour: {"*": -1}}', "is not a price"),
        ('{per_gpu_hour: {"*": "2,50"}}', "is not a price"),
        ('{per_gpu_hour: {"*": true}}', "is not a price"),
        ('{per_gpu_hour: {"*": .inf}}', "is not a price"),
        ("{per_gpu_hour: 2.5}", "is not a mapping"),
        ("{per_hour: {}}", 'unknown setting "per_hour"'),
        ("{currency: pieces of eight}", "is not a currency"),
    ],
)
def test_what_is_no_price_is_refused(text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        prices(text)
