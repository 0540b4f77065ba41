"""A completion by the exported model, in a process of its own: proof that the export loads, and something to look at.

    python -m coremill.tasks.causal_lm.sample EXPORT_FOLDER TOKENS [CODE_SHA256]

Through stdin and stdout goes JSON: prompt, begin_ids and, where the model was trained on conversations, the ids that
end an answer; completion.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coremill.config.schema import SampleSection
from coremill.errors import CoremillError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.model.lora_base import base_folder_of
from coremill.remote_code import checked_copy

SHORTEST_TIMEOUT_SECONDS = 600.0
# Slow on purpose: a network disk under load, and memory that is shared with others.
READ_BYTES_PER_SECOND = 10e6
GENERATE_BYTES_PER_SECOND = 1e9


def ask_for_sample(
    export: Path,
    sample: SampleSection,
    environ: Mapping[str, str],
    *,
    begin_ids: Sequence[int],
    code_sha256: str | None,
    chat_end_ids: Sequence[int] | None = None,
) -> dict[str, str]:
    """The fields of the event `sample`: a completion by the export; its own code is run where this is its hash.

    The prompt begins with `begin_ids`, as the documents of the training did; with `chat_end_ids` it is what a user
    says, through the chat template, and the completion ends with one of these. The training is done: an export that
    gives none is a finding of the report, and fails no run.
    """
    assert sample.prompt is not None
    found: dict[str, str]
    try:
        asked = {"prompt": sample.prompt, "begin_ids": list(begin_ids)}
        if chat_end_ids is not None:
            asked["chat_end_ids"] = list(chat_end_ids)
        found = {"completion": _ask(export, sample, environ, asked, code_sha256)}
    except subprocess.TimeoutExpired as error:
        found = {"problem": f"the exported model gave no completion within {error.timeout:,.0f} s"}
    except CoremillError as error:
        found = {"problem": f"the exported model gave no completion: {error.what}", "details": error.why or ""}
    except (OSError, ValueError, LookupError) as error:
        found = {"problem": f"the exported model gave no completion: {type(error).__name__}: {error}"}
    return {"prompt": sample.prompt, **found}


def timeout_seconds(export: Path, tokens: int, base: Path | None = None) -> float:
    """How long a slow disk and a slow memory may take to read the export, with the `base` of an adapter, once and to go
    through it for every token."""
    folders = [export] if base is None else [export, base]
    size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    return max(SHORTEST_TIMEOUT_SECONDS, size / READ_BYTES_PER_SECOND + tokens * size / GENERATE_BYTES_PER_SECOND)


def _ask(
    export: Path,
    sample: SampleSection,
    environ: Mapping[str, str],
    asked: Mapping[str, object],
    code_sha256: str | None,
) -> str:
    trusted, base = [] if code_sha256 is None else [code_sha256], base_folder_of(export)
    child = subprocess.run(
        [sys.executable, "-m", "coremill.tasks.causal_lm.sample", str(export), str(sample.tokens), *trusted],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=dict(environ),
        timeout=timeout_seconds(export, sample.tokens, base),
    )
    if child.returncode != 0:
        said = child.stderr.strip()
        last_line = said.splitlines()[-1] if said else f"its process ended with status {child.returncode}"
        raise CoremillError(last_line, why=said[-2000:])
    # The last line: a model's own code may print.
    return str(json.loads(child.stdout.strip().splitlines()[-1])["completion"])


def complete(
    export: str,
    prompt: str,
    tokens: int,
    begin_ids: list[int],
    code_sha256: str | None = None,
    *,
    chat_end_ids: list[int] | None = None,
) -> str:
    """A sampled completion, the same every time; greedy, a small model repeats one token for ever."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trusted, adapter = code_sha256 is not None, base_folder_of(Path(export))
    base = Path(export) if adapter is None else adapter
    if code_sha256 is not None:
        cache = cache_folder(environment_snapshot()).absolute()
        base = checked_copy(base.absolute(), code_sha256, cache)
        export = str(checked_copy(Path(export).absolute(), code_sha256, cache))
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=trusted)
    model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=trusted)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, export, trust_remote_code=trusted)
    if chat_end_ids is not None:
        asked = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if ids[: len(begin_ids)] != begin_ids:
        ids = [*begin_ids, *ids]
    if not ids:  # an empty prompt: what a document may follow
        ids = [tokenizer.eos_token_id]
    inputs = torch.tensor([ids])
    torch.manual_seed(0)
    stops = {} if not chat_end_ids else {"eos_token_id": _with_own_stops(model, chat_end_ids)}
    output = model.generate(
        inputs,
        **stops,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    text: str = tokenizer.decode(output[0][len(ids) :], skip_special_tokens=True)
    return text


def _with_own_stops(model: Any, end_ids: list[int]) -> list[int]:
    own = model.generation_config.eos_token_id
    return sorted({*end_ids, *(own if isinstance(own, list) else [] if own is None else [own])})


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    found = complete(
        sys.argv[1],
        asked["prompt"],
        int(sys.argv[2]),
        asked["begin_ids"],
        *sys.argv[3:],
        chat_end_ids=asked.get("chat_end_ids"),
    )
    print(json.dumps({"completion": found}))
