"""Tutorials as they are written, walked for everything that can be set: no key, flag or variable is forgotten.

The walk is over what is in tests/golden/brought, and over the tutorials themselves (Markdown) where a folder of them is
beside the repository, as shared/seeds.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from coremill.config.document import read_document
from coremill.config.keys import keys
from coremill.config.unknown_keys import explain_unknown_key
from unit.config.brought import BROUGHT, fates, imported, loaded, names_in

SEEDS = Path(__file__).parents[4] / "shared" / "seeds"
TUTORIALS = sorted(SEEDS.glob("*.txt"))
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
START = re.compile(r"(?:^|\s)(?:mpirun|torchrun|accelerate launch|python -m intel_extension\S+|python3 train\.py)\s")
# Of the calls in them, those whose arguments are settings.
CALLS = ("TrainingArguments", "from_pretrained", "tokenizer")
# Settings in a script's text that are no settings of a training: objects of Python.
OBJECTS = {"config", "args", "model", "train_dataset", "tokenizer"}


def blocks() -> list[str]:
    return [block for path in TUTORIALS for block in BLOCK.findall(path.read_text(encoding="utf-8"))]


@pytest.mark.skipif(not TUTORIALS, reason="no tutorials are beside the repository")
def test_every_file_in_the_tutorials(tmp_path):
    files = [block for block in blocks() if "compute_environment:" in block or '"zero_optimization"' in block]
    assert len(files) == 3
    for number, text in enumerate(files):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        found = imported(str(path))
        for key in names_in(read_document(text).value):
            assert re.search(rf"\b{re.escape(key)}\b", found.text), key
        assert "unknown" not in fates(found).values()
        loaded(tmp_path, found.text)


@pytest.mark.skipif(not TUTORIALS, reason="no tutorials are beside the repository")
def test_every_command_in_the_tutorials(tmp_path):
    commands = [block for block in blocks() if START.search(block)]
    commands = [block for block in commands if "import torch" not in block and "$ accelerate config" not in block]
    assert len(commands) == 10
    for text in commands:
        text = text.partition("\n[Gloo]")[0]  # what it printed
        found = imported(text, is_command=True)
        below = found.text.partition("\n\n")[2]
        kept = "\n".join(line for line in text.splitlines() if "$(" not in line).replace("python -m", "python")
        for word in re.findall(r"(?<![\w\"$-])(-{1,2}[a-z][\w]*|[A-Z_]{4,}(?==))", kept):
            assert word in below, (word, text)
        assert "unknown" not in fates(found).values()
        loaded(tmp_path, found.text)


@pytest.mark.skipif(not TUTORIALS, reason="no tutorials are beside the repository")
def test_every_setting_in_their_scripts_is_explained_in_a_run_file():
    named: set[str] = set()
    for block in blocks():
        try:
            tree = ast.parse(block.replace("with Init(): # 이", "with Init(): # "))
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in CALLS:
                named |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                named.add(node.targets[0].attr)
    assert {"overwrite_output_dir", "device_map", "padding_side", "pad_token", "logging_steps", "local_rank"} <= named
    for name in named - OBJECTS - {key.name for key in keys().values()}:
        unknown = explain_unknown_key("", name, True)
        assert not unknown.is_guess, name


KEYS = """\
overwrite_output_dir do_train do_eval logging_steps local_rank compute_environment downcast_bf16 machine_rank
main_process_ip main_process_port main_training_function mpirun_config mpirun_ccl mpirun_hostfile rdzv_backend
same_network tpu_env tpu_use_cluster tpu_use_sudo steps_per_print attn_implementation low_cpu_mem_usage device_map
padding_side pad_token overlap_comm contiguous_gradients stage3_max_live_parameters stage3_prefetch_bucket_size
stage3_param_persistence_threshold offload_optimizer offload_param zero_optimization ipex_config use_cpu no_cuda
use_ipex
"""


@pytest.mark.parametrize("name", KEYS.split())
def test_each_is_answered_with_a_reason_and_no_guess(name):
    unknown = explain_unknown_key("", name, True)
    assert not unknown.is_guess and "did you mean" not in unknown.do
    assert unknown.why and "is not in" not in unknown.why


def test_the_page_is_what_its_command_prints():
    from scripts.settings_of_other_tools import COMMANDS, FILES, render_page

    page = (BROUGHT.parents[2] / "docs" / "settings-of-other-tools.md").read_text(encoding="utf-8")
    assert page == render_page(), "run: python scripts/settings_of_other_tools.py > docs/settings-of-other-tools.md"
    assert {*COMMANDS, *FILES} == {path.name for path in BROUGHT.iterdir()}


def test_the_same_tutorials_are_kept_here():
    """What the walk over the tutorials would find without them: the files and commands of this repository."""
    assert len(list(BROUGHT.glob("*.yaml")) + list(BROUGHT.glob("*.json"))) == 3
    assert len(list(BROUGHT.glob("*.sh"))) == 9  # srun.sh is in none of them
