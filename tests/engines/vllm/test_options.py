from pathlib import Path

import pytest

from kvmosaic.engines.vllm.options import parse_options
from kvmosaic.errors import SettingsError


def test_every_key_is_read() -> None:
    options = parse_options(
        {
            "kvmosaic.socket": "/run/x.sock",
            "kvmosaic.required": True,
            "kvmosaic.model_tag": "m",
            "kvmosaic.weights_epoch": 3,
            "kvmosaic.lookup_timeout_ms": 5,
            "kvmosaic.autostart": 2,
            "somebody.else": object(),
        },
        {},
    )

    assert options.socket == Path("/run/x.sock")
    assert (options.required, options.model_tag, options.weights_epoch) == (True, "m", "3")
    assert (options.lookup_timeout_ms, options.autostart) == (5.0, 2.0)


def test_nothing_need_be_said() -> None:
    options = parse_options({}, {})

    assert options.autostart is None
    assert not options.required
    assert options.socket.is_absolute()


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"'kvmosaic\.sokcet'.*'kvmosaic\.socket'"):
        parse_options({"kvmosaic.sokcet": "x"}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvmosaic.socket", 5),
        ("kvmosaic.socket", ""),
        ("kvmosaic.required", "yes"),
        ("kvmosaic.model_tag", ""),
        ("kvmosaic.weights_epoch", 1.5),
        ("kvmosaic.weights_epoch", True),
        ("kvmosaic.lookup_timeout_ms", 0),
        ("kvmosaic.lookup_timeout_ms", True),
        ("kvmosaic.lookup_timeout_ms", float("nan")),
        ("kvmosaic.load_failure_policy", "ignore"),
        ("kvmosaic.autostart", -1),
        ("kvmosaic.autostart", "2"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{key} is {value!r}; it must be"):
        parse_options({key: value}, {})
