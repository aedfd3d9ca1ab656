"""Tiny models of all families, each made once, and the roles' parts of them, each loaded once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from diffcluster.config import RoleConfig
from diffcluster.ids import Role
from diffcluster.roles.pipelines import PipelineAdapter, Target, load
from diffcluster.roles.pipelines.directory import ModelDirectory, find_model
from diffcluster.testing import make_tiny_model

Loading = Callable[..., PipelineAdapter]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """More are slower for models as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, or of the embedded one."""

    @functools.cache
    def made(name: str) -> Path:
        return find_model(name) if name == "demo" else make_tiny_model(name, tmp_path_factory.mktemp("models") / name)

    return made


@pytest.fixture(scope="session")
def part_of(path_of: Callable[[str], Path]) -> Loading:
    """A role's part of a model."""

    @functools.cache
    def loaded(name: str, role: Role, dtype: torch.dtype = torch.float32) -> PipelineAdapter:
        return load(ModelDirectory(path_of(name)), Target(role, torch.device("cpu"), dtype, RoleConfig(exact="off")))

    return loaded
