"""Options, parsed once and loudly: environment `GRAPHHAL_*`, a mapping, or arguments."""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from graphhal.errors import SettingsError

ENV_PREFIX = "GRAPHHAL_"
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
    `packed`: greedy packing into as many replays as it takes; the rest in one eager call.
    `measured`: the cheapest of these by the cost table measured on this card, eager included.
    """

    SINGLE = "single"
    PACKED = "packed"
    MEASURED = "measured"


class SelfCheck(StrEnum):
    """How much of the self-check runs at capture.

    `full`: every worst case of every graph; `quick`: the exactly full case; `off`: none.
    """

    FULL = "full"
    QUICK = "quick"
    OFF = "off"


def _split_names(value: Any) -> Any:
    """`"a, b"` and `["a", "b"]` alike; names are stripped, empty ones dropped."""
    if isinstance(value, str):
        value = value.strip()
        if value.startswith("["):
            value = value.strip("[]").replace('"', "").replace("'", "")
        value = value.split(",")
    if isinstance(value, list | tuple | set | frozenset):
        stripped = [v.strip() if isinstance(v, str) else v for v in value]
        return tuple(v for v in stripped if v != "")
    return value


def _split_numbers(value: Any) -> Any:
    """Like names; `"1-64"` is a range, ends included."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    parts = _split_names(value)
    if not isinstance(parts, tuple):
        return parts
    numbers: list[Any] = []
    for part in parts:
        span = re.fullmatch(r"(\d+)\s*-\s*(\d+)", part) if isinstance(part, str) else None
        numbers += range(int(span[1]), int(span[2]) + 1) if span else [part]
    return tuple(numbers)


def _parse_bytes(value: Any) -> Any:
    """`650MiB`, `1.5GiB`, `10%` (a fraction), an int of bytes or a float fraction."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        return float(match[1]) / 100
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?b?)", text)
    if not match or match[2] not in _UNITS:
        return value
    if not match[2] and "." in match[1]:
        return float(match[1])
    return int(float(match[1]) * _UNITS[match[2]])


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
Sizes = Annotated[
    tuple[Annotated[int, Field(gt=0)], ...], NoDecode, BeforeValidator(_split_numbers)
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
        max_items: items in one graph, at most.
        max_frames: video frames in one graph, at most.
        memory_limit: bytes (`650MiB`) or fraction of free device memory (`10%`, 0.1) that graphs
            may take; what does not fit is dropped, named, and runs eagerly.
        self_check: `full`, `quick` or `off`.
        exact_only: replay only where a graph leaves no padding row (bit-equal to eager, or eager).
        warmups: eager passes before each capture.
        tolerance: relative L2 that graph and eager may differ by; by default by dtype.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, str_strip_whitespace=True
    )

    platform: str | None = None
    plugins: Names | None = None
    block_plugins: Names = ()
    policy: Policy = Policy.SINGLE
    token_budgets: Sizes | None = None
    max_tokens: int = Field(default=4096, gt=0)
    audio_chunks: Sizes = tuple(range(1, 65))
    max_items: int = Field(default=8, gt=0, le=1024)
    max_frames: int = Field(default=64, gt=0, le=4096)
    memory_limit: Annotated[int | float | None, BeforeValidator(_parse_bytes)] = None
    self_check: SelfCheck = SelfCheck.FULL
    exact_only: bool = False
    warmups: int = Field(default=2, ge=1, le=16)
    tolerance: float | None = Field(default=None, gt=0, lt=1)

    def __init__(self, **options: Any) -> None:
        _refuse_unknown_environment(set(type(self).model_fields))
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise SettingsError(_explain(error, type(self))) from error

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


def _explain(error: ValidationError, model: type[Settings]) -> str:
    lines = []
    for problem in error.errors():
        option = str(problem["loc"][0]) if problem["loc"] else "?"
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"unknown option {option!r}. Options: {', '.join(sorted(model.model_fields))}"
            )
            continue
        given = problem.get("input")
        lines.append(f"option {option!r}: {problem['msg']}, got {given!r}")
    return "; ".join(dict.fromkeys(lines))
