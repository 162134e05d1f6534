"""Tensor parallelism through a model's own modules, on this rank's slices, with the collectives around them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers.cache_utils import Cache

from hybrid.decoders.self_check import output_difference
from hybrid.execution.containers import NativeContainer
from hybrid.execution.executor import Executor
from hybrid.execution.module_exchange import ModuleExchange
from hybrid.models.model_info import ModelInfo
from hybrid.models.spec import UnsupportedModel
from hybrid.models.structure import Part
from hybrid.models.tp_plan import TPModule
from hybrid.runtime.parallel import InferenceGroup, any_rank
from hybrid.runtime.waiting import waiting_to
from hybrid.weights.lora import AdaptedModule
from hybrid.weights.module_dicts import ModuleTree, patched_attribute
from hybrid.weights.slices import Shard, chunk

HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


class SharedModules:
    """Makes a model's modules, run on slices, compute what they compute on whole weights.

    info: of the model, which has a tensor-parallel plan.  adapted: its adapted modules.
    new_cache: makes an empty cache of the kind that the model's `generate()` makes.
    """

    def __init__(
        self,
        info: ModelInfo,
        adapted: Sequence[AdaptedModule],
        group: InferenceGroup,
        device: torch.device,
        new_cache: Callable[[], Cache],
    ):
        assert info.tp_plan is not None, "a model without a plan is refused before"
        self.info, self.plan, self.group, self.device = info, info.tp_plan, group, device
        self.exchange = ModuleExchange(group, device, new_cache)
        self.group = self.exchange.group
        self.shard = Shard(group.size, group.index)
        self.plain = {module.wrapper: module.plain for module in adapted}
        self.is_swapped = False

    @waiting_to("check the model's own layers")
    def require_same(self, expected: torch.Tensor) -> None:
        """Raise UnsupportedModel, on every rank, if `first_output` on slices differs from `expected`, on whole weights.

        A collective. Call it inside an open window, before containers are installed.
        """
        try:
            with self.exchange.together():
                reason = whole_difference(first_output(self.info, self.device), expected)
        except UnsupportedModel as error:
            reason = str(error)
        if any_rank([bool(reason)], self.device)[0]:
            raise UnsupportedModel(reason or "another rank cannot follow the tp_plan")

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside the block, modules have the forwards and the numbers of heads for slices; afterwards their own again.

        A nested block, which swaps in other slices, changes neither.
        """
        with ExitStack() as stack:
            if self.is_swapped:
                yield
                return
            stack.enter_context(patched_attribute(self, "is_swapped", True))
            for share in self.plan.shares:
                for module in self._running(share.module) if share.style.before or share.style.after else ():
                    stack.enter_context(patched_attribute(module, "forward", self._around(share, module.forward)))
                    if share.style.before == "lookup":  # torch requires it below the rows; only training uses it
                        stack.enter_context(patched_attribute(module, "padding_idx", None))
            for attention in self.plan.attentions:
                heads, kv_heads = attention.heads // self.group.size, max(attention.kv_heads // self.group.size, 1)
                local = dict.fromkeys(HEAD_COUNTS, heads) | dict.fromkeys(KV_HEAD_COUNTS, kv_heads)
                for name, number in {**local, "num_key_value_groups": heads // kv_heads}.items():
                    if hasattr(attention.module, name):
                        stack.enter_context(patched_attribute(attention.module, name, number))
            yield

    def _running(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that run in a module's place while the snapshot is swapped in."""
        if isinstance(module, ModulesToSaveWrapper):
            return [module.original_module, *module.modules_to_save.values()]
        return [self.plain.get(module, module)]

    def _around(self, share: TPModule, original: Callable) -> Callable:
        style, group = share.style, self.group

        def forward(x: torch.Tensor, *args: Any) -> torch.Tensor:
            if not self.exchange.running:
                raise RuntimeError(
                    f"a {type(share.module).__name__} that ranks share is called by itself; with "
                    "hybrid_engine.inference_tp_size above 1, call a layer or the model"
                )
            if style.before == "part":
                x = chunk(x, x.dim() - 1, self.shard)
            if style.before == "lookup":
                return self._embedding(x, share.width, original)
            output = original(x, *args)
            self.exchange.guard.check_other_ranks()
            if style.after == "sum":
                return group.sum(output)
            return group.gather(output).movedim(0, -2).flatten(-2)[..., : share.width]

        return forward

    def _embedding(self, ids: torch.Tensor, vocabulary: int, original: Callable) -> torch.Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise IndexError(f"token ids from {int(ids.min())} to {int(ids.max())} given; the model has {vocabulary}")
        rows = -(-vocabulary // self.group.size)
        ids = ids - self.group.index * rows
        is_local = (ids >= 0) & (ids < rows)
        local_rows = original(ids * is_local) * is_local[..., None]
        self.exchange.guard.check_other_ranks()
        return self.group.sum(local_rows)


class SharedContainer(NativeContainer):
    """Replaces a module's forward where ranks share the model: every rank runs each call."""

    why = "the Hugging Face module itself, sharded over ranks by the model's tp_plan"

    def __init__(self, part: Part, executor: Executor, exchange: ModuleExchange):
        super().__init__(part, executor)
        self.exchange = exchange
        exchange.parts[part.name] = part.module

    def request(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, if the user calls it directly. Other ranks may call another module."""
        with self.executor.request():
            self.require_inputs(original, args, kwargs)
            return self.run(original, args, kwargs)

    def run(self, original: Callable, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, inside a request. Raises NotImplementedError for `output_attentions`."""
        if self.exchange.running:
            return self.window.forward_of(self.part.module, original)(*args, **kwargs)
        config = getattr(self.part.module, "config", None)
        if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
            raise NotImplementedError(
                "output_attentions=True: with hybrid_engine.inference_tp_size above 1 a rank has only its own heads; "
                "set inference_tp_size to 1"
            )
        return self.exchange.call(self.part.name, args, kwargs)


CHECKED_TOKENS = 16


def first_output(info: ModelInfo, device: torch.device) -> torch.Tensor:
    """Return the model's output for a few random tokens: logits or hidden states.  [tokens, n]

    Raises UnsupportedModel if it is no Hugging Face model, or does not run: its inputs or the slices do not fit.
    """
    if info.config is None or info.text_config is None:
        raise UnsupportedModel(f"{type(info.model).__name__} is no Hugging Face model")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(info.text_config.vocab_size, (1, CHECKED_TOKENS), generator=generator).to(device)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if info.is_encoder_decoder else {})
    try:
        with ModuleTree(info.model).evaluating(), torch.no_grad():
            return info.model(**inputs)[0].flatten(0, -2)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"it does not run on {CHECKED_TOKENS} token ids: {error}") from error


def whole_difference(actual: torch.Tensor, expected: torch.Tensor, weights: torch.dtype | None = None) -> str:
    """Return why `actual` differs from `expected`, the output with whole weights; "" if it does not. [tokens, n] each.

    weights: the weights' dtype, if it is not `expected`'s. In half precision and int8, a quarter of the tokens may
        differ: they may be routed to other experts.
    """
    what, excused = "the model differs from the whole one", len(expected) // 4
    return output_difference(what, actual, expected, weights or expected.dtype, excused)
