"""Where a checkpoint lies."""

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from common.errors import ConfigError
from common.model_path import model_name, read_model_config, resolve_model_path


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path
    assert model_name(str(tmp_path) + "/") == tmp_path.name


def test_demo_is_the_model_of_the_installed_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of that name where the command was started does not count."""
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    path = resolve_model_path("demo")
    assert path.parts[-2:] == ("demo", "model")
    assert (path / "config.json").is_file()
    assert not path.is_relative_to(tmp_path)
    assert model_name("demo") == "demo"


@pytest.mark.parametrize(
    "model", ["./no-such-folder", "/no/such/folder", "a/b/c", "", "owner/", "-x", "owner/na me", "~nobody/m"]
)
def test_a_model_that_is_neither_a_folder_nor_a_name_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_model_path(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_path(str(file))
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"is a GGUF file, which is not supported: give the folder that holds"):
        resolve_model_path(str(tmp_path / "q4.gguf"))


def test_a_folder_without_a_config_is_named_by_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: give the folder that holds the model as Hugging Face has it"):
        read_model_config(tmp_path)
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds GGUF files, which are not supported: give the folder that holds"):
        read_model_config(tmp_path)


def test_a_name_goes_to_hugging_face_and_its_refusal_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert "consolidated*" in ignore_patterns
        asked.append((name, allow_patterns))
        if name == "owner/secret":
            raise OSError("401: not for you\nand more")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model_path("owner/model") == tmp_path
    assert resolve_model_path("owner/model", weights=False) == tmp_path
    assert model_name("owner/model") == "owner/model"
    with pytest.raises(ConfigError, match=r"owner/secret.*401: not for you$"):
        resolve_model_path("owner/secret")
    assert [("*.safetensors" in patterns) for _, patterns in asked] == [True, False, True]


def test_the_module_is_cheap_to_import() -> None:
    program = "import sys, common.model_path; assert not {'huggingface_hub', 'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
