"""Options, parsed once and loudly: environment `GRAPHHAL_*`, a mapping, or arguments."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from graphhal.errors import SettingsError

ENV_PREFIX = "GRAPHHAL_"
MOST_SIZES = 4096
"""Numbers in one range of sizes, at most: a slip of the pen must not fill the memory."""
MOST_TOKENS = 2**24
"""Tokens of one graph, or its chunks: far above what any card holds, and within int32 as rows."""

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class Policy(StrEnum):
    """How the items of a group are spread over graphs.

    `single`: one graph holds the whole group, or one eager call does; the same grouping as eager.
    Videos that no graph holds are replayed by runs of frames, which are independent.
    `packed`: greedy packing into as many replays as it takes; the rest in one eager call.
    `measured`: the cheapest of these by the cost table measured on this card, eager included.
    """

    SINGLE = "single"
    PACKED = "packed"
    MEASURED = "measured"


class SelfCheck(StrEnum):
    """How much of the self-check runs at capture.

    `full`: the worst cases of every graph, as many of the costly ones as there is time for while
    the check takes no longer than the capture; `quick`: the exactly full case; `off`: none.
    """

    FULL = "full"
    QUICK = "quick"
    OFF = "off"


def _refuse_truth(values: Iterable[Any]) -> None:
    """`true` would count as 1 where a number is meant."""
    if any(isinstance(each, bool) for each in values):
        raise ValueError("true and false are no value of this option")


def _split_names(value: Any) -> Any:
    """`"a, b"`, `'["a", "b"]'` and `["a", "b"]` alike; names are stripped, empty ones dropped."""
    if isinstance(value, str):
        value = value.strip()
        value = json.loads(value) if value.startswith("[") else value.split(",")
        _refuse_truth(value)
    if isinstance(value, list | tuple | set | frozenset):
        stripped = [v.strip() if isinstance(v, str) else v for v in value]
        return tuple(v for v in stripped if v != "")
    return value


def _split_numbers(value: Any) -> Any:
    """Like names; `"1-64"` is a range, ends included."""
    if isinstance(value, int):
        return (value,)
    parts = _split_names(value)
    if not isinstance(parts, tuple):
        return parts
    numbers: list[Any] = []
    for part in parts:
        span = re.fullmatch(r"(\d+)\s*-\s*(\d+)", part) if isinstance(part, str) else None
        if span is None:
            numbers.append(part)
            continue
        first, last = int(span[1]), int(span[2])
        if not first <= last < first + MOST_SIZES:
            raise ValueError(f"{part} is no rising range of at most {MOST_SIZES} numbers")
        numbers += range(first, last + 1)
    return tuple(numbers)


def _parse_bytes(value: Any) -> Any:
    """`650MiB`, `1.5GiB`, `10%` (a fraction), an int of bytes or a float fraction."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        return float(match[1]) / 100
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if not match or match[2] not in _UNITS:
        raise ValueError("that is neither bytes nor a fraction")
    if not match[2] and "." in match[1]:
        return float(match[1])
    number = float(match[1]) * _UNITS[match[2]]
    if not isfinite(number):
        raise ValueError("that is more than there are bytes")
    return int(number)


_NAMES = "names, separated by commas, or a JSON list"
_SIZES = f"whole numbers from 1 to {MOST_TOKENS} and ranges (1,2,4 or 1-64), or a JSON list"
_BYTES = "bytes (650MiB, 1.5GiB, a whole number) or a fraction of free memory (10%, 0.1)"
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
Sizes = Annotated[
    tuple[Annotated[int, Field(gt=0, le=MOST_TOKENS)], ...],
    NoDecode,
    BeforeValidator(_split_numbers),
]


class Settings(BaseSettings):
    """Options of graphhal.

    Arguments win over the environment. `Settings.from_mapping` reads a mapping (vLLM's
    `additional_config["graphhal"]`).

    Raises:
        SettingsError: an option is unknown or its value is not allowed; names the option and
            what is allowed. An unknown `GRAPHHAL_*` variable counts as an unknown option.

    Attributes:
        platform: platform plugin to use; by default the only one that can serve.
        plugins: names of the third-party plugins that may load; by default all installed ones.
        block_plugins: names of plugins that must not load.
        policy: `single`, `packed` or `measured`.
        token_budgets: token budgets of image and video graphs; by default a dense ladder.
        max_tokens: largest token budget of that default ladder.
        audio_chunks: chunk counts of audio graphs (a list, a range `1-64`).
        max_items: items in one graph, at most; in vLLM workers 64 where empty sequences are free.
        max_frames: video frames in one graph, at most.
        memory_limit: bytes (`650MiB`) or fraction of free device memory (`10%`, 0.1) that graphs
            may take; what does not fit, the largest first, is dropped, named, and runs eagerly.
        self_check: `full`, `quick` or `off`.
        exact_only: replay only where a graph leaves no padding row (bit-equal to eager, or eager).
        warmups: eager passes before each capture; in vLLM workers 1, as with its own manager.
        tolerance: relative L2 that graph and eager may differ by; by default by dtype.
        vllm_models: models without vLLM's encoder-graph protocol that are served all the same:
            `qwen3_omni`, `covo_audio`.
        vllm_adapter: `own` takes graphhal's adapter of a tower where there is one; `protocol`
            always lets the model's own code prepare the buffers.
        log_seconds: between two log lines about hits and misses in a vLLM worker; 0 for none.
        stats_file: JSON of all counters, written with every such line by each vLLM worker; `{pid}`
            in it becomes the process.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, str_strip_whitespace=True
    )

    platform: str | None = None
    plugins: Annotated[Names | None, NoDecode] = Field(default=None, description=_NAMES)
    block_plugins: Names = Field(default=(), description=_NAMES)
    policy: Policy = Policy.SINGLE
    token_budgets: Annotated[Sizes | None, NoDecode] = Field(default=None, description=_SIZES)
    max_tokens: int = Field(
        default=4096, gt=0, le=MOST_TOKENS, description=f"a whole number from 1 to {MOST_TOKENS}"
    )
    audio_chunks: Sizes = Field(default=tuple(range(1, 65)), description=_SIZES)
    max_items: int = Field(default=8, gt=0, le=1024, description="a whole number from 1 to 1024")
    max_frames: int = Field(default=64, gt=0, le=4096, description="a whole number from 1 to 4096")
    memory_limit: Annotated[int | float | None, BeforeValidator(_parse_bytes)] = Field(
        default=None, description=_BYTES
    )
    self_check: SelfCheck = SelfCheck.FULL
    exact_only: bool = Field(default=False, description="true or false")
    warmups: int = Field(default=2, ge=1, le=16, description="a whole number from 1 to 16")
    tolerance: float | None = Field(
        default=None, gt=0, lt=1, description="a number between 0 and 1"
    )
    vllm_models: Names = ()
    vllm_adapter: Literal["own", "protocol"] = "own"
    log_seconds: float = Field(default=300.0, ge=0)
    stats_file: str | None = None

    def __init__(self, /, **options: Any) -> None:
        _refuse_unknown_environment(set(type(self).model_fields))
        for name in options:
            # pydantic-settings' own switches (other files, the command line), and other spellings.
            if name.startswith("_") or name != name.lower():
                raise SettingsError(_unknown(name, type(self)))
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise SettingsError(_explain(error, type(self))) from error

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """As `_refuse_truth`; text is stripped."""
        wants_truth = cls.model_fields[str(info.field_name)].annotation is bool
        values = value if isinstance(value, list | tuple | set | frozenset) else [value]
        if not wants_truth:
            _refuse_truth(values)
        return value.strip() if isinstance(value, str) else value

    @field_validator("token_budgets", "audio_chunks", mode="before")
    @classmethod
    def _blank_is_no_list(cls, value: Any, info: ValidationInfo) -> Any:
        """A variable that was set to nothing asks for the default, not for no graph at all."""
        blank = isinstance(value, str) and not value.strip()
        return cls.model_fields[str(info.field_name)].default if blank else value

    @field_validator("platform", "stats_file")
    @classmethod
    def _blank_is_no_name(cls, value: str | None) -> str | None:
        return value or None

    @field_validator("token_budgets", "audio_chunks")
    @classmethod
    def _sorted_once(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return value if value is None else tuple(sorted(set(value)))

    @field_validator("memory_limit")
    @classmethod
    def _bytes_or_fraction(cls, value: int | float | None) -> int | float | None:
        if isinstance(value, float) and not 0.0 <= value <= 1.0:
            raise ValueError("a fraction lies between 0 and 1; bytes are a whole number, or 650MiB")
        if value is not None and value < 0:
            raise ValueError("bytes are 0 or more")
        return value

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "Settings":
        """Settings from a mapping; it wins over the environment."""
        if not isinstance(options, Mapping):
            raise SettingsError(f"options must be a mapping of names to values, got {options!r}")
        return cls(**{str(name): value for name, value in options.items()})


def _refuse_unknown_environment(fields: set[str]) -> None:
    for name in sorted(os.environ):
        if name.upper().startswith(ENV_PREFIX) and name[len(ENV_PREFIX) :].lower() not in fields:
            allowed = ", ".join(ENV_PREFIX + field.upper() for field in sorted(fields))
            raise SettingsError(f"environment variable {name} is not an option. Options: {allowed}")


def _unknown(option: str, model: type[Settings]) -> str:
    return f"unknown option {option!r}. Options: {', '.join(sorted(model.model_fields))}"


def _explain(error: ValidationError, model: type[Settings]) -> str:
    lines = []
    for problem in error.errors():
        option = str(problem["loc"][0]) if problem["loc"] else "?"
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(option, model))
            continue
        field = model.model_fields.get(option)
        allowed = f". Allowed: {field.description}" if field and field.description else ""
        said = problem["msg"].removeprefix("Value error, ")
        lines.append(f"option {option!r}: {said}, got {problem.get('input')!r}{allowed}")
    return "; ".join(dict.fromkeys(lines))
