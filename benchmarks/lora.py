"""Adapters beside a large model: `python -m benchmarks.lora [--shape 8B] [--ranks 1] [--only coremill,peft]`.

A folder of random weights of that shape is made on disk, in bf16; then, one after the other and each in processes of
its own, on the same number of rows and tokens:

  coremill  `coremill train` with `lora.rank`; with `--ranks 4` these share one copy of the base
  peft      peft's adapters of the same rank on the same maps under HF Trainer, one process on all cores

Prints memory planned and measured, tokens per second, utilization (of coremill's calibrated matmul rate, both by the
same count of FLOPs: 4 per weight and 6 per number of the adapters) and the ratio. `PSS of all` is what the whole tree
of processes takes together, pages that several have in common counted once: what a machine has to have. Asserts
nothing. Needs nothing but coremill's own needs and peft.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "lora"
SAMPLE_SECONDS = 2.0
SHARD_BYTES = 2 * 10**9
BLOCK_NUMBERS = 2**24


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


SHAPES = {
    "8B": _llama(4096, 14336, 32, 32, 8, 128256, tied=False),  # Llama-3-8B
    "3B": _llama(3072, 8192, 28, 24, 8, 128256, tied=True),  # Llama-3.2-3B
    "1B": _llama(2048, 8192, 16, 32, 8, 128256, tied=True),  # Llama-3.2-1B
    "10M": _llama(256, 704, 8, 4, 2, 8192, tied=False),  # to try the command itself
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 where something failed."""
    options = _parse(argv)
    if options.make:
        make_model(Path(options.make), SHAPES[options.shape])
        return 0
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"model-{options.shape}"
    if not (model / "done").exists():
        print(f"making {options.shape} of random weights in {model}", flush=True)
        shutil.rmtree(model, ignore_errors=True)
        make = [sys.executable, "-m", "benchmarks.lora", "--make", str(model), "--shape", options.shape]
        subprocess.run(make, check=True, cwd=ROOT, env=_environment())
    found: dict[str, dict[str, Any]] = {}
    for name in options.only.split(","):
        print(f"{name} ...", flush=True)
        try:
            found[name] = {"coremill": run_coremill, "peft": run_peft}[name](options, folder, model, found)
        except subprocess.SubprocessError as error:
            print(f"  failed: {error}", flush=True)
            return 1
        print("\n".join(f"  {line}" for line in lines_of(found[name])), flush=True)
    if len(found) == 2:
        ratio = found["coremill"]["tokens_per_second"] / found["peft"]["tokens_per_second"]
        memory = found["coremill"]["pss_bytes_of_all"] / found["peft"]["pss_bytes_of_all"]
        print(f"coremill / peft under HF Trainer: {ratio:.2f} times the tokens/s in {memory:.2f} of the memory")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, **found}, indent=1) + "\n")
    return 0


def run_coremill(options: argparse.Namespace, folder: Path, model: Path, _: object) -> dict[str, Any]:
    """As a user would: a run file and the documented command line."""
    run = folder / f"coremill-{options.shape}-{options.ranks}"
    shutil.rmtree(run, ignore_errors=True)
    document = {
        "model": {"name": str(model)},
        "tokenizer": "built-in",
        "data": {"source": "built-in", "sequence_length": options.length},
        "train": {
            "steps": options.steps + 1,
            "tokens_per_step": options.tokens,
            "learning_rate": 1e-4,
            "micro_batch_rows": options.rows or "auto",
            "activation_checkpointing": _choice(options.checkpointing),
        },
        "lora": {"rank": options.rank},
        "parallel": {"ranks_per_node": options.ranks, "engine": options.engine},
        "checkpoint": {"every": "never"},
        "run": {"folder": str(run), "export": False},
    }
    run_file = run.with_suffix(".yaml")
    run_file.write_text(json.dumps(document, indent=1))  # JSON is YAML
    command = [sys.executable, "-m", "coremill", "train", str(run_file), "--fresh"]
    pss_bytes = run_watched(command, run.with_suffix(".log"), options.timeout)
    report = json.loads((run / "report.json").read_text())
    plan = json.loads((run / "plan.json").read_text())
    planned = plan["memory_bytes_per_rank"]["total"]
    steps = [event for event in _events(run) if event["kind"] == "step"]
    # As plans count pages of libraries, which the kernel maps from its cache as it likes (benchmarks/plan_table.py).
    measured = max(event["peak_rss_bytes"] - event["mapped_file_bytes"] for event in steps) + 80_000_000
    return {
        "ranks": options.ranks,
        "engine": plan["engine"]["value"],
        "dtype": plan["dtype"]["value"],
        "rows_per_pass": plan["micro_batch_rows"]["value"],
        "recomputing": plan["activation_checkpointing"]["value"],
        "flops_per_token": plan["model_flops_per_token"],
        "matmul_flops_per_second": report["matmul_flops_per_second"],
        "tokens_per_second": report["tokens_per_second"],
        "tokens_per_second_planned": plan["tokens_per_second"],
        "utilization": report["utilization"],
        "bytes_planned_per_rank": planned,
        "bytes_measured_per_rank": measured,
        "load_seconds": report["load_seconds"],
        "pss_bytes_of_all": pss_bytes,
    }


def run_peft(
    options: argparse.Namespace, folder: Path, model: Path, found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The same rows at a time, and recomputing where coremill does."""
    beside = found.get("coremill", {})
    recomputing = beside.get("recomputing", bool(_choice(options.checkpointing) is True))
    rows = options.rows or beside.get("rows_per_pass", 1) * beside.get("ranks", 1)
    rows = min(rows, options.tokens // options.length)
    out = folder / f"peft-{options.shape}.json"
    command = [sys.executable, "-m", "benchmarks.contenders.peft_trainer", "--model", str(model), "--out", str(out)]
    command += ["--rows", str(rows), "--passes", str(options.tokens // options.length // rows)]
    command += ["--length", str(options.length), "--steps", str(options.steps + 1), "--rank", str(options.rank)]
    command += ["--dtype", options.peft_dtype or beside.get("dtype", "bf16"), "--vocabulary", "4096"]
    command += ["--recomputing"] if recomputing else []
    pss_bytes = run_watched(command, out.with_suffix(".log"), options.timeout)
    record = json.loads(out.read_text())
    seconds = statistics.median(record["step_seconds"][1:])
    tokens_per_second = record["tokens_per_step"] / seconds
    rate = beside.get("matmul_flops_per_second")
    return {
        "ranks": 1,
        "dtype": record["dtype"],
        "rows_per_pass": rows,
        "recomputing": recomputing,
        "trained": record["trained"],
        "tokens_per_second": tokens_per_second,
        "utilization": tokens_per_second * beside["flops_per_token"] / rate if rate else None,
        "bytes_measured_per_rank": record["peak_rss_bytes"],
        "pss_bytes_of_all": pss_bytes,
    }


def lines_of(one: dict[str, Any]) -> Iterator[str]:
    """What was found, for people."""
    recomputing = ", recomputing" if one["recomputing"] else ""
    ranks = f"{one['ranks']} rank{'s' if one['ranks'] > 1 else ''}"
    yield f"{ranks}, {one['dtype']}, {one['rows_per_pass']} rows at a time{recomputing}"
    measured = one["bytes_measured_per_rank"]
    words = f"memory per rank: measured {measured / 1e9:.2f} GB"
    if planned := one.get("bytes_planned_per_rank"):
        words += f", planned {planned / 1e9:.2f} GB ({100 * (planned / measured - 1):+.1f} %)"
    yield f"{words}; PSS of all {one['pss_bytes_of_all'] / 1e9:.2f} GB"
    speed = f"{one['tokens_per_second']:.4g} tokens/s"
    if one.get("tokens_per_second_planned"):
        speed += f" (planned {one['tokens_per_second_planned']:.4g})"
    yield speed + (f", utilization {100 * one['utilization']:.1f} %" if one["utilization"] is not None else "")


# -- processes


def run_watched(command: Sequence[str], log: Path, timeout_seconds: float) -> int:
    """To the end, or to the time limit; the most that all its processes had together, by what the kernel says of each
    (PSS: what several share is divided among them)."""
    most_bytes = 0
    with log.open("wb") as output:
        leader = subprocess.Popen(list(command), cwd=ROOT, env=_environment(), stdout=output, stderr=output)
    ended = threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not ended.wait(SAMPLE_SECONDS):
            most_bytes = max(most_bytes, sum(map(_pss_bytes, _tree(leader.pid))))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = leader.wait(timeout_seconds)
    except BaseException:
        leader.terminate()  # coremill ends its ranks
        leader.wait()
        raise
    finally:
        ended.set()
        watcher.join()
    if code:
        raise subprocess.SubprocessError(f"it ended with {code}; see {log}")
    return most_bytes


def _tree(leader: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = [leader]
    for parent in found:  # grows while it is walked
        found += [pid for pid, above in parents.items() if above == parent]
    return found


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _environment() -> dict[str, str]:
    """The sources of this tree before what the caller's PYTHONPATH names; no threads decided for anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "KMP_", "MKL_"))}
    path = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}


def _events(run: Path) -> Iterator[dict[str, Any]]:
    for file in sorted((run / "events").glob("rank-*.jsonl")):
        yield from map(json.loads, file.read_text().splitlines())


# -- the model


def make_model(folder: Path, config: dict[str, Any]) -> None:
    """config.json and bf16 weights in several files; never more than one of them in memory. Numbers are drawn once and
    taken from other places for each tensor: 16 GB of them in the time that writing takes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(7)
    drawn = (torch.randn(BLOCK_NUMBERS) * 0.02).to(torch.bfloat16)
    named = dict(model.named_parameters())
    pieces: list[list[str]] = [[]]
    sizes = [0]
    for name, parameter in named.items():
        if pieces[-1] and sizes[-1] + 2 * parameter.numel() > SHARD_BYTES:
            pieces.append([])
            sizes.append(0)
        pieces[-1].append(name)
        sizes[-1] += 2 * parameter.numel()
    places = {}
    for number, names in enumerate(pieces, 1):
        file = f"model-{number:05d}-of-{len(pieces):05d}.safetensors"
        tensors = {name: _numbers(drawn, named[name], place) for place, name in enumerate(names, 1000 * number)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update({name: file for name in names})
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "done").touch()


def _numbers(drawn: Any, parameter: Any, place: int) -> Any:
    import torch

    if parameter.dim() == 1:
        return torch.ones(parameter.shape, dtype=torch.bfloat16)
    begun = drawn.roll(place * 7919)
    return begun.repeat(-(-parameter.numel() // drawn.numel()))[: parameter.numel()].view(parameter.shape).clone()


def _choice(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, "auto")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8B")
    parser.add_argument("--only", default="coremill,peft", help="which to run, in that order")
    parser.add_argument("--ranks", type=int, default=1, help="of coremill; they share the base (default 1)")
    parser.add_argument("--engine", default="auto", help="of coremill: auto, replicate or shard")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default 16)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row (default 512)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, all ranks (default 4096)")
    parser.add_argument("--rows", type=int, default=0, help="of a forward pass (default: as coremill plans)")
    parser.add_argument("--checkpointing", choices=("auto", "true", "false"), default="auto")
    parser.add_argument("--peft-dtype", choices=("fp32", "bf16"), help="of peft (default: as coremill's)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one that is not (default 3)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for each (default 1800)")
    parser.add_argument("--folder", default=str(FOLDER), help="where model, logs and runs go; 16 GB for 8B")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    began = time.monotonic()
    status = main()
    if "--make" not in sys.argv:
        print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(status)
