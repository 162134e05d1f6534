"""A model's inputs besides token ids (images, videos, sound), as its processor returns them, and row by row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from hybrid.models.placeholders import SOUND, Placeholders, kind_of, start_tokens

RowInputs = Mapping[str, torch.Tensor]  # of one row: tensors that a batch joins along their first dimension
ModelInputs = Mapping[str, torch.Tensor] | Sequence[RowInputs]  # as a caller gives them: a batch, or each row's

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # [rows, tokens] in a batch, [tokens] in a row
NO_INPUTS: RowInputs = {}
# Parts of the names that processors give images, videos and sound (transformers 5.23).
NAMES = "pixel", "image", "video", *SOUND, "second_per_grid", "spatial_shapes", "target_sizes", "token_type_ids"


def is_model_input(name: str) -> bool:
    """Whether an argument of a model's forward has such a name."""
    return any(part in name for part in NAMES)


def split_inputs(
    model_inputs: ModelInputs | None, config: Any, ids: torch.Tensor, mask: torch.Tensor
) -> list[RowInputs]:
    """Return each row's inputs, as `InputSplitter.rows`; an empty list if none are given: all rows are text."""
    if model_inputs is None or (isinstance(model_inputs, Mapping | Sequence) and not model_inputs):
        return []
    require_separate_sound(config, ids)
    return InputSplitter(config, ids, mask).rows(model_inputs)


def require_separate_sound(config: Any, ids: torch.Tensor) -> None:
    """Raise ValueError if a prompt has a video with its own sound, whose positions need a flag (Qwen's Omni models)."""
    if not (starts := start_tokens(config)):
        return
    video, sound = starts
    rows = ((ids[:, :-1] == video) & (ids[:, 1:] == sound)).any(dim=1).nonzero()
    if len(rows):
        raise ValueError(
            f"model_inputs: row {int(rows[0])} has a video with its sound inside (use_audio_in_video); give the "
            "processor the video and its sound as two inputs, with use_audio_in_video=False"
        )


class InputSplitter:
    """Splits a processor's batch into rows.

    A tensor's first dimension counts rows; or images of all rows (videos, sounds), which belong to the rows by their
    placeholder tokens; or patches of all images, as many of each as its row of `image_grid_thw` says. A sound's tokens
    are consecutive, with other tokens between two sounds.

    Args:
        config: of the model.
        ids: int64 [rows, tokens].
        mask: 1 for tokens, of the same shape.
    """

    def __init__(self, config: Any, ids: torch.Tensor, mask: torch.Tensor):
        self.ids, self.mask = ids.cpu(), mask.cpu().bool()
        self.placeholders = Placeholders(config)
        self.kinds = sorted({kind_of(name) for name in self.placeholders.settings.values()})  # that the model reads
        self.types: torch.Tensor | None = None  # of the batch's tokens: 1 for images, 2 for videos
        self.merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)

    def rows(self, inputs: ModelInputs) -> list[RowInputs]:
        """Return each row's inputs.

        Args:
            inputs: a processor's batch; or a list with the inputs of each row, as the processor returns them for it
                alone.

        Raises:
            TypeError: for inputs of another type.
            ValueError: if they cannot be split, or are not as many as rows.
        """
        if isinstance(inputs, Mapping):
            self._require_tensors(inputs)
            types = inputs.get("mm_token_type_ids")
            self.types = types.cpu() if types is not None and types.shape == self.ids.shape else None
            by_name = {name: self._split(name, value, inputs) for name, value in inputs.items()}
            return [
                {name: parts[row] for name, parts in by_name.items() if len(parts[row])} for row in range(len(self.ids))
            ]
        if not isinstance(inputs, Sequence) or not all(isinstance(row, Mapping) for row in inputs):
            raise TypeError(
                f"model_inputs: {type(inputs).__name__} given; it must be a dict of tensors, as the model's processor "
                "returns it, or a list with such a dict for each row"
            )
        if len(inputs) != len(self.ids):
            raise ValueError(f"model_inputs: a list of {len(inputs)} given for {len(self.ids)} rows")
        for row in inputs:
            self._require_tensors(row)
        return [
            {name: value.flatten() if name in TOKEN_TYPES else value for name, value in row.items()} for row in inputs
        ]

    def _require_tensors(self, inputs: Mapping[str, Any]) -> None:
        for name, value in inputs.items():
            if name in ("input_ids", "attention_mask"):
                raise ValueError(f"model_inputs: {name} given; give it as the call's own argument")
            if not isinstance(value, torch.Tensor) or not value.dim():
                raise TypeError(
                    f"model_inputs: {name} is a {type(value).__name__}; it must be a tensor with a dimension of rows "
                    "or of images, as the processor returns it with return_tensors='pt'"
                )

    def _split(self, name: str, value: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return each row's part of a tensor."""
        if name in TOKEN_TYPES and value.shape == self.ids.shape:
            return [of_row[kept] for of_row, kept in zip(value, self.mask.to(value.device), strict=True)]
        kind = kind_of(name) or (self.kinds[0] if len(self.kinds) == 1 else "image")
        grid = inputs.get(f"{kind}_grid_thw")
        if grid is not None:
            per_row = self._images_per_row(kind, grid)
            if len(value) != len(grid):  # patches of all images
                patches = grid.prod(dim=1).tolist()
                images = iter(patches)
                per_row = [sum(next(images) for _ in range(count)) for count in per_row]
            if sum(per_row) == len(value):
                return list(value.split(per_row))
        elif (per_row := self._shares(kind, len(value), inputs)) is not None:
            return list(value.split(per_row))
        raise ValueError(
            f"model_inputs: {name} of shape {tuple(value.shape)} does not fit the rows' placeholder tokens; give a "
            "list with a dict for each row, as the processor returns it for that row alone"
        )

    def _found(self, kind: str) -> torch.Tensor:
        """Return which tokens are placeholders of a kind; bool [rows, tokens]."""
        if self.placeholders.frames_are_images and kind != "audio":
            if self.types is not None:
                return (self.types == (2 if kind == "video" else 1)) & self.mask
            kind = "image"
        tokens = [token for token, name in self.placeholders.settings.items() if kind_of(name) == kind]
        return torch.isin(self.ids, torch.tensor(tokens, dtype=self.ids.dtype)) & self.mask

    def _tokens_per_row(self, kind: str) -> list[int]:
        """Return the placeholder tokens of each row."""
        return self._found(kind).sum(dim=1).tolist()

    def _images_per_row(self, kind: str, grid: torch.Tensor) -> list[int]:
        """Return how many images each row has.  grid: int64 [images, 3], of patches."""
        sizes = iter((grid.prod(dim=1) // self.merge**2).tolist())
        counts = []
        for tokens in self._tokens_per_row(kind):
            count = 0
            while tokens > 0:
                tokens -= next(sizes, tokens + 1)
                count += 1
            if tokens < 0:
                raise ValueError(
                    f"model_inputs: {kind}_grid_thw {grid.tolist()} does not fit the rows' placeholder tokens, "
                    f"{self._tokens_per_row(kind)}: one of t * h * w patches has t * h * w / {self.merge**2} tokens"
                )
            counts.append(count)
        return counts

    def _shares(self, kind: str, images: int, inputs: Mapping[str, torch.Tensor]) -> list[int] | None:
        """Return how many images each row has, if all have equally many tokens, or if each row has one; else None.

        A row has as many sounds as runs of their tokens.
        """
        if kind == "audio":
            found = self._found(kind)
            runs = (found & ~F.pad(found, (1, -1))).sum(dim=1).tolist()
            if sum(runs) == images:
                return runs
        pixels, of_pixels = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
        if (
            pixels is not None
            and pixels.dim() == 5
            and of_pixels is not None
            and of_pixels.shape[:2] == pixels.shape[:2]
        ):
            return [1] * images if images == len(self.ids) else None  # [rows, images, ...]: Idefics, SmolVLM
        tokens = self._tokens_per_row(kind)
        each, rest = divmod(sum(tokens), max(images, 1))
        if each and not rest and all(count % each == 0 for count in tokens):
            return [count // each for count in tokens]
        return [1] * images if images == len(self.ids) else None


def joined_inputs(rows: Sequence[RowInputs], mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward over rows.

    Images of different sizes are padded with zeros on the right of each dimension, as processors pad them.

    Args:
        rows: each row's inputs. Its token types may be shorter than the row: the remaining tokens are text.
        mask: 1 for tokens, [rows, width].
    """
    inputs: dict[str, torch.Tensor] = {}
    names = {name: None for row in rows for name in row}.keys()  # in their order
    for name in names:
        parts = [row[name] for row in rows if name in row]
        if name in TOKEN_TYPES:
            types = torch.zeros(mask.shape, dtype=parts[0].dtype)
            for index, row in enumerate(rows):
                known = row.get(name, types[0, :0]).cpu()
                places = mask[index].cpu().nonzero().flatten()[: len(known)]
                types[index, places] = known[: len(places)]
            inputs[name] = types.to(mask.device)
            continue
        if name.replace("pixel_values", "target_sizes") in names - {name}:  # [1, ..., patches]: MiniCPM-V
            inputs[name] = torch.cat(parts, dim=-1).to(mask.device)
            continue
        shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        inputs[name] = torch.cat([padded_to(part, shape) for part in parts]).to(mask.device)
    return inputs


def padded_to(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor [n, ...] with zeros after each dimension but the first, to [n, *shape]."""
    padding = [size for dim, width in enumerate(shape, 1) for size in (width - tensor.shape[dim], 0)]
    return F.pad(tensor, padding[::-1])
