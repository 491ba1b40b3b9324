"""Work that was stopped, lost its GPU to another workload, and was then restarted on it.

A workload keeps the GPUs it was created with. After `hold_after_stop` its GPU may go to others, and a later start finds
it in use. The owner is warned once for each start, and admins are notified; with gpu.stop_on_taken it is then stopped.
"""

from __future__ import annotations

from datetime import datetime

from gpukeeper.lifecycle.rule import Rule
from gpukeeper.lifecycle.rules.hold import last_end
from gpukeeper.lifecycle.settings import Settings
from gpukeeper.lifecycle.warnings import will
from gpukeeper.model.decision import Action, Answer, Verdict, View
from gpukeeper.model.subject import Shape, State
from gpukeeper.model.words import in_words

NAME = "taken_gpu"

_NOT_TAKEN = Answer(NAME, Verdict.SILENT, "it was not restarted on a GPU that another workload uses")


def evaluate(view: View, settings: Settings, now: datetime) -> Answer:
    subject, tenant = view.subject, view.tenant
    if tenant is None or (subject.state is not State.RUNNING and subject.state is not State.PAUSED):
        return _NOT_TAKEN
    whose = f"{tenant.path} of {tenant.owner}" if tenant.owner else tenant.path
    words = f"restarted on GPU {tenant.device}, which {whose} has held for {in_words(now - tenant.since)}"
    since = subject.started if isinstance(subject.started, datetime) else now
    sent = [w for w in view.memory.warnings if w.rule == NAME and w.incarnation == subject.seen.incarnation]
    stop = settings.policy.gpu.stop_on_taken
    held = last_end(NAME, view, settings, now) if stop else None
    if not any(w.at <= now and (held is None or w.at >= held) for w in sent):
        then = f"it {will(settings.policy)} be stopped at the next pass" if stop else "no action is taken"
        message = f"{words}; {then}. Stop it and create a new one, so that it gets a GPU of its own"
        end = Action.STOP if stop else Action.KEEP
        return Answer(NAME, Verdict.DUE, message, Action.WARN, now, since, stage=1, then=end, complaint=words)
    if stop:
        return Answer(NAME, Verdict.DUE, words, Action.STOP, now, since)
    return Answer(NAME, Verdict.REPORT, words, since=since)


RULE = Rule(
    name=NAME,
    summary="Work restarted on a GPU that has a new tenant: its owner is warned; stopped if gpu.stop_on_taken.",
    shapes=(Shape.WORKLOAD,),
    states=(State.RUNNING, State.PAUSED),
    acts=True,
    evaluate=evaluate,
)
