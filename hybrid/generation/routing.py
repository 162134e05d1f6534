"""The experts that tokens are routed to: recorded in rollouts, put in the batch's shape, and replayed in training.

A sampler and a trainer whose sums differ in the last bits may send a token to different experts, and then disagree by
far more than rounding. Replaying the sampler's choices in the training forward removes that part of the difference
("Rollout Routing Replay", arXiv 2510.11370): the experts are the recorded ones, their weights are those of the current
router, through which gradients flow as without replay.

A row has an entry for each of its tokens in order, without padding, except for the last one, which no forward has run
over.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from hybrid.decoders.batch import BLOCK_SIZE, PagedKV
from hybrid.generation.block_pool import blocks_for
from hybrid.generation.sequence import Sequence
from hybrid.models.modules import whole_shape
from hybrid.weights.module_dicts import patched_attribute

NOT_ROUTED = -1  # in place of an expert: padding, and tokens that a rollout did not run through the model
TOPK = (torch.topk, torch.Tensor.topk)
CHECKPOINT = "_gradient_checkpointing_func"  # a module's attribute (transformers 5.23): checkpoint(function, *args)

Choose = Callable[[torch.Tensor, int], torch.Tensor]  # (own choice int64 [tokens, k], number of experts) -> choice


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the routers of a model, in the order of its layers: the modules that transformers declares to give the
    router's logits, each with one weight [experts, hidden], which may be a linear module's in it (AFMoE). Adapters and
    engines around the model are looked through."""
    owners = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    declared = (getattr(owner, "_can_record_outputs", None) or {} for owner in owners)
    recorders = [recorder for outputs in declared if not isinstance(recorder := outputs.get("router_logits"), list)]
    kinds = tuple({recorder.target_class for recorder in recorders if recorder is not None})
    return [module for module in model.modules() if isinstance(module, kinds) and num_experts(module)]


def num_experts(router: nn.Module) -> int:
    """Return the rows of a router's weight, which may be partitioned: its own, or else that of its one module with a
    weight; 0 if it has none, or several."""
    owners = [router] if hasattr(router, "weight") else [part for part in router.children() if hasattr(part, "weight")]
    weights = [owner.weight for owner in owners]
    return whole_shape(weights[0])[0] if len(weights) == 1 else 0


class TopKOverride(TorchFunctionMode):
    """Inside the block, `torch.topk` over the experts returns the experts that `choose` returns, with their scores.

    Other uses of `topk`, such as DeepSeek's over groups of experts, are not changed.

    num_experts: columns of the scores that a router chooses by.  count: choices so far.
    """

    def __init__(self, num_experts: int, choose: Choose):
        super().__init__()
        self.num_experts, self.choose, self.count = num_experts, choose, 0

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.dim() != 2 or scores.shape[1] != self.num_experts:
            return result
        self.count += 1
        indices = result.indices
        chosen = self.choose(indices, self.num_experts)
        return result if chosen is indices else torch.return_types.topk((scores.gather(1, chosen), chosen))


class RouterForward:
    """Stands in for a router's forward: the same forward, with another choice of experts.

    original: the router's forward, also if another RouterForward stands in for it already.
    """

    original: Callable

    def __init__(self, router: nn.Module, choose: Choose):
        self.router, self.choose = router, choose
        self.original = router.forward.original if isinstance(router.forward, RouterForward) else router.forward

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.13 does not annotate it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        experts = num_experts(self.router)
        with TopKOverride(experts, self.choose) as replaced:
            output = self.original(*args, **kwargs)
        if replaced.count != 1:
            raise NotImplementedError(
                f"{type(self.router).__name__} calls torch.topk over its {experts} experts "
                f"{replaced.count} times, so that its choice is not known; routers that call it once are supported"
            )
        return output


@contextmanager
def choosing(routers: list[nn.Module], choices: list[Choose]) -> Iterator[None]:
    """Inside the block each router chooses by its function of `choices`."""
    with ExitStack() as stack:
        for router, choose in zip(routers, choices, strict=True):
            stack.enter_context(patched_attribute(router, "forward", RouterForward(router, choose)))
        yield


@contextmanager
def recorded_routing(model: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Inside the block the routers' choices are appended to the list that it gives: for each router, the experts of
    each call's tokens, int16 [tokens, experts per token]."""
    routers = routers_of(model)
    calls: list[list[torch.Tensor]] = [[] for _ in routers]

    def record(of_router: list[torch.Tensor], indices: torch.Tensor, _num_experts: int) -> torch.Tensor:
        of_router.append(indices.to(torch.int16))
        return indices

    with choosing(routers, [partial(record, of_router) for of_router in calls]):
        yield calls


class RouterReplay:
    """Recorded choices of a model's routers.

    router_indices: integers [tokens, layers with experts, experts per token], by the tokens of one forward; NOT_ROUTED
        leaves a token to the router.
    """

    def __init__(self, routers: list[nn.Module], router_indices: torch.Tensor):
        self.routers, self.router_indices = routers, router_indices
        self.largest = int(router_indices.max()) if router_indices.numel() else NOT_ROUTED

    def choice(self, layer: int, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Return the recorded experts of the layer with that number, int64 [tokens, experts per token], the router's
        own where none are recorded."""
        tokens, _, per_token = self.router_indices.shape
        if indices.shape != (tokens, per_token):
            raise ValueError(
                f"router_indices: {per_token} experts for each of {tokens} tokens given; this forward routes "
                f"{indices.shape[0]} tokens to {indices.shape[1]} experts each. Give the entries of the rows of this "
                "forward, padded or packed as its input_ids are, in a block for each micro batch"
            )
        if self.largest >= num_experts:
            raise ValueError(
                f"router_indices: expert {self.largest} given; the router has experts 0 to {num_experts - 1}"
            )
        self.router_indices = self.router_indices.to(indices.device)  # once: the same tensor if it is there
        recorded = self.router_indices[:, layer].long()
        return torch.where(recorded < 0, indices, recorded)

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Inside the block the routers within `module` choose the recorded experts."""
        modules = set(module.modules())
        numbers = [number for number, router in enumerate(self.routers) if router in modules]
        routers = [self.routers[number] for number in numbers]
        with choosing(routers, [partial(self.choice, number) for number in numbers]):
            yield

    def checkpoint(self, module: nn.Module, original: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """`original`, a module's checkpoint function, over a function that replays. The backward runs it again, perhaps
        after the block of `replay_routing` has ended, and after the next one has begun."""

        def replayed(*inputs: Any, **more: Any) -> Any:
            with self.inside(module):
                return function(*inputs, **more)

        return original(replayed, *args, **kwargs)


@contextmanager
def replay_routing(model: nn.Module, router_indices: torch.Tensor) -> Iterator[None]:
    """Inside the block, forwards of the model's own modules route tokens to the recorded experts, and weigh these by
    the current router. For training: eval mode's fused decoders, and so rollouts and scores, do not replay.

    Backward may run inside or after the block: transformers' gradient checkpointing recomputes with the same choices.
    With a checkpoint function of your own around layers, run it inside, and one micro batch in a block.

    Args:
        model: a Hugging Face mixture of experts, or an engine with it.
        router_indices: integers [rows, tokens, layers with experts, experts per token], for the rows of the forwards
            inside the block, padded or packed as their `input_ids` are: `RolloutBatch.router_indices`, indexed as its
            `sequences`. The router itself chooses for tokens whose entries are -1.

    Raises:
        ValueError: for a model without routers, and for a shape or an expert that does not fit: as far as the model
            decides, before anything runs; by the number of tokens, in the forward.
    """
    routers = routers_of(model)
    if not routers:
        raise ValueError(f"replay_routing: {type(model).__name__} has no routers of experts; train it without replay")
    if router_indices.dim() != 4 or router_indices.dtype.is_floating_point or router_indices.shape[2] != len(routers):
        raise ValueError(
            f"router_indices: {router_indices.dtype} {tuple(router_indices.shape)} given; it must be integers [rows, "
            f"tokens, {len(routers)}, experts per token], with an entry for each of the model's layers with experts"
        )
    replay = RouterReplay(routers, router_indices.flatten(0, 1))
    with replay.inside(model), ExitStack() as stack:
        for module in model.modules():
            if CHECKPOINT in vars(module):
                checkpoint = partial(replay.checkpoint, module, vars(module)[CHECKPOINT])
                stack.enter_context(patched_attribute(module, CHECKPOINT, checkpoint))
        yield


def read_router_indices(kv: PagedKV, sequences: list[Sequence], counts: list[int]) -> None:
    """Read the experts of sequences' tokens from their blocks, before these are freed, into `router_indices`.

    counts: tokens of each sequence that have been run through the model.
    """
    assert kv.router_indices is not None, "the decoder does not record the experts of tokens"
    used = [each.blocks[: blocks_for(count)] for each, count in zip(sequences, counts, strict=True)]
    index = torch.tensor([block for blocks in used for block in blocks], device=kv.router_indices.device)
    parts = kv.router_indices[index].flatten(0, 1).cpu().split([len(blocks) * BLOCK_SIZE for blocks in used])
    for sequence, part, count in zip(sequences, parts, counts, strict=True):
        sequence.router_indices = part[:count]


def padded_router_indices(
    rows: list[torch.Tensor], prompt_mask: torch.Tensor, lengths: torch.Tensor, width: int
) -> torch.Tensor:
    """Return `RolloutBatch.router_indices`: int16 [rows, prompt_len + width, layers with experts, experts per token],
    in host memory, NOT_ROUTED at padding and at each row's last token.

    rows: of each row.  lengths: int64 [rows], tokens of each completion.  width: of the completions.
    """
    prompt_len = prompt_mask.shape[1]
    padded = rows[0].new_full((len(rows), prompt_len + width, *rows[0].shape[1:]), NOT_ROUTED)
    prompt_lengths = prompt_mask.sum(dim=1)
    ends = (prompt_lengths + lengths.to(prompt_lengths.device) - 1).tolist()
    for row, experts, length, end in zip(padded, rows, prompt_lengths.tolist(), ends, strict=True):
        row[prompt_len - length :][:end] = experts[:end]
    return padded
