"""Images without references. Their age counts from when they were first observed unused, never from their build."""

from __future__ import annotations

from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from gpukeeper.lifecycle.rule import Rule, Turn
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.policy import DAY, Images
from gpukeeper.model.subject import Shape, State, Subject
from gpukeeper.model.unknown import Unknown
from gpukeeper.model.words import in_words, size_in_words

NAME = "unused_image"

_NOT_ONE = Answer(NAME, Verdict.SILENT, "not an image")
_USED = Answer(NAME, Verdict.PROTECT, "a workload refers to it")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, images = view.subject, settings.policy.images
    since = free_since(view, images)
    if isinstance(since, Answer):
        return since
    reason = f"{size_words(subject)}, unused for {in_words(now - since)}"
    if images.unused is None and images.under_pressure is None and images.above is None:
        return Answer(NAME, Verdict.REPORT, reason + "; the policy only reports unused images", since=since)
    ages = _ages(view, images)
    if not ages:
        return Answer(NAME, Verdict.PROTECT, reason + "; neither the disk nor the unused images are above their limit")
    # What is due anyway is not due because a disk is full.
    age, why, pressed = next((one for one in ages if now >= since + one[0]), min(ages, key=lambda one: one[0]))
    due = since + age
    reason += f", kept for {in_words(age)}{why}"
    if now < due:
        return Answer(NAME, Verdict.WAIT, reason, due=due)
    return Answer(NAME, Verdict.DUE, reason, Action.REMOVE, due, since, pressed=pressed)


RULE = Rule(
    name=NAME,
    summary=(
        "An image unused for images.unused is removed; sooner if its disk is too full, or if unused images are larger "
        "than images.above. Without these settings it is reported."
    ),
    shapes=(Shape.IMAGE,),
    acts=True,
    turn=Turn.STORAGE,
    evaluate=evaluate,
)


def free_since(view: View, images: Images) -> datetime | Answer:
    """Since when nothing needs it and the policy does not keep it; or why it stays."""
    subject = view.subject
    if subject.shape is not Shape.IMAGE:
        return _NOT_ONE
    if isinstance(subject.in_use, Unknown):
        return Answer(NAME, Verdict.UNKNOWN, f"whether it is in use is unknown ({subject.in_use.why})")
    if subject.in_use or subject.state is not State.ENDED:
        return _USED
    kept_by = next(
        (pattern for pattern in images.keep if any(fnmatchcase(n, pattern) for n in names_of(subject))), None
    )
    if kept_by is not None:
        return Answer(NAME, Verdict.PROTECT, f'images.keep names it ("{kept_by}")')
    if child := subject.labels.get("child"):
        return Answer(NAME, Verdict.PROTECT, f"{child} is built on it")
    if len(names := subject.labels.get("names", "").split()) > 1:
        # An engine can remove a name only if it refers to some image, and it may refer to another one by then.
        return Answer(
            NAME, Verdict.PROTECT, f"it has several names ({', '.join(names)}); remove the unneeded ones by hand"
        )
    since = unused_since(view)
    return Answer(NAME, Verdict.UNKNOWN, since.why) if isinstance(since, Unknown) else since


def _ages(view: View, images: Images) -> list[tuple[timedelta, str, bool]]:
    """How long it is kept, why so long in words, and whether only because its disk is too full."""
    together, sooner = view.subject.together, images.under_pressure
    ages = [] if images.unused is None else [(images.unused, "", False)]
    if images.above is not None and isinstance(together, int) and together > images.above:
        why = f", since it and unused images that were used later are larger than {size_in_words(images.above)}"
        ages.append((DAY if sooner is None else sooner, why, False))
    if view.pressure and sooner is not None:
        ages.append((sooner, " while the disk is too full", True))
    return ages


def names_of(subject: Subject) -> tuple[str, ...]:
    """Every name it goes by; one of them being kept keeps it."""
    return (subject.ref.name, *subject.labels.get("names", "").split())


def size_words(subject: Subject) -> str:
    return "of unknown size" if isinstance(subject.size, Unknown) else size_in_words(subject.size)


def unused_since(view: View) -> datetime | Unknown:
    """The later of both: an image may have been used and left again between two passes."""
    seen, used = view.memory.first_seen_ended, view.subject.last_used
    if isinstance(used, Unknown):
        return Unknown(f"when it was last used is unknown ({used.why})")
    if seen is None:
        return Unknown("it was not observed as unused before")
    return seen if used is None else max(seen, used)
