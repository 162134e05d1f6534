"""Prompts with placeholder tokens of each kind, with and without the input that they stand for."""

import pytest
import torch
from transformers import PretrainedConfig

from hybrid.models.placeholders import Placeholders

TOKENS = {"image_token_id": 90, "video_token_id": 91, "audio_token_index": 92, "speech_token_id": 93}
ARGUMENTS = {
    90: ("pixel_values", "image_grid_thw"),
    91: ("pixel_values_videos", "video_grid_thw"),
    92: ("input_features", "input_values"),
    93: ("input_features", "audio_values"),
}


class Config(PretrainedConfig):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        vars(self).update(TOKENS)


@pytest.mark.parametrize("token", ARGUMENTS)
def test_a_placeholder_without_its_input_is_refused(token):
    placeholders, ids = Placeholders(Config()), torch.tensor([[5, 6, 7], [5, token, 7]])
    name = next(name for name, value in TOKENS.items() if value == token)
    others = [argument for other in ARGUMENTS if other < 92 and other != token for argument in ARGUMENTS[other]]
    for given in ((), others if token < 92 else ("pixel_values",)):
        with pytest.raises(ValueError, match=rf"score: row 1 has the token {token} \(config.{name}\)"):
            placeholders.require_inputs("score", ids, given=given)
    for argument in ARGUMENTS[token]:
        placeholders.require_inputs("score", ids, given=(argument,))
        placeholders.require_inputs("score", ids, by_row=[(), (argument,)])
        with pytest.raises(ValueError, match="row 1"):
            placeholders.require_inputs("score", ids, by_row=[(argument,), ()])
    placeholders.require_inputs("score", ids[:1])
    placeholders.require_inputs("score", ids, mask=torch.tensor([[1, 1, 1], [1, 0, 1]]))
    assert placeholders.rows(list(ids)) == [False, True]
