"""The file that `accelerate config` writes: what `accelerate launch` takes from it, as values with types.

Tutorials show such files without their indentation: the keys of `mpirun_config:` stand below it as if they were its
neighbours. They are put back where they belong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coremill.config.imports.settings_file import SettingsFile, read_settings_file
from coremill.errors import InputError

# How names inside each section begin, or what they are.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "ipex_config": ("ipex", "use_xpu"),
    "mpirun_config": ("mpirun_",),
    "dynamo_config": ("dynamo_",),
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": (
        *("deepspeed_", "zero_stage", "zero3_", "offload_optimizer_", "offload_param_"),
        *("gradient_accumulation_steps", "gradient_clipping"),
    ),
    "megatron_lm_config": ("megatron_lm_",),
    "parallelism_config": ("parallelism_config_",),
    "fp8_config": ("fp8_", "amax_", "margin", "interval", "override_linear_precision", "optimization_level"),
}
_TELLING = ("compute_environment", "distributed_type")  # accelerate writes both into every file
_NO = ("", "no", "none", "false")


@dataclass(frozen=True)
class AccelerateFile:
    """A file of accelerate; `values` are all of its settings, those of sections nested."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[Any, ...], int]
    mended: tuple[str, ...] = ()  # sections whose keys had lost their indentation

    @property
    def processes(self) -> int | None:
        """Ranks on all machines together; accelerate takes one where nothing is distributed and nothing said."""
        if self.values.get("num_processes") is None and str(self.values.get("distributed_type")).upper() == "NO":
            return 1
        return self._number("num_processes", 1)

    @property
    def machines(self) -> int:
        return self._number("num_machines", 1) or 1

    @property
    def processes_per_machine(self) -> int | None:
        """None: not said. InputError where the ranks cannot be shared out evenly."""
        if self.processes is None:
            return None
        if self.processes % self.machines:
            raise InputError(
                f"{self.processes} processes cannot be shared out over {self.machines} machines",
                where=self.where("num_processes"),
                why="every machine gets the same number of ranks",
                do=f"set num_processes to a multiple of num_machines ({self.machines})",
            )
        return self.processes // self.machines

    @property
    def machine_rank(self) -> int | None:
        return self._number("machine_rank", 0)

    @property
    def main_address(self) -> str | None:
        return self._text("main_process_ip")

    @property
    def main_port(self) -> int | None:
        """None: not said, or 0, by which accelerate finds a free one."""
        return self._number("main_process_port", 0) or None

    @property
    def hostfile(self) -> str | None:
        return self._text("mpirun_config", "mpirun_hostfile") or self._text("deepspeed_config", "deepspeed_hostfile")

    @property
    def mixed_precision(self) -> str | None:
        """bf16, fp16, fp8 or no; None: not said. Files of accelerate before 0.5 have a switch for fp16."""
        switch = "fp16" if self.values.get("fp16") is True else None
        value = self.values.get("mixed_precision", switch)
        return None if value is None else {"false": "no"}.get(str(value).lower(), str(value).lower())

    @property
    def dynamo(self) -> Mapping[str, str]:
        """Settings of torch.compile by accelerate's names (dynamo_backend, dynamo_mode, ...); empty: not compiled."""
        section = self.values.get("dynamo_config")
        inside = section if isinstance(section, Mapping) else {}
        given = {f"dynamo_{str(name).removeprefix('dynamo_')}": value for name, value in inside.items()}
        given.setdefault("dynamo_backend", self.values.get("dynamo_backend"))
        if str(given["dynamo_backend"] or "no").lower() in _NO:
            return {}
        return {name: str(value) for name, value in given.items() if value is not None}

    def where(self, *path: str) -> str:
        """The place of a setting, for messages."""
        line = self.lines.get(path) or self.lines.get(path[-1:])
        return f"{self.path}:{line} ({'.'.join(path)})" if line else f"{self.path} ({'.'.join(path)})"

    def _text(self, *path: str) -> str | None:
        value: Any = self.values
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        return None if value in (None, "") else str(value)

    def _number(self, name: str, least: int) -> int | None:
        """Whole numbers may stand in quotes; -1 is how accelerate says that it was not asked."""
        value = self.values.get(name)
        text = str(value).strip()
        if value in (None, "", -1) or text == "-1":
            return None
        if isinstance(value, bool) or not text.isdecimal() or int(text) < least:
            raise InputError(
                f"{name} must be a whole number of at least {least}, not {value}",
                where=self.where(name),
                do="correct it there",
            )
        return int(text)


def read_accelerate_file(path: Path) -> AccelerateFile:
    """Read and mend a file of accelerate; InputError where it is something else."""
    found = as_accelerate(read_settings_file(path))
    if found is None:
        why = f"accelerate writes {' and '.join(_TELLING)} into every file"
        raise InputError(f"{path} is no file of accelerate", where=str(path), why=why,
                         do="name the one that `accelerate config` wrote")  # fmt: skip
    return found


def as_accelerate(file: SettingsFile) -> AccelerateFile | None:
    """None: another tool's."""
    if not any(name in file.values for name in _TELLING):
        return None
    values: dict[str, Any] = dict(file.values)
    mended = []
    for section, beginnings in SECTIONS.items():
        if section not in values or values[section] not in (None, "", {}):
            continue
        lost = [name for name in values if name.startswith(beginnings) and name not in SECTIONS]
        if lost:
            values[section] = {name: values.pop(name) for name in lost}
            mended.append(section)
    return AccelerateFile(file.path, values, file.lines, tuple(mended))
