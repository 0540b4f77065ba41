"""A tiny model that brings its own code: Llama under another name, which transformers does not know.

add_own_code(make_model(tmp_path / "m", "llama"))    # config.json gets an auto_map, code files lie beside it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGURATION = """\
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own-mill"
"""
MODELING = """\
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
# Its end token is known to the class alone.
TOKENIZATION = """\
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, eos_token="<|end|>", **options):
        super().__init__(*args, eos_token=eos_token, **options)
"""
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def add_own_code(folder: Path, **changes: Any) -> Path:
    """Make the model of a folder one with code of its own."""
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own-mill", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_own_tokenizer(folder: Path) -> Path:
    """The same for the tokenizer in the folder."""
    (folder / "tokenization_own.py").write_text(TOKENIZATION)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder
