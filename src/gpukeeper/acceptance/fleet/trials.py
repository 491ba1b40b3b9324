"""The values of a bad-node search: a trial, its outcome, and what the search concludes."""

from __future__ import annotations

import msgspec


class Trial(msgspec.Struct, frozen=True):
    """A test that runs on these nodes together. The trials of one round share no node."""

    number: int
    nodes: tuple[str, ...]
    why: str


class Outcome(msgspec.Struct, frozen=True):
    """`passed` is None when the trial could not be run: this says nothing about its nodes."""

    number: int
    passed: bool | None
    evidence: str = ""


class Suspect(msgspec.Struct, frozen=True, order=True):
    """What can be at fault. `kind`: node, link (between two nodes), or switch; `names` has the node, both ends of the
    link, or for a switch the leaf, or the two leaves between which it fails. A node includes its cable and its port."""

    kind: str
    names: tuple[str, ...]
    scope: str = ""  # of a switch: all, uplink, inside, between

    def __str__(self) -> str:
        if self.kind == "node":
            return f"node {self.names[0]}"
        if self.kind == "link":
            return f"the link between {self.names[0]} and {self.names[1]}"
        words = {
            "all": "the switch of leaf {}",
            "uplink": "the uplink of leaf {}",
            "inside": "the switch of leaf {}, between its own nodes",
        }
        if self.scope == "between":
            return f"the switches between leaf {self.names[0]} and leaf {self.names[1]}"
        return words[self.scope].replace("{}", self.names[0])


class Named(msgspec.Struct, frozen=True):
    """A fault that is certain, with the numbers of the failed trials that show it."""

    suspect: Suspect
    reason: str
    trials: tuple[int, ...]


class Undecided(msgspec.Struct, frozen=True):
    """Failures that have several explanations, the most likely first; or nodes that nothing is known about."""

    suspects: tuple[Suspect, ...]
    reason: str
    trials: tuple[int, ...] = ()


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[Named, ...] = ()
    links: tuple[Named, ...] = ()
    switches: tuple[Named, ...] = ()
    undecided: tuple[Undecided, ...] = ()
    jobs: int = 0  # trials that were run
    rounds: int = 0
    finished: bool = False  # False: there are more rounds to run, or the limit of rounds was reached
    limits: tuple[str, ...] = ()  # what was not tested, as sentences
