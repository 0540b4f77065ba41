"""README.md of an exported model: what the hub reads at its top, and the numbers of the report below. No other prose.

It may be published: paths of this machine, host names and user names stay out of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from coremill import __version__
from coremill.config.schema import BUILT_IN, LoraSection, RunConfig
from coremill.plan.adapters import alpha_of
from coremill.redaction import redact
from coremill.remote_code import is_folder
from coremill.report.metrics import format_metric, in_words, loading_lines, model_class_of
from coremill.report.step_figures import StepFigures
from coremill.report.terminal import format_loss
from coremill.tasks.base import evaluated_rows, make_task

HUB_DATASET = re.compile(r"hf://(?P<name>[^:@]+)")
# What the hub calls what a model is for, by the class of transformers that loads it.
PIPELINE_TAGS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
}


def model_card(
    summary: Mapping[str, Any],
    config: RunConfig,
    *,
    name: str,
    license_name: str | None,
    exported: StepFigures | None = None,
    form: str = "model",
) -> str:
    """Of a run's summary (the keys of report.json) and its run file; `exported` is the step, None: the last.

    `license_name` is the base model's; `form` is adapter where the folder holds nothing else.
    """
    from huggingface_hub import ModelCardData

    model_class = model_class_of(summary)
    front = ModelCardData(
        base_model=base_model_of(config),
        base_model_relation=("adapter" if form == "adapter" else "finetune") if base_model_of(config) else None,
        datasets=datasets_of(config) or None,
        license=license_name if _is_pretrained(config) else None,
        library_name="peft" if form == "adapter" else "transformers",
        pipeline_tag=PIPELINE_TAGS.get(model_class),
        tags=["coremill", "cpu", *(["lora"] if config.lora.rank is not None else [])],
        ignore_metadata_errors=True,
    )
    rows = "\n".join(f"| {label} | {_cell(value)} |" for label, value in _rows(summary, config, exported))
    lines = loading_lines(model_class, name, _named(config.model.name) if form == "adapter" else None)
    code = "\n".join(["```python", *lines, "```"])
    return redact(f"---\n{front.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n\n| | |\n|---|---|\n{rows}\n\n{code}\n")


def base_model_of(config: RunConfig) -> str | None:
    """Its name on the hub; None where it began with a folder, or with random weights."""
    return config.model.name if _is_pretrained(config) and not is_folder(config.model.name) else None


def datasets_of(config: RunConfig) -> list[str]:
    """Those of the hub, by name."""
    named = (HUB_DATASET.match(source) for source in _sources(config))
    return list(dict.fromkeys(match["name"] for match in named if match is not None))


def license_of(base_folder: Path) -> str | None:
    """As the base model's own card has it; None: that is not here, or says none."""
    from huggingface_hub import ModelCard

    try:
        text = (base_folder / "README.md").read_text(encoding="utf-8", errors="replace")
        found = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license") if "---" in text else None
    except Exception:  # whatever somebody wrote there: a card without a license is a card all the same
        return None
    return found if isinstance(found, str) else None


def _rows(summary: Mapping[str, Any], config: RunConfig, exported: StepFigures | None) -> Iterator[tuple[str, str]]:
    subject = summary.get("subject") or {}
    commits: Mapping[str, str] = subject.get("commits") or {}
    if config.model.config is not None:
        yield "model", f"a {config.model.config.get('model_type')} shape, from random weights"
    else:
        commit = commits.get(config.model.name) if base_model_of(config) else None
        revision = commit or config.model.revision
        named = _named(config.model.name) + (f" at {revision}" if revision else "")
        yield ("base model", named) if _is_pretrained(config) else ("model", f"{named}, from random weights")
    if subject.get("parameters"):
        trained = subject.get("trainable_parameters")
        frozen = subject["parameters"] - trained if config.train.freeze and trained is not None else 0
        yield "parameters", f"{subject['parameters']:,}" + (f", {frozen:,} of them frozen" if frozen else "")
    if config.lora.rank is not None:
        yield "adapters", _adapters(subject, config.lora, model_class_of(summary))
    yield "task", config.task
    yield "data", ", ".join(_at(commits.get(source), source) for source in _sources(config))
    if exported is not None and exported.step == summary["steps"]:
        exported = None
    yield from _training(summary, config, exported)
    yield from _numbers(summary, evaluated_rows(config), exported)
    yield from _machines(summary, is_last=exported is None)
    yield "coremill", __version__
    if subject.get("command"):
        yield "command", f"`{_without_paths(str(subject['command']))}`"


def _adapters(subject: Mapping[str, Any], lora: LoraSection, model_class: str) -> str:
    where = "every linear map of the layers" if lora.target_modules is None else ", ".join(lora.target_modules)
    trained = subject.get("trainable_parameters")
    words = f"LoRA of rank {lora.rank}, alpha {alpha_of(lora):g}, dropout {lora.dropout:g}, beside {where}"
    whole = [*lora.modules_to_save, *([] if model_class == "AutoModelForCausalLM" else ["the head"])]
    words += f"; {', '.join(whole)} trained whole" if whole else ""
    return words + (f"; {trained:,} numbers trained" if trained else "")


def _training(summary: Mapping[str, Any], config: RunConfig, exported: StepFigures | None) -> Iterator[tuple[str, str]]:
    done, planned = summary["steps"], summary.get("steps_planned")
    of_planned = f" of {planned:,}" if planned and planned != done else ""
    which = f", this is step {exported.step:,}" if exported is not None else ""
    yield "steps", f"{done:,}{of_planned}{which}"
    yield "tokens", f"{summary['tokens'] if exported is None else exported.tokens:,}"
    train = config.train
    yield "learning rate", f"{train.learning_rate:g}, {train.schedule}"
    yield "optimizer", f"{_optimizer(summary, train.optimizer)}, weight decay {train.weight_decay:g}"
    length = config.data.sequence_length
    if make_task(config).step_counts().rows_differ:
        yield "samples per step", f"{train.samples_per_step:,}, of at most {length:,} tokens"
    else:
        yield "tokens per step", f"{train.tokens_per_step:,}, rows of {length:,}"
    yield "seed", f"{train.seed}"


def _optimizer(summary: Mapping[str, Any], asked: str) -> str:
    """The one that the plan took, and inside backward where it was."""
    chosen: dict[str, str] = {choice["name"]: choice["value"] for choice in summary.get("choices") or ()}
    return chosen.get("optimizer", asked) + (", inside backward" if chosen.get("update") == "inside" else "")


def _numbers(
    summary: Mapping[str, Any], most_rows: int | None, exported: StepFigures | None
) -> Iterator[tuple[str, str]]:
    """The training loss, and what the evaluation of the exported step found."""
    loss, which = (summary["loss_last"], "the last") if exported is None else (exported.loss, f"step {exported.step:,}")
    if summary["loss_first"] is not None and loss is not None:
        yield "training loss", f"{format_loss(summary['loss_first'])} in the first step, {format_loss(loss)} in {which}"
    evaluations = {each["step"]: each for each in summary["evaluations"]}
    found = evaluations.get(summary["steps"] if exported is None else exported.step)
    if found is None:
        return
    on = _evaluated_on(summary, most_rows)
    for name in found:
        if name not in ("step", "tokens", "seconds", "best_step"):
            yield f"{in_words(name)} after step {found['step']:,}", f"{format_metric(found[name])} on {on}"


def _evaluated_on(summary: Mapping[str, Any], most_rows: int | None) -> str:
    """What the metrics are means over: questions are not their windows, and how many a limit of rows leaves is open."""
    data = summary.get("data") or {}
    rows, questions = data.get("evaluation_rows"), data.get("evaluation_documents")
    if not rows:
        return "held-out rows"
    limit = min(rows, most_rows or rows)
    if model_class_of(summary) != "AutoModelForQuestionAnswering" or not questions:
        return f"{limit:,} held-out rows"
    windows = f"{'at most ' if limit < rows else ''}{limit:,} window{'s' if limit != 1 else ''}"
    if limit < rows:
        return f"held-out questions of {windows} in all"
    return f"{questions:,} held-out question{'s' if questions != 1 else ''}, {windows}"


def _machines(summary: Mapping[str, Any], *, is_last: bool) -> Iterator[tuple[str, str]]:
    around, hours = summary["environment"], summary["seconds"] / 3600
    ranks, hosts = around["world_size"], max(1, len(around["hosts"]))
    count = "1 rank" if ranks == 1 else f"{ranks} ranks"
    on = f" on {hosts} machines" if hosts > 1 else ""
    fleet = around.get("fleet")
    planned = f" ({fleet})" if fleet and fleet != "this machine" else ""
    yield "hardware", f"CPU, {count} of {around['threads_per_rank']} threads{on}{planned}, {around['dtype']}"
    yield "hours", f"{hours:.3g}" + ("" if is_last else f", of all {summary['steps']:,} steps")
    yield "torch", str(around["torch_version"])


def _is_pretrained(config: RunConfig) -> bool:
    model = config.model
    return model.config is None and model.name != BUILT_IN and model.weights == "pretrained"


def _sources(config: RunConfig) -> list[str]:
    return [config.data.source] if config.data.sources is None else [each.source for each in config.data.sources]


def _named(source: str) -> str:
    """As it was given, but for the folders of this machine that lead to it."""
    return PurePath(source).name if source.startswith(("/", "~")) else source


def _at(commit: str | None, source: str) -> str:
    """A dataset of the hub at the commit that was read, as a run file names it."""
    return _named(source) if commit is None else f"{source.partition('@')[0]}@{commit}"


def _without_paths(command: str) -> str:
    return re.sub(r"(?<![\w:/.~-])[/~][^\s'\"]*/", "", command)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
