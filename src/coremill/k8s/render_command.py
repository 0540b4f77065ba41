"""`coremill k8s render`: YAML for kubectl on stdout, or in files; what was decided goes to stderr."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from coremill.config.load import LoadedConfig
from coremill.errors import InputError
from coremill.files import write_whole
from coremill.k8s.render import Rendered, render_objects, to_yaml
from coremill.redaction import print_for_programs
from coremill.report.terminal import format_bytes, format_usd, print_line


def render(loaded: LoadedConfig, folder: Path | None, messages: Console) -> None:
    """All objects on stdout, or one file for each in `folder`, numbered in apply order."""
    rendered = render_objects(loaded)
    if folder is None:
        print_for_programs(rendered.to_yaml().removesuffix("\n"))
    else:
        write_objects(rendered, folder)
    for note in rendered.notes:
        print_line(messages, note, style="yellow" if note.startswith("warning:") else "")
    print_line(messages, summary_of(rendered))
    if folder is not None:
        commands = f"coremill k8s check {loaded.path}, then coremill k8s submit {loaded.path}"
        by_hand = f"kubectl apply --server-side -f {folder}"
        print_line(messages, f"{len(rendered.objects)} objects in {folder}; next: {commands} (or {by_hand})")


def file_texts(rendered: Rendered) -> list[tuple[str, str]]:
    """Name and text of a file for each object."""
    return [(f"{place:02}-{one['kind'].lower()}.yaml", to_yaml([one])) for place, one in enumerate(rendered.objects)]


def write_objects(rendered: Rendered, folder: Path) -> None:
    """kubectl reads a folder in the order of its names."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("[0-9][0-9]-*.yaml"):  # of an earlier render: kubectl would apply it too
            if "app.kubernetes.io/managed-by: coremill" in left_over.read_text(encoding="utf-8", errors="replace"):
                left_over.unlink()
        for name, text in file_texts(rendered):
            write_whole(folder / name, text)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written", where="-o", why=str(error.strerror or error), do="name another folder"
        ) from error


def summary_of(rendered: Rendered) -> str:
    """How many pods of which size, what runs in them, and what they cost."""
    job = rendered.job
    ranks, threads = job.ranks_per_node, job.threads_per_rank
    words = (
        f"{job.section.kind} {job.namespace}/{job.name}: {job.nodes} x {job.pod.cpus} CPUs, {job.pod.memory_gib} GiB,"
        f" {ranks} rank{'' if ranks == 1 else 's'} of {threads} thread{'' if threads == 1 else 's'} each"
    )
    if job.plan is None:
        return words
    words += f"; a rank needs {format_bytes(job.plan.memory.peak.total)} of {format_bytes(job.plan.memory.limit)}"
    if job.plan.usd_per_hour is not None:
        words += f"; {format_usd(job.plan.usd_per_hour)} per hour ({job.plan.price_words})"
    return words
