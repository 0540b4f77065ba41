"""A tokenizer folder: what identifies it, the special tokens it puts around a text, and many texts to ids at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coremill.data.cache import build_once
from coremill.errors import InputError
from coremill.files import at_home
from coremill.remote_code import checked_copy

# Everything a tokenizer can be made of; weights and model configs beside it must not change the key.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# Beside these: what some tokenizers of transformers have more, and templates. What else lies there is not theirs.
OTHER_FILES = (
    "chat_template.json",
    "normalizer.json",
    "spm.model",
    "spm_char.model",
    "sentencepiece.model",
    "prophetnet.tokenizer",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "target_vocab.json",
    "source.spm",
    "target.spm",
    "word_shape.json",
    "word_pronunciation.json",
)
FILE_SUFFIXES = (".jinja", ".tiktoken")
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
SpecialTokens = Literal["auto", "none"]
PROBES = ("a", "the mill", "0", "文")  # one whose ids are none of the special ones


@dataclass(frozen=True)
class SpecialIds:
    """What a tokenizer puts around one text: BOS in front with Llama-3, Gemma and Mistral, nothing with GPT-2."""

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextTokenizer:
    """What packing needs of a tokenizer."""

    name: str
    encode: Callable[[list[str]], Sequence[Sequence[int]]]
    token_of: Callable[[int], str]
    eos_id: int
    highest_id: int
    around: SpecialIds | None = None  # its own rule; None: left aside (data.special_tokens: none)
    backend: Any = None  # of the tokenizers library, which knows where in a text a token stands; None: there is none


def tokenizer_identity(folder: Path) -> str:
    """A hash over the content of its files."""
    digest = hashlib.blake2b(digest_size=20)
    found = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise InputError(
            "there is no tokenizer in this folder",
            where=f"tokenizer: {folder}",
            why="it has no tokenizer.json, nor any other file of a tokenizer",
            do="name a hub id or folder that has one in the key tokenizer, or built-in",
        )
    for name in found:
        digest.update(repr(name).encode())
        digest.update((folder / name).read_bytes())
    # Vocabularies of rarer names; templates are the business of whoever renders conversations.
    for path in files_of_tokenizer(folder):
        if path.name not in (*TOKENIZER_FILES, "chat_template.json") and path.suffix != ".jinja":
            digest.update(repr(path.name).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def files_of_tokenizer(folder: Path) -> list[Path]:
    """Those that a copy of it needs: known ones, templates, and what its config names; never all that lies there."""
    known = {*TOKENIZER_FILES, *OTHER_FILES, *_named_files(folder)}
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.name in known or path.name.endswith(FILE_SUFFIXES))
    ]


def _named_files(folder: Path) -> set[str]:
    """Files that tokenizer_config.json names, as `vocab_file` and the like."""
    try:
        document = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return {value for key, value in document.items() if key.endswith("_file") and isinstance(value, str)}
    except (OSError, ValueError, AttributeError):
        return set()


def chat_template_of(folder: Path) -> str | None:
    """How a tokenizer writes a conversation down: from the file of its own, or from where older ones keep it."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                template = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
                if isinstance(template, list):  # several, each with a name
                    template = {each["name"]: each["template"] for each in template}.get("default")
                if isinstance(template, str):
                    return template
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return None


def required_chat_template(folder: Path) -> str:
    """The tokenizer's, which is that of data.chat_template where one is named (model/source.py)."""
    template = chat_template_of(folder)
    if template is None:
        raise InputError(
            "the tokenizer has no chat template",
            where=f"tokenizer: {folder}",
            why="conversations become text by it: base models come without one, their chat variants with one",
            do="set tokenizer to that of the model's chat variant, or data.chat_template to a file with a Jinja"
            " template (coremill's examples/data/chat-template.jinja goes with any tokenizer;"
            " docs/guide/conversations.md)",
        )
    return template


def with_chat_template(folder: Path, file: str, cache: Path) -> Path:
    """A copy of a tokenizer with the template of a file, in the cache: it goes wherever the tokenizer goes."""
    try:
        template = at_home(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            "the chat template cannot be read",
            where=f"data.chat_template: {file}",
            why=str(getattr(error, "strerror", None) or "it is not UTF-8"),
            do="name a file with a Jinja template, or leave the key out to use the tokenizer's own",
        ) from None
    digest = hashlib.blake2b(f"{tokenizer_identity(folder)} {template}".encode(), digest_size=12)
    # Without a class in its own config, a tokenizer has that of the model's.
    copied = [*files_of_tokenizer(folder), *(path for path in [folder / "config.json"] if path.is_file())]
    for path in copied:
        digest.update(repr(path.name).encode())
        digest.update(hashlib.blake2b(path.read_bytes()).digest())

    def build(partial: Path) -> None:
        for path in copied:
            (partial / path.name).write_bytes(path.read_bytes())
        (partial / TEMPLATE_FILE).write_text(template, encoding="utf-8")

    final = cache / "tokenizers" / digest.hexdigest()
    build_once(final, is_whole=lambda made: (made / TEMPLATE_FILE).is_file(), build=build, on_wait=lambda: None)
    return final


def write_chat_templates(destination: Path, tokenizer_folder: Path, model_folder: Path | None) -> None:
    """Add to a copy of the tokenizer's files what it lacks: templates in a folder of their own, and the model's own one
    where another tokenizer was named and has none."""
    origin, template = tokenizer_folder, None
    if model_folder is not None and chat_template_of(tokenizer_folder) is None:
        origin, template = model_folder, chat_template_of(model_folder)
    if template is not None:
        (destination / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    for path in sorted((origin / MORE_TEMPLATES).glob("*.jinja")):
        (destination / MORE_TEMPLATES).mkdir(exist_ok=True)
        (destination / MORE_TEMPLATES / path.name).write_bytes(path.read_bytes())


def load_tokenizer(
    folder: Path, special_tokens: SpecialTokens = "auto", *, code_sha256: str | None = None, cache: Path | None = None
) -> TextTokenizer:
    """The fast tokenizer of tokenizer.json where there is one, else whatever transformers makes of the folder.

    With `code_sha256` that may take running code of the folder: only code of this hash, copied into `cache`.
    """
    if not (folder / "tokenizer.json").is_file():
        return _through_transformers(folder, special_tokens, code_sha256, cache)
    tokenizer = read_backend(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end_token = _written_end_token(folder)
    eos_id = None if end_token is None else tokenizer.token_to_id(end_token)
    if eos_id is None:
        # Some folders leave it to the class of the tokenizer (GPT-2's do), which only transformers knows.
        eos_id = _through_transformers(folder, "none", code_sha256, cache).eos_id

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_one(text: str, added: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=added).ids)

    # transformers too takes the rule of tokenizer.json, and leaves add_bos_token of tokenizer_config.json aside.
    return TextTokenizer(
        name=str(folder),
        encode=encode,
        token_of=lambda token_id: str(tokenizer.id_to_token(token_id)),
        eos_id=eos_id,
        highest_id=max(tokenizer.get_vocab(with_added_tokens=True).values()),
        around=ids_around_a_text(encode_one, folder) if special_tokens == "auto" else None,
        backend=tokenizer,
    )


def read_backend(folder: Path) -> Any:
    """What the tokenizers library makes of tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise InputError(
            "the tokenizer cannot be read",
            where=str(folder / "tokenizer.json"),
            why=str(error),
            do="download or copy it again",
        ) from None


def ids_around_a_text(encode: Callable[[str, bool], list[int]], folder: Path) -> SpecialIds:
    """What the tokenizer's rule for one text adds in front and behind, asked once and not of every text."""
    added = encode("", True)
    if not added:
        return SpecialIds()
    for text in PROBES:
        plain, whole = encode(text, False), encode(text, True)
        if not plain or set(plain) & set(added):
            continue
        for start in range(len(whole) - len(plain) + 1):
            begin, middle, end = whole[:start], whole[start : start + len(plain)], whole[start + len(plain) :]
            if middle == plain and begin + end == added:
                return SpecialIds(tuple(begin), tuple(end))
    raise InputError(
        "the tokenizer changes a text when it adds its special tokens",
        where=f"tokenizer: {folder}",
        why="what it puts in front of a document and behind it cannot be told",
        do="leave them out: --set data.special_tokens=none",
    )


def _written_end_token(folder: Path) -> str | None:
    """The end token as the folder's own JSON names it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            token: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError) as error:
            raise InputError("not the JSON of a tokenizer", where=str(folder / name), why=str(error)) from None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def tokens_of_class(folder: Path, names: Sequence[str], code_sha256: str | None, cache: Path) -> dict[str, str]:
    """Special tokens of these names that a tokenizer has by its class, which only transformers knows."""
    try:
        found = transformers_tokenizer(folder, code_sha256, cache).special_tokens_map
    except InputError as problem:
        raise InputError(
            f"whether the tokenizer has a {' and a '.join(names)} cannot be told",
            where=f"tokenizer: {folder}",
            why=f"the chat template writes it, no file of the tokenizer names it, and {problem.what}: {problem.why}",
            do="name it in its tokenizer_config.json, as null where there is none",
        ) from None
    return {name: str(found[name]) for name in names if found.get(name)}


def transformers_tokenizer(folder: Path, code_sha256: str | None, cache: Path | None) -> Any:
    """What transformers makes of the folder, running code of it only where that has this hash."""
    from transformers import AutoTokenizer

    trusted = code_sha256 is not None and cache is not None
    if code_sha256 is not None and cache is not None:
        folder = checked_copy(folder.absolute(), code_sha256, cache)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trusted)
    except Exception as error:  # ImportError, ValueError, OSError and more, by tokenizer
        raise InputError(
            "transformers cannot make a tokenizer of this folder",
            where=f"tokenizer: {folder}",
            why=" ".join(str(error).split())[:400],
            do="name a folder that has a tokenizer.json",
        ) from None


def _through_transformers(
    folder: Path, special_tokens: SpecialTokens, code_sha256: str | None, cache: Path | None
) -> TextTokenizer:
    tokenizer = transformers_tokenizer(folder, code_sha256, cache)
    if tokenizer.eos_token_id is None:
        raise InputError(
            "the tokenizer has no end token",
            where=f"tokenizer: {folder}",
            why="documents are separated by it in packed rows",
            do='name one of its tokens as "eos_token" in its tokenizer_config.json, or choose another tokenizer',
        )

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def encode_one(text: str, added: bool) -> list[int]:
        return list(tokenizer(text, add_special_tokens=added, verbose=False)["input_ids"])

    return TextTokenizer(
        name=str(folder),
        encode=encode,
        token_of=lambda token_id: str(tokenizer.convert_ids_to_tokens(token_id)),
        eos_id=int(tokenizer.eos_token_id),
        highest_id=max(tokenizer.get_vocab().values()),
        around=ids_around_a_text(encode_one, folder) if special_tokens == "auto" else None,
        backend=getattr(tokenizer, "backend_tokenizer", None),
    )
