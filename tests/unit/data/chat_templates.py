"""Chat templates of well-known models, written down in a short form that writes the same, each with a tokenizer.

The tokenizers are byte-level BPE of a few hundred tokens, made on the spot, with the special tokens of the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

CORPUS = [
    "the mill turns and the store holds",
    "numbers go in\nnumbers come out\n",
    "who are you? I am a mill.",
    "ünïcödé 文",
]

CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
<|im_start|>system
You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>
{% endif -%}
{%- if tools -%}{{ '<|im_start|>system\\n# Tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LLAMA3 = """\
{%- for message in messages -%}
{%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -%}
{%- set content = header + message['content'] | trim + '<|eot_id|>' -%}
{%- if loop.index0 == 0 -%}{%- set content = bos_token + content -%}{%- endif -%}
{{- content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""
MISTRAL = """\
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{- ' [INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] + ' [/INST]' -}}
{%- else -%}
{{- ' ' + message['content'] + eos_token -}}
{%- endif -%}
{%- endfor -%}
"""
GEMMA = """\
{{- bos_token -}}
{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
PHI3 = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
ZEPHYR = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
# Thoughts of answers that are not the last are left out, and an empty one is written where the last has none.
QWEN3 = """\
{%- set last = namespace(user=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > last.user -%}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content -%}
{%- endif -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# An empty thought is written into a last turn, and not into the same turn once a tool has replied.
QWEN3_CALLS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and (loop.last or message.reasoning_content) -%}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n' + ((call.function or call) | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# The header of an answer to come opens a thought; that of one that is there does not.
R1 = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|User|>' + message.content -}}{%- endif -%}
{%- if message.role == 'assistant' -%}{{- '<|Assistant|>' + message.content + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|><think>\\n' -}}{%- endif -%}
"""
MARKED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- 'A: ' -}}{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- 'Q: ' + message.content + '\\n' -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True)
class Family:
    """A template, and the special tokens it writes."""

    name: str
    template: str
    end: str  # behind an answer
    tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    has_system: bool = True
    blank_in_front: bool = False  # joined to the first word of an answer


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", CHATML, "<|im_end|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        Family(
            "llama3", LLAMA3, "<|eot_id|>",
            ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|end_of_text|>", "<|begin_of_text|>",
        ),
        Family("mistral", MISTRAL, "</s>", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "<s>", blank_in_front=True),
        Family(
            "gemma", GEMMA, "<end_of_turn>", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>",
            has_system=False,
        ),
        Family(
            "phi3", PHI3, "<|end|>", ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
            "<|endoftext|>",
        ),
        Family("zephyr", ZEPHYR, "</s>", ("<s>", "</s>"), "</s>", "<s>"),
    )
}  # fmt: skip
REASONING = {
    "qwen3": Family("qwen3", QWEN3, "<|im_end|>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3 calls": Family("qwen3 calls", QWEN3_CALLS, "<|im_end|>", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "r1": Family("r1", R1, "<|eos|>", ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"), "<|eos|>", "<|bos|>"),
    "marked": Family("marked", MARKED, "</s>", ("</s>",), "</s>"),
}


def make_chat_tokenizer(folder: Path, family: Family, *, template: bool = True) -> Path:
    """A folder as a model's has it: tokenizer.json, its config, and the template inside of that."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in family.tokens])
    if family.bos is not None:  # which the tokenizer puts in front of a text by itself, and the template does too
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos}
    settings |= {} if family.bos is None else {"bos_token": family.bos}
    settings |= {"chat_template": family.template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
