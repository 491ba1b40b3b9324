"""C8.10: a bad date or an unreadable file must not stop the exempt. Errors keep, loudly."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukeeper.config.load import Loaded, load_file
from gpukeeper.model.policy import Exemption
from gpukeeper.model.unknown import Unknown


def load(folder: Path, exemptions: str | bytes | None, inline: str = "") -> Loaded:
    policy, other = folder / "policy.yaml", folder / "exempt.yaml"
    policy.write_text(f"scope: {{docker: {{}}}}\nexemptions_from: exempt.yaml\n{inline}")
    if isinstance(exemptions, str):
        other.write_text(exemptions)
    elif exemptions is not None:
        other.write_bytes(exemptions)
    return load_file(policy)


def only(loaded: Loaded) -> Exemption:
    assert not isinstance(loaded.policy.exemptions, Unknown)
    (one,) = loaded.policy.exemptions
    return one


def test_a_good_file_adds_to_what_the_policy_says(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "- {owner: ann, rules: [idle], until: 2026-09-01T18:00+02:00, reason: thesis}\n",
        "exemptions: [{class: api, reason: always on}]\n",
    )
    assert loaded.policy.exemptions == (
        Exemption(reason="always on", class_="api"),
        Exemption(reason="thesis", owner="ann", rules=("idle",), until=datetime(2026, 9, 1, 16, tzinfo=UTC)),
    )
    assert loaded.exemption_origins == (f"{tmp_path}/policy.yaml:3", f"{tmp_path}/exempt.yaml:1")
    assert loaded.warnings == ()


def test_an_empty_list_exempts_nobody(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[]\n")
    assert loaded.policy.exemptions == ()
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("{owner: ann, until: soon, reason: x}", '"soon" is not a date.'),
        ("{owner: ann, untl: 2026-09-01, reason: x}", 'unknown setting "untl". Did you mean "until"?'),
        ("{owner: ann}", '"reason" is missing.'),
        ("{owner: ann, until: 2026-09-01, until: 2027-09-01, reason: x}", "set twice, first in line 1."),
        ("{owner: ann, until: , reason: x}", "has no value."),
        ("{owner: ann, rules: [idl], reason: x}", 'unknown rule "idl", or one that cannot be suspended.'),
        ("{owner: ann, class: srving, reason: x}", 'unknown class "srving".'),
        ("{owner: ann, rules: idle, reason: x}", '"idle" is not a list.'),
    ],
)
def test_an_entry_that_cannot_be_read_keeps_for_its_owner_and_complains(tmp_path: Path, entry: str, why: str) -> None:
    loaded = load(tmp_path, f"- {entry}\n")
    one = only(loaded)
    assert one.owner == "ann"
    assert isinstance(one.until, Unknown)
    assert one.until.why.startswith(f"{tmp_path}/exempt.yaml:1: ")
    assert why in one.until.why
    assert one.rules == ()
    (warning,) = loaded.warnings
    assert why in warning
    assert warning.endswith("Kept until it is fixed.")


def test_what_is_understood_of_a_broken_entry_is_used(tmp_path: Path) -> None:
    one = only(load(tmp_path, "- {workload: eval-*, rules: [idle], until: 2026-13-01, reason: paper}\n"))
    assert (one.workload, one.rules, one.reason) == ("eval-*", ("idle",), "paper")


@pytest.mark.parametrize("rules", ["[idle, idl]", "[idle, 5]", "[idle, {max_runtime: true}]", "idle", "{idle: yes}"])
def test_if_one_of_its_rules_is_invalid_all_are_suspended(tmp_path: Path, rules: str) -> None:
    """The invalid one may be a misspelt one that its owner relies on."""
    one = only(load(tmp_path, f"- {{owner: ann, rules: {rules}, reason: x}}\n"))
    assert (one.owner, one.rules) == ("ann", ())
    assert isinstance(one.until, Unknown)


def test_an_owner_that_looks_like_a_number_is_still_an_owner(tmp_path: Path) -> None:
    assert only(load(tmp_path, "- {owner: 1000, reason: x}\n")).owner == "1000"


def test_a_broken_entry_leaves_the_others_alone(tmp_path: Path) -> None:
    loaded = load(tmp_path, "- {owner: ann, until: soon, reason: x}\n- {owner: ben, reason: y}\n")
    assert not isinstance(loaded.policy.exemptions, Unknown)
    assert [one.until for one in loaded.policy.exemptions][1] is None


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "owner: ann\n",
        "- {owner: ann\n",
        b"\xff\xfe\x00",
        "- just words\n",
        "-\n",
        "- {reason: for whom?}\n",
        "- {class: srving, reason: x}\n",
        "- &a [*a]\n",
        "- {owner: true, reason: x}\n",
    ],
)
def test_when_nobody_can_say_who_is_exempt_everything_is_kept(tmp_path: Path, content: str | bytes | None) -> None:
    loaded = load(tmp_path, content)
    assert isinstance(loaded.policy.exemptions, Unknown)
    assert "exempt.yaml" in loaded.policy.exemptions.why
    (warning,) = loaded.warnings
    assert warning.endswith("Everything is kept until it is fixed.")


def test_a_directory_in_its_place_keeps_everything(tmp_path: Path) -> None:
    (tmp_path / "exempt.yaml").mkdir()
    assert isinstance(load(tmp_path, None).policy.exemptions, Unknown)
