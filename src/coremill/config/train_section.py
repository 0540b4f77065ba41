"""The sections `train` and `lora` of the run file: how long and how fast to learn, and what of the model."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from coremill.config.section import AUTO, AutoOrPositiveInt, NonNegativeInt, PositiveInt, Section

NamePattern = Annotated[str, Field(min_length=1)]
PATTERNS_FORM: Final = "a list of name patterns, each a text (* any text, ? any character, [0-3] one of these)"


class TrainSection(Section):
    """How long and how fast to learn."""

    steps: PositiveInt | None = Field(None, description="optimizer steps; give this or epochs")
    epochs: Annotated[float, Field(gt=0)] | None = Field(None, description="passes over the data; give this or steps")
    optimizer: Literal["auto", "adamw", "adamw-8bit"] = Field(
        "adamw",
        description="what moves the weights. adamw: fp32 weights and moments, 16 bytes a parameter with its gradient,"
        " 18 in bf16; adamw-8bit: moments in 8 bits by blocks of 256, weights in parallel.dtype alone (in bf16 rounded"
        " stochastically): 8 bytes in bf16, 4 where train.update is inside; auto: adamw where it fits, else adamw-8bit",
    )
    update: Literal["auto", "after", "inside"] = Field(
        AUTO,
        description="when weights move. after: once all gradients are there; inside: each inside backward, as soon as"
        " its gradient is whole, which is freed at once: no room for gradients, and train.clip_norm goes by the norms"
        " of earlier steps; auto: after; with adamw-8bit or auto inside where only that fits",
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(2.0e-5, description="peak learning rate")
    minimum_learning_rate: Annotated[float, Field(ge=0)] = Field(
        0.0, description="the rate that the decay ends at; the last step is just above it"
    )
    schedule: Literal["linear", "cosine", "constant", "warmup-stable-decay"] = Field(
        "linear",
        description="what comes after the warm-up: linear and cosine decay to the end of the run; constant stays;"
        " warmup-stable-decay (WSD) stays, then decays linearly over train.decay_share of the run",
    )
    warmup_steps: NonNegativeInt = Field(0, description="steps over which the learning rate rises from zero")
    warmup_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="the warm-up as a share of the run's steps (0.03), instead of warmup_steps"
    )
    decay_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="warmup-stable-decay: the last share of the run's steps, in which the rate falls; left out: 0.2",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.0, description="AdamW weight decay; norms, biases and other vectors are left out"
    )
    no_decay: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": PATTERNS_FORM},
        description="parameters that weight decay leaves out besides norms, biases and other vectors, by name:"
        " [model.embed_tokens.*]; a pattern that matches nothing is refused",
    )
    freeze: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": PATTERNS_FORM},
        description="parameters that are not trained, by name: ['model.layers.[0-3].*', model.embed_tokens.weight];"
        " they have no gradient and no optimizer state; a pattern that matches nothing is refused",
    )
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW first moment decay")
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.999, description="AdamW second moment decay")
    adam_epsilon: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW epsilon")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="clip gradients to this global norm; null: do not"
    )
    tokens_per_step: PositiveInt = Field(
        16384,
        description="tokens per optimizer step over all ranks; the plan splits them into ranks, rows and accumulation",
    )
    samples_per_step: PositiveInt = Field(
        32,
        description="question-answering and sequence-classification, in place of tokens_per_step: rows per optimizer"
        " step over all ranks",
    )
    micro_batch_rows: AutoOrPositiveInt = Field(AUTO, description="rows per forward pass on one rank")
    activation_checkpointing: Literal["auto"] | bool = Field(
        AUTO, description="recompute activations in backward: less memory, about a third more arithmetic"
    )
    seed: Annotated[int, Field(ge=0, lt=2**64)] = Field(  # torch takes 64 bits
        7, description="order of the data, random initialisation, dropout"
    )


class LoraSection(Section):
    """Adapters: two narrow matrices beside each linear map are trained, the model itself stays as it is (LoRA)."""

    rank: PositiveInt | None = Field(
        None, description="width of the adapters, 8 to 64 as a rule; left out: no adapters, the weights are trained"
    )
    alpha: Annotated[float, Field(gt=0)] | None = Field(
        None, description="an adapter's output counts alpha/rank times; left out: twice the rank"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of what goes into adapters that is dropped in training"
    )
    target_modules: Annotated[list[NamePattern], Field(min_length=1)] | None = Field(
        None,
        json_schema_extra={"x-form": "a list of module names, each a text: [q_proj, v_proj]"},
        description="which linear maps get one: the end of their name (q_proj), all of it, or a pattern with *; left"
        " out: every linear map of the layers",
    )
    modules_to_save: list[NamePattern] = Field(
        [],
        json_schema_extra={"x-form": "a list of module names, each a text: [lm_head]"},
        description="modules that are trained whole beside the adapters and saved with them, named in the same way",
    )
    start_from: str | None = Field(
        None,
        min_length=1,
        description="an adapter folder (adapter_config.json) or hub id to begin with instead of a new adapter",
    )
    merge: bool = Field(
        False,
        description="true: export the whole model with the adapters added in, not the adapter folder; coremill export"
        " makes either of any kept step",
    )
