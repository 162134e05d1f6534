"""Tokens in whose place a model reads an image, a video or sound, and prompts that have them without such an input."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

SETTING = re.compile("(image|video|audio|speech)_token_(id|index)")
# Parts of the names of arguments that give sound.
SOUND = ("audio", "speech", "input_features", "input_values", "feature_attention_mask", "padding_mask")
# Types whose frames of videos have the token of images. GLM's processors tell them apart by mm_token_type_ids.
FRAMES_ARE_IMAGES = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glmga", "nemotron_h_omni")
MAX_SAMPLED = 4096  # sequences that are remembered


def kind_of(name: str) -> str:
    """Return the kind of input that an argument or a setting names: "image", "video", "audio", or "" for none."""
    if "video" in name or name == "second_per_grid_ts":
        return "video"
    if any(part in name for part in ("image", "pixel", "spatial_shapes")):
        return "image"
    return "audio" if any(part in name for part in SOUND) else ""


def start_tokens(config: Any) -> list[int]:
    """Return the tokens before an image or video, and before a sound, if the model counts inputs by them (Qwen's Omni
    models); else none."""
    tokens = [getattr(config, f"{kind}_start_token_id", None) for kind in ("vision", "audio")]
    return [] if None in tokens else tokens


def settings_of(config: Any) -> Iterator[tuple[str, int]]:
    """Yield the settings of a configuration, and of those inside it, that give such a token; with its id."""
    for name, value in vars(config).items() if hasattr(config, "to_dict") else ():
        if SETTING.fullmatch(name) and isinstance(value, int):
            yield name, value
    for name in getattr(config, "sub_configs", ()):
        yield from settings_of(getattr(config, name, None))


class Placeholders:
    """The placeholder tokens of a model.

    A model may draw such a token in a completion, where it is a token like others: `note_sampled` remembers these
    sequences, which may then be scored.
    """

    def __init__(self, config: Any):
        self.settings = {token: name for name, token in settings_of(config)}
        self.tokens = torch.tensor(list(self.settings), dtype=torch.int64)
        # Tokens that are not sampled after a prompt with an input.
        self.undrawn = torch.tensor([*self.settings, *start_tokens(config)], dtype=torch.int64)
        self.frames_are_images = getattr(config, "model_type", "") in FRAMES_ARE_IMAGES
        self.sampled: dict[bytes, None] = {}  # sequences up to their last placeholder, the latest last

    def rows(self, prompts: Sequence[torch.Tensor]) -> list[bool]:
        """Return which prompts, int64 [n] each on the host, have a placeholder."""
        return [bool(torch.isin(prompt, self.tokens).any()) for prompt in prompts]

    def require_inputs(
        self,
        call: str,
        ids: Any,
        mask: torch.Tensor | None = None,
        given: Iterable[str] = (),
        by_row: Sequence[Iterable[str]] = (),
    ) -> None:
        """Raise ValueError if ids [rows, tokens] name an input that is not `given`, by the arguments' names.

        by_row: the arguments of each row; empty: `given`, for all rows.
        """
        if not self.settings or not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        for row, token, _ in self._unknown(ids, mask):
            name, kinds = self.settings[token], {kind_of(argument) for argument in (by_row[row] if by_row else given)}
            kind = "video" if self.frames_are_images and "video" in kinds else kind_of(name)
            if kind not in kinds:
                raise ValueError(
                    f"{call}: row {row} has the token {token} (config.{name}), in whose place the model reads an input "
                    f"of the kind {kind}, and none is given: the model would see nothing there. engine.generate() and "
                    "forwards take it by its name (pixel_values, input_features), rollout(), score() and logps() in "
                    "model_inputs, as the model's processor returns it"
                )

    def note_sampled(self, ids: torch.Tensor, mask: torch.Tensor, prompt_len: int) -> None:
        """Remember sequences [rows, tokens] whose placeholders were drawn behind a prompt of text."""
        if not self.settings:
            return
        blind = {row for row, *_ in self._unknown(ids[:, :prompt_len], mask[:, :prompt_len])}
        for row, _, key in self._unknown(ids, mask):
            if row not in blind:
                self.sampled[key] = None
        for key in list(self.sampled)[:-MAX_SAMPLED]:
            del self.sampled[key]

    def _unknown(self, ids: torch.Tensor, mask: torch.Tensor | None) -> Iterator[tuple[int, int, bytes]]:
        """Yield rows with placeholders that are not known to be drawn: number, first placeholder, ids up to the last
        one."""
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask.bool()
        found = torch.isin(ids, self.tokens.to(ids)) & real.to(ids.device)
        for row in found.any(dim=1).nonzero().flatten().tolist():
            positions = found[row].nonzero().flatten().tolist()
            end = positions[-1] + 1
            key = ids[row, :end][real[row, :end].to(ids.device)].long().cpu().numpy().tobytes()
            if key not in self.sampled:
                yield row, int(ids[row, positions[0]]), key
