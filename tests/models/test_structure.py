"""Models are read by structure: layers, and everything else that owns parameters, each once."""

import pytest
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from hybrid.models.structure import read_structure
from tests.tiny_models import FAMILIES, tiny_model, with_chat_lora, with_peft


@pytest.mark.parametrize("adapter", [lambda model: model, with_peft, with_chat_lora])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_is_in_exactly_one_part(family, adapter):
    model = adapter(tiny_model(family))
    structure = read_structure(model)
    assert len(structure.layers) == 3
    assert len({type(part.module) for part in structure.layers}) == 1
    parameters = [parameter for part in structure.layers for parameter in part.module.parameters()]
    parameters += [parameter for part in structure.outer for parameter in part.module.parameters(recurse=False)]
    assert {id(parameter) for parameter in parameters} == {id(parameter) for parameter in model.parameters()}
    names = dict(model.named_modules())
    assert all(names[part.name] is part.module for part in (*structure.layers, *structure.outer))
    kinds = {part.kind for part in structure.outer}
    assert {"embedding", "norm", "head"} <= kinds


def test_structure_of_an_encoder_decoder():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 20}
    model = T5ForConditionalGeneration(T5Config(num_layers=2, num_decoder_layers=3, **sizes))
    assert len(read_structure(model).layers) == 5


def test_structure_of_a_model_that_is_no_language_model():
    structure = read_structure(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.LayerNorm(2)))
    assert structure.layers == ()
    assert [part.kind for part in structure.outer] == ["other", "other", "norm"]
