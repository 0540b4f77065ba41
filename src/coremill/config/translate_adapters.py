"""Values of other tools' adapters -> ours (see translate.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremill.config.translate import Cure, Given, Translate, accepts

ALL_LINEAR = ("all", "all-linear", "all_linear", "['all']", "['all-linear']")  # what leaving the key out means here
USUAL_RANK = 16  # of adapters, where none is named beside the setting that wants them


def with_rank(target: str, *, as_list: bool = False) -> Translate:
    """A setting of adapters under our name, and the rank without which there are none."""

    def translate(value: Any, given: Given) -> Cure | None:
        if as_list and isinstance(value, str):
            value = [word.strip() for word in value.split(",")]
        if value is None or not accepts(target, value):
            return None
        return Cure({**_rank_beside(given), target: value})

    return translate


def lora_targets(value: Any, given: Given) -> Cure | None:
    """`all` and its like mean what leaving it out means here."""
    if str(value).lower() in ALL_LINEAR:
        return Cure(_rank_beside(given), note="; left out, lora.target_modules means every linear map of the layers")
    return with_rank("lora.target_modules", as_list=True)(value, given)


def adapter_kind(value: Any, given: Given) -> Cure | None:
    """`adapter: lora`; values that say there is none."""
    if value in ("full", "", "none", "no", False, None):
        return Cure(why="without lora.rank all weights are trained")
    if value == "freeze":  # LLaMA-Factory's finetuning_type
        why = "what is not trained is named, by patterns over parameter names; all else is trained"
        return Cure(note="; set train.freeze to patterns, for instance ['model.embed_tokens.*']", why=why)
    if isinstance(value, Mapping):
        rank = value.get("r")
        return Cure({"lora.rank": rank} if rank else _rank_beside(given))
    if str(value).lower() in ("lora", "true"):
        return Cure(_rank_beside(given) or _rank_named(given))
    if str(value).lower() == "qlora":
        return Cure(_rank_beside(given) or _rank_named(given), "; the base is not quantised: plain LoRA beside it")
    return None


def _rank_named(given: Given) -> dict[str, Any]:
    """The rank that stands beside it under a name that has a row of its own."""
    found = (given.get(name) for name in ("lora_r", "lora_rank", "peft_lora_r"))
    return next(({"lora.rank": rank} for rank in found if accepts("lora.rank", rank) and rank), {})


def _rank_beside(given: Given) -> dict[str, Any]:
    """Nothing where a rank is named too: that setting has an answer of its own."""
    named = any(name in given for name in ("lora_r", "lora_rank", "peft_lora_r", "rank", "r"))
    named = named or any(isinstance(given.get(name), Mapping) for name in ("peft", "peft_config", "lora_config"))
    return {} if named else {"lora.rank": USUAL_RANK}
