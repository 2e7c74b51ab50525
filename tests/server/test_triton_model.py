"""The class that Triton loads: the completed configuration, errors of the options, and requests."""

import importlib
import json
import logging
import sys
from types import SimpleNamespace

import pytest

from paged_backend.server.wire.tensors import INPUTS, OUTPUTS
from tests.support.pb_utils import PB_UTILS

CONFIG = {"parameters": {}, "model_transaction_policy": {"decoupled": True}}
ARGUMENTS = {
    "model_name": "m",
    "model_version": "1",
    "model_config": json.dumps(CONFIG),
    "model_instance_name": "m_0_0",
    "model_instance_kind": "CPU",
    "model_instance_device_id": "0",
}


class LoadError(Exception):
    pass


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The module, with Triton's utilities replaced. The version directory is `tmp_path`."""
    own = {"get_model_dir": lambda: str(tmp_path), "TritonModelException": LoadError}
    pb_utils = SimpleNamespace(**vars(PB_UTILS), **own)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    monkeypatch.delitem(sys.modules, "paged_backend.server.triton_model", raising=False)
    made = importlib.import_module("paged_backend.server.triton_model")
    monkeypatch.setattr(made, "faulthandler", SimpleNamespace(enable=lambda: None))
    monkeypatch.setattr(made, "logging", SimpleNamespace(basicConfig=lambda **options: None, INFO=0))
    yield made
    monkeypatch.delitem(sys.modules, "paged_backend.server.triton_model")


class Config:
    """A fake of Triton's ModelConfig."""

    def __init__(self, inputs):
        self.inputs, self.outputs, self.other = inputs, [], {}
        self.add_input, self.add_output = self.inputs.append, self.outputs.append
        self.set_model_transaction_policy = self.other.update

    def as_dict(self):
        return {"input": list(self.inputs)}

    def set_max_batch_size(self, size):
        self.other["max_batch_size"] = size


def test_a_config_is_completed_with_all_tensors(model):
    given = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}
    config = model.TritonPythonModel.auto_complete_config(Config([given]))
    added = {one["name"]: one for one in config.inputs[1:]}
    assert added.keys() == INPUTS.keys()
    assert [name for name, one in added.items() if not one.get("optional")] == ["text_input"]
    assert {name: (one["data_type"], tuple(one["dims"])) for name, one in added.items()} == {
        name: (spec.data_type, spec.dims) for name, spec in INPUTS.items()
    }
    assert [one["name"] for one in config.outputs] == list(OUTPUTS)
    assert config.other == {"decoupled": True, "max_batch_size": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"max_num_seq": 1}, "did you mean max_num_seqs"), ({"model": "x", "block_size": 0}, "block_size=0")],
)
def test_an_invalid_option_is_the_error_of_the_model(model, tmp_path, options, reason):
    (tmp_path / "model.json").write_text(json.dumps(options))
    with pytest.raises(LoadError, match=f"^ConfigError: .*{reason}"):
        model.TritonPythonModel().initialize(ARGUMENTS)


def test_requests_with_the_newest_backend(model, tmp_path, tiny, caplog):
    """It asks the model whether it is ready, and takes nothing but True for yes."""
    from tests.support.callers import Caller
    from tests.support.in_process import TINY

    (tmp_path / "model.json").write_text(json.dumps({"model": str(tiny[0])} | TINY))
    served = model.TritonPythonModel()
    served.initialize(ARGUMENTS)
    try:
        assert served.is_ready() is True
        sampling = ('{"max_tokens": 3, "ignore_eos": true}', '{"max_tokens": -1}')
        asked = [Caller(text_input="abc", stream=True, sampling_parameters=text) for text in sampling]
        assert served.execute(asked) is None
        assert asked[0].all()
        assert "max_tokens" in asked[1].rejection()
    finally:
        served.finalize()
    assert served.is_ready() is False
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_model_that_is_not_decoupled_is_refused(model):
    """Its second response would be an exception in the server, and the client would wait for ever."""
    settings = json.dumps(CONFIG | {"model_transaction_policy": {"decoupled": False}})
    with pytest.raises(LoadError, match=r"model_transaction_policy.decoupled=false: must be true"):
        model.TritonPythonModel().initialize(ARGUMENTS | {"model_config": settings})
