"""The FLASHATTN_* variables."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from flashattn import settings
from flashattn.settings import TABLE, Settings

SWITCHES = [variable for variable in TABLE if variable.type == "switch"]
CHOICES = [variable for variable in TABLE if variable.type == "choice"]
PATHS = [variable for variable in TABLE if variable.type == "path"]


@pytest.fixture(autouse=True)
def fresh():
    settings.reset()
    yield
    settings.reset()


def name_of(variable):
    return variable.name


def test_the_table_and_the_settings_have_the_same_fields():
    assert [variable.field for variable in TABLE] == [field.name for field in dataclasses.fields(Settings)]
    assert all(variable.help.endswith(".") for variable in TABLE)


def test_without_variables_every_setting_has_its_default():
    assert settings.read({"HOME": "/root", "TRITON_CACHE_DIR": "x"}) == Settings()


@pytest.mark.parametrize("variable", SWITCHES, ids=name_of)
def test_a_switch_takes_0_1_true_and_false(variable):
    values = [getattr(settings.read({variable.name: text}), variable.field) for text in ("0", "1", "false", "true")]
    assert values == [False, True, False, True]


@pytest.mark.parametrize("text", ["", "2", "yes", "on", "True", " 1", "None"])
@pytest.mark.parametrize("variable", SWITCHES, ids=name_of)
def test_a_switch_takes_nothing_else(variable, text):
    with pytest.raises(ValueError, match=f"{variable.name} is {text!r}: it takes 0, 1, true or false"):
        settings.read({variable.name: text})


@pytest.mark.parametrize("variable", CHOICES, ids=name_of)
def test_a_choice_takes_its_values_alone(variable):
    for choice in variable.choices:
        assert getattr(settings.read({variable.name: choice}), variable.field) == choice
    with pytest.raises(ValueError, match=rf"{variable.name} is 'eror'.*{variable.choices[0]} or {variable.choices[1]}"):
        settings.read({variable.name: "eror"})


@pytest.mark.parametrize("variable", PATHS, ids=name_of)
def test_a_path_is_made_absolute_and_an_empty_one_is_unset(variable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    values = [getattr(settings.read({variable.name: text}), variable.field) for text in ("", "/a/b", "c", "~/d")]
    assert values == [None, Path("/a/b"), tmp_path / "c", tmp_path / "home" / "d"]


@pytest.mark.parametrize("variable", PATHS, ids=name_of)
def test_a_path_is_no_switch(variable):
    with pytest.raises(ValueError, match=f"{variable.name} is '1': it takes a path"):
        settings.read({variable.name: "1"})


def test_targets_are_separated_by_commas():
    assert settings.read({"FLASHATTN_AOT_TARGETS": "sm_90, gfx942"}).aot_targets == ("sm_90", "gfx942")


def test_forcing_and_forbidding_to_compile_is_refused_when_settings_are_read(monkeypatch):
    monkeypatch.setenv("FLASHATTN_FORCE_JIT", "1")
    monkeypatch.setenv("FLASHATTN_DISABLE_JIT", "true")
    with pytest.raises(ValueError, match="FLASHATTN_FORCE_JIT and FLASHATTN_DISABLE_JIT are both on"):
        settings.get()


def test_an_unknown_name_is_warned_of_once_with_the_nearest_known_one(caplog):
    for _ in range(2):
        settings.read({"FLASHATTN_FORCE_JTI": "1", "FLASH_ATTENTION_FORCE_BUILD": "1"})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == [
        "FLASHATTN_FORCE_JTI is set and is no variable of flashattn: did you mean FLASHATTN_FORCE_JIT?"
    ]


def test_any_unknown_name_has_a_nearest_one(caplog):
    settings.read({"FLASHATTN_": "", "FLASHATTN_ÄÖ": ""})
    assert len(caplog.messages) == 2


def test_the_environment_is_read_once_and_not_before_it_is_needed(monkeypatch):
    monkeypatch.setenv("FLASHATTN_DEBUG", "1")
    first = settings.get()
    monkeypatch.setenv("FLASHATTN_DEBUG", "wrong")
    assert first.debug
    assert settings.get() is first
    settings.reset()
    with pytest.raises(ValueError, match="FLASHATTN_DEBUG"):
        settings.get()


def test_a_wrong_value_raises_again_at_the_next_call(monkeypatch):
    monkeypatch.setenv("FLASHATTN_DEBUG", "wrong")
    for _ in range(2):
        with pytest.raises(ValueError, match="FLASHATTN_DEBUG"):
            settings.get()


def test_settings_are_shown_as_text_with_defaults():
    shown = settings.shown(settings.read({"FLASHATTN_DEBUG": "true", "FLASHATTN_AOT_TARGETS": "sm_80,sm_90"}))
    assert list(shown) == [variable.name for variable in TABLE]
    assert shown["FLASHATTN_DEBUG"] == "1"
    assert shown["FLASHATTN_AOT_TARGETS"] == "sm_80,sm_90"
    assert shown["FLASHATTN_CACHE_DIR"] == "${XDG_CACHE_HOME:-~/.cache}/flashattn"
    assert shown["FLASHATTN_LOG_LEVEL"] == "info"


def test_the_documented_table_is_the_one_in_code():
    text = (Path(__file__).parents[1] / "docs" / "jit-and-wheel.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `FLASHATTN_") and line.count("|") == 4]
    assert len(rows) == len(TABLE)
    for row, variable in zip(rows, TABLE, strict=True):
        name, default, text = (cell.strip() for cell in row.strip("|").split("|"))
        assert (name, default.replace("`", ""), text) == (f"`{variable.name}`", variable.default, variable.help)
