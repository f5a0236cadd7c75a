"""One configuration: the same names in Python, in the environment and on the command line."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from tidemill_worker.settings import (
    SettingsError,
    WorkerConfig,
    config_from_env,
    config_options,
    make_config,
)


def _parse(arguments: list[str], environment: dict[str, str] | None = None) -> WorkerConfig:
    seen: list[WorkerConfig] = []

    @click.command()
    @config_options
    def command(**values: object) -> None:
        seen.append(make_config(values))

    result = CliRunner(env=environment).invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return seen[0]


def test_defaults_are_the_same_everywhere() -> None:
    assert _parse([]) == config_from_env({}) == WorkerConfig()


def test_flags_and_environment_say_the_same() -> None:
    flags = _parse(
        ["--model", "m", "--redis", "redis://h:1/2", "--max-rows", "7", "--kv-pages", "9",
         "--dtype", "float32", "--max-wait-ms", "2.5", "--target-tpot-ms", "80", "--burst"]
    )  # fmt: skip
    environment = {
        "TIDEMILL_MODEL": "m",
        "TIDEMILL_REDIS_URL": "redis://h:1/2",
        "TIDEMILL_MAX_ROWS": "7",
        "TIDEMILL_KV_PAGES": "9",
        "TIDEMILL_DTYPE": "float32",
        "TIDEMILL_MAX_WAIT_MS": "2.5",
        "TIDEMILL_TARGET_TPOT_MS": "80",
        "TIDEMILL_BURST": "true",
        "UNRELATED": "x",
    }
    assert flags == config_from_env(environment) == _parse([], environment)
    assert (flags.max_rows, flags.kv_pages, flags.burst) == (7, 9, True)
    assert flags.target_tpot_ms == 80.0
    off = {"TIDEMILL_PREFIX_CACHING": "false"}
    assert _parse(["--no-prefix-caching"]) == config_from_env(off) == _parse([], off)
    assert not config_from_env(off).prefix_caching


def test_flags_win_over_the_environment() -> None:
    assert _parse(["--max-rows", "3"], {"TIDEMILL_MAX_ROWS": "7"}).max_rows == 3


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"max_rows": 0}, "max_rows"),
        ({"kv_pages": -1}, "kv_pages"),
        ({"dtype": "float16"}, "dtype"),
        ({"lease_ms": 10}, "lease_ms"),
        ({"target_tpot_ms": 0}, "target_tpot_ms"),
        ({"max_rows": "many"}, "max_rows"),
        ({"maximum_rows": 1}, "maximum_rows"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, object], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        make_config(values)


def test_secrets_are_masked() -> None:
    config = make_config({"redis_url": "redis://:secret@h:1/0"})
    assert config.masked()["redis_url"] == "redis://:***@h:1/0"


def test_every_setting_has_a_description() -> None:
    @click.command()
    @config_options
    def command(**values: object) -> None:
        raise AssertionError(values)

    for option in command.params:
        assert isinstance(option, click.Option)
        assert option.help, f"{option.name} has no description"
