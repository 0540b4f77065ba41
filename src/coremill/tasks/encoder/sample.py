"""What the exported model says of `sample.prompt`, asked in a process of its own: proof that the export loads.

Each task has a program for it (`python -m PROGRAM EXPORT_FOLDER [CODE_SHA256]`); JSON goes through stdin and stdout:
prompt, context and what else the task adds; completion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coremill.errors import CoremillError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.lora_base import base_folder_of
from coremill.remote_code import checked_copy

SHORTEST_TIMEOUT_SECONDS = 600.0
READ_BYTES_PER_SECOND = 10e6  # slow on purpose: a network disk under load


def ask_for_sample(
    program: str, export: Path, asked: Mapping[str, Any], environ: Mapping[str, str], *, code_sha256: str | None
) -> dict[str, str]:
    """The fields of the event `sample`. The training is done: an export that says nothing fails no run."""
    found: dict[str, str]
    try:
        found = {"completion": _ask(program, export, asked, environ, code_sha256)}
    except subprocess.TimeoutExpired as error:
        found = {"problem": f"the exported model gave no answer within {error.timeout:,.0f} s"}
    except CoremillError as error:
        found = {"problem": f"the exported model gave no answer: {error.what}", "details": error.why or ""}
    except (OSError, ValueError, LookupError) as error:
        found = {"problem": f"the exported model gave no answer: {type(error).__name__}: {error}"}
    return {"prompt": asked["prompt"], **found}


def _ask(
    program: str, export: Path, asked: Mapping[str, Any], environ: Mapping[str, str], code_sha256: str | None
) -> str:
    folders = [folder for folder in (export, base_folder_of(export)) if folder is not None]
    size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    child = subprocess.run(
        [sys.executable, "-m", program, str(export), *([] if code_sha256 is None else [code_sha256])],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=dict(environ),
        timeout=max(SHORTEST_TIMEOUT_SECONDS, size / READ_BYTES_PER_SECOND),
    )
    if child.returncode != 0:
        said = child.stderr.strip()
        last_line = said.splitlines()[-1] if said else f"its process ended with status {child.returncode}"
        raise CoremillError(last_line, why=said[-2000:])
    # The last line: a model's own code may print.
    return str(json.loads(child.stdout.strip().splitlines()[-1])["completion"])


def load_export(model_class: str, export: str, code_sha256: str | None, labels: int | None) -> tuple[Any, Any]:
    """Model and tokenizer of an export, an adapter's beside its base, whose head has so many `labels`."""
    import transformers

    trusted, adapter = code_sha256 is not None, base_folder_of(Path(export))
    base = Path(export) if adapter is None else adapter
    if code_sha256 is not None:
        cache = cache_folder(environment_snapshot()).absolute()
        base = checked_copy(base.absolute(), code_sha256, cache)
        export = str(checked_copy(Path(export).absolute(), code_sha256, cache))
    tokenizer = transformers.AutoTokenizer.from_pretrained(export, trust_remote_code=trusted)
    of_head: dict[str, Any] = {}
    if adapter is not None and labels is not None:  # the head is the adapter's; the base may have another
        of_head = {"num_labels": labels, "ignore_mismatched_sizes": True}
    loaded = getattr(transformers, model_class).from_pretrained(base, trust_remote_code=trusted, **of_head)
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, export, trust_remote_code=False)
    return loaded.eval(), tokenizer


def run_program(say: Callable[[Mapping[str, Any], str, str | None], str]) -> None:
    """The main part of a task's program."""
    asked = json.load(sys.stdin)
    code_sha256 = sys.argv[2] if len(sys.argv) > 2 else None
    print(json.dumps({"completion": say(asked, sys.argv[1], code_sha256)}))
