"""A completion by the exported model, in a process of its own: proof that the export loads, and something to look at.

python -m coremill.sample EXPORT_FOLDER TOKENS [CODE_SHA256]    stdin and stdout are JSON: prompt, begin_ids; completion
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coremill.config.schema import SampleSection
from coremill.errors import CoremillError
from coremill.hardware.probe import cache_folder, environment_snapshot
from coremill.remote_code import checked_copy
from coremill.report.events import EventWriter

TIMEOUT_SECONDS = 600


def write_sample(
    export: Path,
    sample: SampleSection,
    run_folder: Path,
    environ: Mapping[str, str],
    *,
    begin_ids: Sequence[int],
    code_sha256: str | None,
) -> None:
    """Ask the export for a completion and add it to rank 0's events; its own code is run where this is its hash.

    The prompt begins with `begin_ids`, as the documents of the training did.
    """
    assert sample.prompt is not None
    trusted = [] if code_sha256 is None else [code_sha256]
    child = subprocess.run(
        [sys.executable, "-m", "coremill.sample", str(export), str(sample.tokens), *trusted],
        input=json.dumps({"prompt": sample.prompt, "begin_ids": list(begin_ids)}),
        capture_output=True,
        text=True,
        env=dict(environ),
        timeout=TIMEOUT_SECONDS,
    )
    if child.returncode != 0:
        raise CoremillError(
            "the exported model gave no completion", where=str(export), why=child.stderr.strip()[-2000:]
        )
    with EventWriter(run_folder, 0) as events:
        events.write("sample", prompt=sample.prompt, completion=json.loads(child.stdout)["completion"])


def complete(export: str, prompt: str, tokens: int, begin_ids: list[int], code_sha256: str | None = None) -> str:
    """A sampled completion, the same every time; greedy, a small model repeats one token for ever."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trusted = code_sha256 is not None
    if code_sha256 is not None:
        cache = cache_folder(environment_snapshot()).absolute()
        export = str(checked_copy(Path(export).absolute(), code_sha256, cache))
    tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=trusted)
    model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=trusted)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if ids[: len(begin_ids)] != begin_ids:
        ids = [*begin_ids, *ids]
    inputs = torch.tensor([ids])
    torch.manual_seed(0)
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    text: str = tokenizer.decode(output[0][len(ids) :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    found = complete(sys.argv[1], asked["prompt"], int(sys.argv[2]), asked["begin_ids"], *sys.argv[3:])
    print(json.dumps({"completion": found}))
