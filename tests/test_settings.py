"""Options from the environment, a mapping or arguments: parsed alike, refused loudly."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphhal.errors import SettingsError
from graphhal.settings import Policy, SelfCheck, Settings


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    for name in list(os.environ):
        if name.upper().startswith("GRAPHHAL_"):
            monkeypatch.delenv(name)


@pytest.fixture(params=["argument", "mapping", "environment"])
def make(request, monkeypatch):
    """Settings with one option given as text, in each of the three ways."""

    def made(option: str, text: str) -> Settings:
        if request.param == "argument":
            return Settings(**{option: text})
        if request.param == "mapping":
            return Settings.from_mapping({option: text})
        monkeypatch.setenv(f"GRAPHHAL_{option.upper()}", text)
        return Settings()

    return made


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("platform", "npu", "npu"),
        ("platform", " npu ", "npu"),
        ("platform", "", None),
        ("platform", "  ", None),
        ("plugins", "a,b", ("a", "b")),
        ("plugins", " a , b,, ", ("a", "b")),
        ("plugins", '["a", " b"]', ("a", "b")),
        ("plugins", "", ()),
        ("plugins", "[]", ()),
        ("plugins", "null", ("null",)),
        ("plugins", "1", ("1",)),
        ("block_plugins", "rocm", ("rocm",)),
        ("policy", "packed", Policy.PACKED),
        ("policy", " measured\n", Policy.MEASURED),
        ("self_check", "off", SelfCheck.OFF),
        ("token_budgets", "64", (64,)),
        ("token_budgets", "256, 64,64", (64, 256)),
        ("token_budgets", "[256, 64]", (64, 256)),
        ("token_budgets", '["256", "1-3"]', (1, 2, 3, 256)),
        ("audio_chunks", "1-64", tuple(range(1, 65))),
        ("audio_chunks", "1 - 3, 8", (1, 2, 3, 8)),
        ("audio_chunks", "5-5", (5,)),
        ("audio_chunks", "[]", ()),
        ("max_items", " 3 ", 3),
        ("memory_limit", "650MiB", 650 * 2**20),
        ("memory_limit", "1.5 gib", 3 * 2**29),
        ("memory_limit", "2kB", 2000),
        ("memory_limit", "10MB", 10**7),
        ("memory_limit", "0", 0),
        ("memory_limit", "123456", 123456),
        ("memory_limit", "10%", 0.1),
        ("memory_limit", "12.5 %", 0.125),
        ("memory_limit", "0.1", 0.1),
        ("memory_limit", "1.0", 1.0),
        ("exact_only", "true", True),
        ("exact_only", "0", False),
        ("tolerance", "1e-3", 1e-3),
    ],
)
def test_text_means_the_same_wherever_it_stands(make, option, text, value):
    found = getattr(make(option, text), option)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "allowed"),
    [
        ("policy", "fast", "'single', 'packed' or 'measured'"),
        ("policy", "PACKED", "'single', 'packed' or 'measured'"),
        ("self_check", "none", "'full', 'quick' or 'off'"),
        ("token_budgets", "64,many", "whole numbers from 1 to 16777216 and ranges (1,2,4 or 1-64)"),
        ("token_budgets", "64,0", "whole numbers from 1"),
        ("token_budgets", "-4", "whole numbers from 1"),
        ("token_budgets", "[64", "JSON list"),
        ("audio_chunks", "64-1", "64-1 is no rising range"),
        ("audio_chunks", "0-3", "whole numbers from 1"),
        ("audio_chunks", "1-1000000000000", "at most 4096"),
        ("audio_chunks", "1.5", "whole numbers from 1"),
        ("max_items", "0", "from 1 to 1024"),
        ("max_items", "1025", "from 1 to 1024"),
        ("max_items", "eight", "from 1 to 1024"),
        ("max_frames", "", "from 1 to 4096"),
        ("max_tokens", "1.5", "a whole number from 1 to 16777216"),
        ("max_tokens", "16777217", "a whole number from 1 to 16777216"),
        ("token_budgets", "64,1000000000000", "less than or equal to 16777216"),
        ("audio_chunks", "16777217", "less than or equal to 16777216"),
        ("warmups", "0", "from 1 to 16"),
        ("memory_limit", "110%", "a fraction lies between 0 and 1"),
        ("memory_limit", "-5MiB", "a fraction of free memory (10%, 0.1)"),
        ("memory_limit", "5 parsecs", "bytes (650MiB, 1.5GiB, a whole number)"),
        ("memory_limit", "", "650MiB"),
        ("memory_limit", "nan", "650MiB"),
        ("memory_limit", "1e9", "650MiB"),
        ("memory_limit", "1.5", "a fraction lies between 0 and 1"),
        ("exact_only", "maybe", "true or false"),
        ("tolerance", "0", "between 0 and 1"),
        ("tolerance", "nan", "between 0 and 1"),
    ],
)
def test_a_bad_value_names_the_option_the_value_and_what_is_allowed(make, option, text, allowed):
    with pytest.raises(SettingsError) as caught:
        make(option, text)
    message = str(caught.value)
    assert f"option {option!r}" in message
    assert allowed in message
    assert "got " in message


@pytest.mark.parametrize(
    "option", ["max_items", "memory_limit", "token_budgets", "platform", "tolerance", "plugins"]
)
@pytest.mark.parametrize("value", [True, False, [True, 8]])
def test_truth_is_no_number_and_no_name(option, value):
    with pytest.raises(SettingsError, match=rf"^option '{option}'"):
        Settings(**{option: value})


@pytest.mark.parametrize("option", ["policy", "max_items", "block_plugins", "audio_chunks"])
@pytest.mark.parametrize("value", [None, object(), {"a": 1}, 3.5])
def test_values_of_another_kind_are_refused(option, value):
    with pytest.raises(SettingsError, match=rf"^option '{option}'"):
        Settings.from_mapping({option: value})


def test_truth_in_text_is_no_number():
    with pytest.raises(SettingsError, match=r"^option 'token_budgets'"):
        Settings(token_budgets="[true, 8]")


def test_a_blank_variable_names_no_file(monkeypatch):
    monkeypatch.setenv("GRAPHHAL_STATS_FILE", " ")
    assert Settings().stats_file is None


def test_a_blank_variable_asks_for_the_default_ladder(monkeypatch):
    monkeypatch.setenv("GRAPHHAL_TOKEN_BUDGETS", " ")
    monkeypatch.setenv("GRAPHHAL_AUDIO_CHUNKS", "")
    assert Settings().token_budgets is None
    assert Settings().audio_chunks == tuple(range(1, 65))


def test_an_option_called_like_an_argument_of_pythons_own_is_unknown_too():
    with pytest.raises(SettingsError, match=r"^unknown option 'self'"):
        Settings.from_mapping({"self": 1})


def test_none_is_the_default_where_the_default_is_none():
    made = Settings.from_mapping(
        dict.fromkeys(("platform", "plugins", "token_budgets", "memory_limit", "tolerance"))
    )
    assert made == Settings()


def test_numbers_and_lists_are_taken_as_they_are():
    made = Settings(
        token_budgets=[8, 4, 8], audio_chunks=3, memory_limit=0.25, max_items=2, plugins={"a"}
    )
    assert (made.token_budgets, made.audio_chunks) == ((4, 8), (3,))
    assert (made.memory_limit, made.max_items, made.plugins) == (0.25, 2, ("a",))
    assert isinstance(Settings(memory_limit=1).memory_limit, int)
    assert isinstance(Settings(memory_limit=1.0).memory_limit, float)


@pytest.mark.parametrize("limit", [-1, -0.1, 1.1, float("nan"), float("inf")])
def test_a_limit_outside_its_range_is_refused(limit):
    with pytest.raises(SettingsError, match=r"^option 'memory_limit'"):
        Settings(memory_limit=limit)


@pytest.mark.parametrize("make_it", [lambda o: Settings(**o), Settings.from_mapping])
@pytest.mark.parametrize("option", ["polcy", "Policy", "_env_file", "_cli_parse_args", ""])
def test_an_unknown_option_is_refused_with_the_known_ones(make_it, option):
    with pytest.raises(SettingsError, match=rf"^unknown option '{option}'\. Options: .*policy"):
        make_it({option: "packed"})


def test_an_unknown_variable_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("GRAPHHAL_POLCY", "packed")
    with pytest.raises(
        SettingsError, match=r"^environment variable GRAPHHAL_POLCY .*GRAPHHAL_POLI"
    ):
        Settings()


def test_a_misspelt_variable_is_not_excused_by_arguments(monkeypatch):
    monkeypatch.setenv("graphhal_polcy", "packed")
    with pytest.raises(SettingsError, match=r"^environment variable graphhal_polcy is not an op"):
        Settings(policy="single")


def test_other_programs_variables_are_left_alone(monkeypatch):
    monkeypatch.setenv("GRAPHHALX", "1")
    monkeypatch.setenv("XGRAPHHAL_POLICY", "nonsense")
    assert Settings().policy is Policy.SINGLE


def test_arguments_and_mappings_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("GRAPHHAL_POLICY", "packed")
    monkeypatch.setenv("GRAPHHAL_MAX_ITEMS", "3")
    made = Settings.from_mapping({"policy": "measured"})
    assert (made.policy, made.max_items) == (Policy.MEASURED, 3)
    assert Settings(policy="measured").policy is Policy.MEASURED


@pytest.mark.parametrize("options", [None, [("policy", "packed")], "policy=packed", 3])
def test_a_mapping_is_a_mapping(options):
    with pytest.raises(SettingsError, match=r"^options must be a mapping"):
        Settings.from_mapping(options)


def test_all_problems_are_told_at_once():
    with pytest.raises(SettingsError) as caught:
        Settings(policy="fast", max_items=0, colour="red")
    assert all(f"{name!r}" in str(caught.value) for name in ("policy", "max_items", "colour"))


def test_settings_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Settings().policy = Policy.PACKED


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=5))
def test_ranges_are_the_numbers_they_span(spans):
    text = ",".join(f"{first}-{first + more}" for first, more in spans)
    numbers = {n for first, more in spans for n in range(first, first + more + 1)}
    assert Settings(audio_chunks=text).audio_chunks == tuple(sorted(numbers))


@given(st.text(max_size=20))
def test_no_text_crashes_the_parsers(text):
    for option in ("memory_limit", "token_budgets", "plugins", "max_items", "policy", "platform"):
        message = refusal(option, text)
        assert message is None or option in message


def refusal(option: str, text: str) -> str | None:
    try:
        Settings(**{option: text})
    except SettingsError as error:
        return str(error)
    return None
