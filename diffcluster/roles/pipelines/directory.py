"""A model's directory on disk: found, checked and read component by component, so that an error names its place."""

from __future__ import annotations

import hashlib
import json
import logging
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers

from diffcluster.errors import ModelError

__all__ = ["DEMO", "ModelDirectory", "find_model"]

DEMO: Final = "demo"
"""Name of the embedded model."""

_LIBRARIES: Final = ("diffusers", "transformers")
# What they log at load is about components that a role leaves out on purpose; what is wrong comes as an exception too.
for _library in (diffusers, transformers):
    _library.utils.logging.set_verbosity(logging.CRITICAL)
    _library.utils.logging.disable_progress_bar()
_log = logging.getLogger(__name__)


def find_model(name: str) -> Path:
    """The directory of `name`: the embedded model, or a path.

    Raises:
        ModelError: there is no such directory.
    """
    path = Path(str(files("diffcluster") / "models" / DEMO)) if name == DEMO else Path(name).expanduser()
    if not path.is_dir():
        raise ModelError("", f"{name!r} is no directory; give one that holds a model_index.json, or {DEMO!r}")
    return path


class ModelDirectory:
    """A diffusers pipeline on disk. `id` is its name in the API, `revision` a digest of its configs."""

    def __init__(self, path: Path, model_id: str = "") -> None:
        self.path = path
        self.id = model_id or path.resolve().name
        self._index = self._json("model_index.json", "model_index.json")
        self.pipeline = str(self._index.get("_class_name", "a pipeline without a class name"))
        self.revision = self._digest()

    def parts(self) -> dict[str, tuple[str, str]]:
        """Library and class of each component that the pipeline has."""
        return {
            name: (value[0], value[1])
            for name, value in self._index.items()
            if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
        }

    def options(self) -> dict[str, Any]:
        """The pipeline's own settings, which are no components."""
        return {
            name: value
            for name, value in self._index.items()
            if not name.startswith("_") and not (isinstance(value, list) and len(value) == 2)
        }

    def config(self, component: str, file: str = "config.json") -> dict[str, Any]:
        """A component's configuration, without loading the component."""
        return self._json(f"{component}/{file}", component)

    def class_of(self, component: str) -> Any:
        """A component's class; `ModelError` if it is not to be had."""
        library, name = self.parts().get(component, ("", ""))
        if library not in _LIBRARIES:
            raise ModelError(component, f"model_index.json names no class of {' or '.join(_LIBRARIES)} for it")
        cls = getattr(import_module(library), name, None)
        if cls is None:
            raise ModelError(component, f"the installed {library} has no class {name}")
        return cls

    def load(self, component: str, dtype: torch.dtype, quantized: Any = None) -> Any:
        """The component itself, its weights in `dtype` or `quantized`, from safetensors only.

        Raises:
            ModelError: it is missing, half there, or of a class that is not to be had.
        """
        cls = self.class_of(component)
        library, name = self.parts()[component]
        folder = self.path / component
        if not folder.is_dir():
            raise ModelError(component, f"the folder {folder} is missing")
        _log.info("loading %s (%s)", component, name)
        options: dict[str, Any] = {"local_files_only": True}
        if issubclass(cls, torch.nn.Module):
            # Only with an explicit dtype do both libraries load in the same one.
            options |= {"dtype" if library == "transformers" else "torch_dtype": dtype, "use_safetensors": True}
        if quantized is not None:
            options["quantization_config"] = quantized
        try:
            loaded = cls.from_pretrained(str(folder), **options)
        except Exception as error:  # the libraries raise whatever their parsers do
            raise ModelError(component, f"cannot be loaded from {folder}: {_one_line(error)}") from error
        return loaded.eval() if isinstance(loaded, torch.nn.Module) else loaded

    def _json(self, file: str, component: str) -> dict[str, Any]:
        path = self.path / file
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(component, f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(component, f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(component, f"{path} holds no JSON object")
        return content

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for path in sorted(self.path.rglob("*.json")):
            digest.update(str(path.relative_to(self.path)).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:12]


def _one_line(error: Exception) -> str:
    """An exception of a library, whose text may have many lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
