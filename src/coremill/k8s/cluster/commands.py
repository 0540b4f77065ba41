"""`coremill k8s submit | status | logs | stop | delete`: what is said on the way, and what scripts get."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.errors import CoremillError, InputError, Interrupted
from coremill.k8s.cluster import ending, submitting
from coremill.k8s.cluster.conditions import exit_code
from coremill.k8s.cluster.log_following import lines_of, pod_index
from coremill.k8s.cluster.opening import Opened, open_job, open_rendered
from coremill.k8s.cluster.seen import labels_of, look, look_again
from coremill.k8s.cluster.status import OVER, headline, live_pods, show_status, state_of, status_of, told_reasons
from coremill.k8s.render_command import summary_of
from coremill.report.terminal import print_line

Say = Callable[[str], None]
LOOK_SECONDS = 5.0


def submit_run(loaded: LoadedConfig, file: str, context: str | None, *, wait: bool, as_json: bool) -> None:
    """Everything said on the way goes to stderr with --json, to stdout without."""
    say = _saying(as_json=as_json)
    rendered, opened = open_rendered(loaded, context)
    for note in rendered.notes:
        if note.startswith("warning:"):
            say(note)
    say(summary_of(rendered))
    say(f"cluster: {opened.cluster.context}")
    actions = submitting.submit(rendered, opened.cluster, file, say)
    with _told_what_goes_on(f"the job goes on; coremill k8s status {file} shows it, stop suspends it"):
        document = _wait_for_pods(opened, say) if wait else status_of(look(opened.cluster, opened.job))
    if as_json:
        done = [{"object": one.object, "action": one.action} for one in actions]
        print(json.dumps({"objects": done, **document}, indent=2))
        return
    if not wait:
        say(headline(document))
    say(f"next: coremill k8s logs {file}, or status, stop, delete")


def show_status_of(loaded: LoadedConfig, context: str | None, *, as_json: bool, console: Console) -> None:
    """Once; how long to wait between two looks is the user's to say (`watch coremill k8s status ...`)."""
    opened = open_job(loaded, context, "status")
    document = status_of(look(opened.cluster, opened.job))
    if as_json:
        print(json.dumps(document, indent=2))
        return
    show_status(document, console)


def show_logs(
    loaded: LoadedConfig, context: str | None, *, rank: int, follow: bool, tail: int | None, as_json: bool
) -> None:
    """Lines on stdout as the pod has them; what is said of pods goes to stderr. JSON: one object a line."""
    opened = open_job(loaded, context, "logs")
    pod_index(opened.job, rank)
    say = _saying(as_json=True)
    for line in lines_of(opened.cluster, opened.job, rank, follow=follow, tail=tail, say=say):
        text = json.dumps({"pod": line.pod, "time": line.time, "text": line.text}) if as_json else line.text
        print(text, flush=True)


def stop_run(loaded: LoadedConfig, context: str | None, *, wait: bool, as_json: bool) -> None:
    """Ends with 0 when the pods have gone; a job that is over or stopped is left as it is."""
    say = _saying(as_json=as_json)
    opened = open_job(loaded, context, "stop")
    job, cluster = opened.job, opened.cluster
    seen = look(cluster, job)
    state = state_of(seen)
    if state == "absent":
        raise InputError(
            f"there is no {seen.kind} {seen.namespace}/{seen.name}",
            where=f"context {cluster.context}",
            do="coremill k8s submit sends it there; kubernetes.name and namespace say what is looked for",
        )
    if state not in (*OVER, "stopped", "stopping", "deleting"):
        say(f"{ending.stop(cluster, seen)} is suspended: ranks save, pods go, and no new ones come")
    if wait:
        with _told_what_goes_on("the job is suspended all the same: its pods save and go"):
            ending.wait_until_gone(cluster, job, say)
    document = status_of(look(cluster, job))
    if as_json:
        print(json.dumps(document, indent=2))
        return
    say(headline(document))
    if seen.pool_name is not None and document["state"] == "stopped":
        say("its nodes go by themselves some five minutes after their pods")


def delete_run(
    loaded: LoadedConfig, context: str | None, *, is_sure: bool, as_json: bool, ask: Callable[[str], bool]
) -> None:
    """Asks once, with what would go."""
    say = _saying(as_json=as_json)
    opened = open_job(loaded, context, "delete")
    job, cluster = opened.job, opened.cluster
    own, wide, unseen = ending.belongings(cluster, job)
    for words in unseen:
        say(f"not looked for: {words}")
    deleted: list[str] = []
    if own or wide:
        seen = look(cluster, job)
        running, nodes = len(live_pods(seen)), len(seen.node_claims)
        words = f"{len(own) + len(wide)} objects of {seen.kind} {job.namespace}/{job.name} would be deleted"
        words += f"; {running} pod{'' if running == 1 else 's'} would save and end" if running else ""
        words += f"; the NodePool {job.pool} would go" if seen.pool else ""
        words += f", and its {nodes} node{'' if nodes == 1 else 's'} with it" if seen.pool and nodes else ""
        words += f". The volume (claim {job.section.claim}) and the namespace stay"
        if not is_sure and not _is_asked(words, say, ask):
            say("nothing was deleted")
            return
        deleted = ending.delete(cluster, job, own, wide, say)
    if as_json:
        kept = {"claim": job.section.claim, "namespace": job.namespace}
        print(json.dumps({"deleted": deleted, "kept": kept, "unseen": unseen}, indent=2))
        return
    say(f"the volume (claim {job.section.claim}) is kept, and on it checkpoints, model and report" if deleted else "")
    if not deleted:
        say(f"nothing of {job.namespace}/{job.name} is in the cluster")


def _is_asked(words: str, say: Say, ask: Callable[[str], bool]) -> bool:
    if not sys.stdin.isatty():
        raise InputError(
            "nothing was deleted: somebody has to say yes", why=words, do="give --yes where nobody can be asked"
        )
    say(words)
    return ask("Delete it?")


def _wait_for_pods(opened: Opened, say: Say) -> dict[str, Any]:
    """Until all pods run, with what they wait for; a job that ends before is told by how it ended."""
    cluster, job = opened.cluster, opened.job
    told: set[str] = set()
    while True:
        seen = look_again(cluster, job, say)
        document = status_of(seen)
        for words in (headline(document), *(text for text, _ in told_reasons(document))):
            if words not in told:
                say(words)
                told.add(words)
        if document["state"] == "failed":
            raise _failed(document, [exit_code(pod) for pod in seen.pods])
        if document["state"] in ("running", "complete", "stopped"):
            return document
        if document["state"] in ("deleting", "absent"):
            raise CoremillError(f"{job.namespace}/{job.name} was deleted while it was waited for")
        cluster.wait_for_change(job.namespace, labels_of(job), LOOK_SECONDS)


@contextlib.contextmanager
def _told_what_goes_on(words: str) -> Iterator[None]:
    """Ctrl-C ends the waiting, and nothing in the cluster."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"not waited for any longer: {words}") from None


def _failed(document: dict[str, Any], codes: list[int | None]) -> CoremillError:
    """With the exit code of bad input where that was it."""
    kind = InputError if InputError.exit_code in codes else CoremillError
    return kind(headline(document), do="coremill k8s logs shows what it said last; --rank N for another pod")


def _saying(*, as_json: bool) -> Say:
    console = Console(stderr=as_json)

    def say(text: str) -> None:
        if text:
            print_line(console, text, style="yellow" if text.startswith("warning:") else "")

    return say
