from pathlib import Path
from types import SimpleNamespace

from kvmosaic.engines.vllm.adapters import Adapters


def lora(path: Path, number: int = 1, **more: object) -> SimpleNamespace:
    (path / "adapter.bin").touch()
    return SimpleNamespace(lora_int_id=number, lora_name=path.name, lora_path=str(path), **more)


def test_a_request_without_an_adapter_has_nothing_to_tell_apart() -> None:
    assert Adapters().fingerprint(None) == b""


def test_an_adapter_that_stays_as_it_is_is_served(tmp_path: Path) -> None:
    adapters, one = Adapters(), lora(tmp_path)
    first = adapters.fingerprint(one)

    assert first
    assert adapters.fingerprint(one) == first
    assert Adapters().fingerprint(one) == first, "another engine agrees"


def test_an_adapter_whose_files_were_replaced_is_not_served_any_more(tmp_path: Path) -> None:
    adapters, one = Adapters(), lora(tmp_path)
    first = adapters.fingerprint(one)
    (tmp_path / "adapter.bin").write_bytes(b"new")

    assert adapters.fingerprint(one) is None, "it may have been loaded before or after"
    assert adapters.fingerprint(one) is None
    assert Adapters().fingerprint(one) not in (first, None), "an engine that starts now knows"


def test_a_reload_in_place_ends_the_service(tmp_path: Path) -> None:
    adapters = Adapters()

    assert adapters.fingerprint(lora(tmp_path))
    assert adapters.fingerprint(lora(tmp_path, load_inplace=True)) is None
    assert adapters.fingerprint(lora(tmp_path)) is None
    assert adapters.fingerprint(lora(tmp_path, number=2)), "another id is another adapter"
