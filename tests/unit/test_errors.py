"""Every failure code is one class, and comes back from the wire as that class."""

from __future__ import annotations

from typing import get_args

import pytest

from diffcluster import errors
from diffcluster.errors import FailureCode, RequestError, request_error

CODES = get_args(FailureCode)


@pytest.mark.parametrize("code", CODES)
def test_a_code_becomes_the_class_that_has_it(code: FailureCode) -> None:
    error = request_error(code, "what happened", "prompt")
    assert error.code == code
    assert (str(error), error.message, error.param) == ("what happened", "what happened", "prompt")


def test_each_class_has_a_code_of_its_own_and_no_code_is_left_over() -> None:
    assert sorted(cls.code for cls in RequestError.__subclasses__()) == sorted(CODES)


@pytest.mark.parametrize("cls", RequestError.__subclasses__())
def test_each_class_has_an_http_face(cls: type[RequestError]) -> None:
    assert 400 <= cls.status <= 599
    assert cls.kind.endswith("error")


def test_only_what_can_pass_by_itself_should_be_retried() -> None:
    retried = {cls.code for cls in RequestError.__subclasses__() if cls.should_retry}
    assert retried == {"queue_full", "no_instance", "transfer_failed"}


def test_all_errors_are_exported_and_of_one_tree() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == {name for name in errors.__all__ if name.endswith("Error")}
    assert all(issubclass(getattr(errors, name), errors.DiffclusterError) for name in classes)


def test_a_config_error_names_its_path() -> None:
    error = errors.ConfigError("router.port", "is taken")
    assert (str(error), error.path) == ("router.port: is taken", "router.port")


def test_a_transfer_error_says_whether_bytes_may_still_arrive() -> None:
    assert not errors.TransferError("timed out", settled=False).settled


@pytest.mark.parametrize(("component", "text"), [("unet", "unet: is missing"), ("", "is missing")])
def test_a_model_error_names_the_component_if_it_is_one(component: str, text: str) -> None:
    assert str(errors.ModelError(component, "is missing")) == text
