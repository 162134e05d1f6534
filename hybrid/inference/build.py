"""A model's weights loaded, cast, quantized or sliced as `init_inference`'s settings say."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import nn

from hybrid.config import InferenceConfig
from hybrid.execution.tp_modules import first_output, whole_difference
from hybrid.inference.auto_tp import AutoTP
from hybrid.inference.checkpoints import open_checkpoint, own_experts, save_mp_checkpoint
from hybrid.inference.loader import (
    Cast,
    CheckpointWeights,
    ReadTensor,
    cast_model,
    load,
    loaded_while_running,
    materialize,
    move_buffers,
    require_initializable,
    set_data,
    set_tensor,
    state_tensors,
)
from hybrid.inference.validation import why_no_fused_slices
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.runtime.parallel import InferenceGroup, first_to
from hybrid.weights.int8 import WeightLoader, in_int8
from hybrid.weights.model_weights import read_weights
from hybrid.weights.slices import Shard, Slice, slices_of
from hybrid.weights.snapshot import Snapshot


class LoadedSlices:
    """A snapshot of a rank's slices of weights that do not change, read once, one tensor at a time; and the whole
    weights from all ranks' slices.

    read: gives a full tensor by name.
    group: the ranks that together have all slices: tensor-parallel within `group.tensor`, expert-parallel across.
    The model's own parameters stay the same objects but are emptied, as under ZeRO-3.
    """

    def __init__(self, info: ModelInfo, group: InferenceGroup, read: ReadTensor):
        layout, ranks = info.layout, group.tensor.size
        assert layout is not None, "only a model with a fused decoder is sliced for one"
        self.group = group
        self.of_ranks = [
            slices_of(layout, Shard(ranks, index % ranks), Shard(group.size // ranks, index // ranks))
            for index in range(group.size)
        ]
        weights = replace(read_weights(info, layers_per_group=1), groups=())  # they never change
        self.snapshot = snapshot = Snapshot(weights, self.of_ranks[group.index], decoder_only=True)
        self.shapes: dict[torch.Tensor, torch.Size] = {}  # full shapes of the emptied parameters
        for name, param in state_tensors(info.model).items():
            if not isinstance(param, nn.Parameter):  # a buffer, which a decoder reads in place
                set_tensor(info.model, name, param, read(name))
                continue
            if param not in snapshot.kept:
                continue
            tensor = read(name)
            snapshot.keep(param, tensor)
            snapshot.peak_bytes = max(snapshot.peak_bytes, snapshot.nbytes() + tensor.nbytes)
            self.shapes[param] = tensor.shape
            set_data(param, tensor.new_empty(0))

    @contextmanager
    def whole(self, params: Iterable[nn.Parameter]) -> Iterator[int]:
        """Inside the block `params` hold their full tensors, gathered from all ranks' slices. Yields the bytes
        gathered. A collective of the group."""
        emptied = [param for param in params if param in self.shapes]
        try:
            for param in emptied:
                set_data(param, self._gathered(param))
            yield sum(param.nbytes for param in emptied)
        finally:
            for param in emptied:
                set_data(param, param.new_empty(0))

    def _gathered(self, param: nn.Parameter) -> torch.Tensor:
        """Return the full tensor of a parameter. Elements that are in no slice, which no decoder reads, are 0."""
        positions = [self._positions(param, index) for index in range(self.group.size)]
        own = [part.flatten() for part in self.snapshot.parts[param].values() if part is not None]
        mine = torch.cat(own) if own else param.new_empty(0)
        whole = param.new_zeros(self.shapes[param])
        parts = self.group.gather_rows(mine, [len(position) for position in positions])
        for position, part in zip(positions, parts, strict=True):
            real = position > 0  # not padding
            whole.view(-1)[position[real].long() - 1] = part[real]
        return whole

    def _positions(self, param: nn.Parameter, index: int) -> torch.Tensor:
        """Return the position in the full tensor, counted from 1, of each value of a rank's slices; 0: padding.  int
        [values]

        Computed by slicing a tensor of positions in the same way as the weights.
        """
        shape = self.shapes[param]
        table = torch.arange(1, shape.numel() + 1, dtype=torch.int32 if shape.numel() < 2**31 - 1 else torch.int64)
        table = table.view(shape).to(param.device)
        cuts: dict[tuple, Slice] = {cut.key: self.of_ranks[index][cut.ref] for cut in self.snapshot.kept[param]}
        parts = [cuts[key].of(table) for key in self.snapshot.parts[param]]
        kept = [part.flatten() for part in parts if part is not None]
        return torch.cat(kept) if kept else table.new_empty(0)


@dataclass(frozen=True)
class LoadedModel:
    """A model whose weights are loaded.

    slices: the ranks' slices that a fused decoder runs on; None: the model's own modules hold the weights.
    close: undoes what was changed in the model's forwards.
    fallback_reason: why no fused container may run; "" if one may.
    """

    info: ModelInfo
    snapshot: Snapshot
    slices: LoadedSlices | None = None
    close: Callable[[], None] = lambda: None
    fallback_reason: str = ""


class ModelLoader:
    """Loads a model, casts it and places it on `device`; if `group` has several ranks, this rank's slices of it.

    moe_layers: DeepSpeed's MoE layers by name. Raises ValueError if the checkpoint cannot be read or does not fit.
    """

    def __init__(
        self,
        info: ModelInfo,
        config: InferenceConfig,
        moe_layers: dict[str, MoE],
        group: InferenceGroup,
        device: torch.device,
    ):
        self.info, self.model, self.config, self.group, self.device = info, info.model, config, group, device
        self.int8 = config.dtype == torch.int8
        source = config.checkpoint
        self.checkpoint = None if source is None else self._open_checkpoint(source, moe_layers)
        self.cast = Cast(self.model, config.dtype, device)
        if self.checkpoint is not None:
            materialize(self.model, self.checkpoint.missing, device)
        move_buffers(self.model, device)
        if self.checkpoint is None and not self.int8 and group.size == 1:
            cast_model(self.model, self.cast)
        # The tensors that the checkpoint does not have. They stay in memory until this loader is gone.
        missing = state_tensors(self.model) if self.checkpoint is None else set(self.checkpoint.missing)
        self.own = {name: tensor.detach() for name, tensor in state_tensors(self.model).items() if name in missing}

    def _open_checkpoint(self, source: str | dict[str, Any], moe_layers: dict[str, MoE]) -> CheckpointWeights:
        """Return the checkpoint's tensors by the model's names. With `set_empty_params` the model's own are freed."""
        config, shapes = self.config, {name: tensor.shape for name, tensor in state_tensors(self.model).items()}
        tensors = open_checkpoint(source, config.base_dir, config.training_mp_size, shapes)
        checkpoint = CheckpointWeights(self.model, own_experts(moe_layers, tensors), config.strict)
        if config.set_empty_params:
            params = dict(self.model.named_parameters())
            require_initializable(self.model, [name for name in checkpoint.missing if name in params])
            for param in params.values():
                set_data(param, torch.empty_like(param, device="meta"))
        return checkpoint

    def read(self, name: str) -> torch.Tensor:
        """Return a full tensor by its name in the model, cast and on the device: the checkpoint's, else the model's
        own."""
        if name in self.own or self.checkpoint is None:
            return self.cast(name, self.own[name])
        return self.cast(name, self.checkpoint.read(name))

    def load(self) -> LoadedModel:
        """Return the loaded model. Raises NotImplementedError if a quantized or sliced model's output differs from the
        model's."""
        self._save()
        if self.group.size > 1:
            if reason := why_no_fused_slices(self.info, self.config):
                return self._load_sliced_modules(reason)
            slices = LoadedSlices(self.info, self.group, self.read)
            return LoadedModel(self.info, slices.snapshot, slices)
        if self.checkpoint is not None or self.int8:
            expected = None
            if self.checkpoint is None:
                expected = self._output(next(self.model.parameters()).device)
            load(self.model, state_tensors(self.model), self.read, self._quantizers())
            # Fails if a module reads a linear layer's weight directly, which is int8 now.
            self._require_same_output(expected, "dtype: int8 given; {}; use another dtype")
        return self._loaded("" if self.config.replace_with_kernel_inject else "replace_with_kernel_inject=false")

    def _save(self) -> None:
        """With save_mp_checkpoint_path, write this rank's part of the weights. Only the first group of ranks writes."""
        path, group = self.config.save_mp_checkpoint_path, self.group
        if path is None:
            return
        first = group.index == 0 and first_to(f"saves/{Path(path).resolve()}")
        if group.share(torch.tensor(int(first), device=self.device)):
            save_mp_checkpoint(path, state_tensors(self.model), self.read, group.size, group.index)

    def _load_sliced_modules(self, fallback_reason: str) -> LoadedModel:
        """Put this rank's slices into the model's own modules, and compare their output with the full weights'.

        fallback_reason: why no fused decoder runs on the slices. Raises NotImplementedError if the model does not run
        on token ids alone and there is no injection policy.
        """
        model, tensors = self.model, state_tensors(self.model)
        names = {tensor: name for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            if not isinstance(tensor, nn.Parameter):
                set_tensor(model, name, tensor, self.read(name))
        int8 = self._quantizers()
        self.info = ModelInfo(model)  # its linear layers may be int8 layers now
        auto_tp = AutoTP(self.info, self.group.size, self.config.injection_policy)
        parts = [part.module for part in (*self.info.structure.outer, *self.info.structure.layers)]
        with loaded_while_running(parts, names, self.read):
            expected = self._output(self.device)
        if expected is None and self.config.injection_policy is None:
            raise NotImplementedError(
                f"tensor_parallel: {type(model).__name__} does not run on token ids alone; give injection_policy"
            )
        load(model, tensors, self.read, auto_tp.weight_loaders(self.group, names, int8))
        source = f"by {auto_tp.source}"
        # With a policy, a model that takes other inputs is not checked.
        self._require_same_output(
            expected, f"tensor_parallel: {{}}; sliced {source}. Give another injection_policy, or use tp_size=1"
        )
        return self._loaded(f"sharded over {self.group.size} ranks {source}; {fallback_reason}", auto_tp.undo.close)

    def _loaded(self, fallback_reason: str, close: Callable[[], None] = lambda: None) -> LoadedModel:
        """Return the loaded model whose own modules hold the weights."""
        info = ModelInfo(self.model)
        snapshot = Snapshot(read_weights(info, layers_per_group=1))
        return LoadedModel(info, snapshot, close=close, fallback_reason=fallback_reason)

    def _quantizers(self) -> dict[str, WeightLoader]:
        """By parameter name, the function that quantizes a weight; {} unless dtype is int8."""
        return in_int8(self.model, self.config.quant.weight.q_groups) if self.int8 else {}

    def _output(self, device: torch.device) -> torch.Tensor | None:
        """Return the model's output for a few tokens; None if it does not run on token ids alone.  [tokens, n]"""
        with suppress(UnsupportedModel):
            return first_output(self.info, device)
        return None

    def _require_same_output(self, expected: torch.Tensor | None, message: str) -> None:
        """Raise NotImplementedError, on every rank of the group, if a rank's output differs from `expected`.

        message: of the error, with {} for the difference.
        """
        if expected is None:
            return
        try:
            output = first_output(self.info, self.device)
            difference = whole_difference(output, expected.to(self.device), self.config.dtype)
        except UnsupportedModel as reason:
            difference = str(reason)
        if self.group.sum(torch.tensor(int(bool(difference)), device=self.device)):
            raise NotImplementedError(message.format(difference or "the output of another rank differs"))
