"""The logprobs of TRL's GRPO and RLOO trainers (1.16) by `engine.logps`: `hybrid.install(training_forward="packed")`.

Losses equal TRL's own within rounding. What TRL's pass does beyond logprobs of text stays TRL's: images, the auxiliary
loss of a mixture's routers, evaluation, and models outside of a HybridEngine.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hybrid.training.engine import HybridEngine
from hybrid.training.logps import Logps
from hybrid.training.packed_forwards import evaluating

METHOD = "_get_per_token_logps_and_entropies"
ARGUMENTS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss")


def trainer_classes() -> list[type]:
    """Return TRL's trainers whose logprobs can be replaced.

    Raises ImportError without TRL, or if its trainers have another method.
    """
    import trl  # an optional package

    classes = [trl.GRPOTrainer, trl.RLOOTrainer]
    if missing := [kind.__name__ for kind in classes if not hasattr(kind, METHOD)]:
        raise ImportError(f"training_forward: trl {trl.__version__} has no {METHOD} in {missing}; use trl 1.16")
    return classes


def logps_by(forward: str, original: Callable, trainer: Any, model: nn.Module, *args: Any, **kwargs: Any) -> tuple:
    """Return (logps, entropies or None, None), as the trainer's own method does.

    Args:
        forward: as in `HybridEngine.logps`.
        original: the trainer's method.
        trainer: the trainer.
        model: the trainer's model or engine, or its reference model.
        args: the other arguments of the method, with `kwargs`.
    """
    engine, reference = trainer.model_wrapped, getattr(trainer, "ref_model", None)
    given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
    if model is reference:
        engine = reference
    others = [name for name, value in given.items() if name not in ARGUMENTS and value is not None]
    if (
        not isinstance(engine, HybridEngine)
        or model not in (engine, engine.module)
        or not trainer.model.training  # evaluation
        or others
        or given.get("compute_aux_loss")
    ):
        return original(trainer, model, *args, **kwargs)
    ids, mask, width = (given[name] for name in ARGUMENTS[:3])
    compute: Callable[..., Logps] = frozen_logps(engine) if model is reference else engine.logps
    entropy, size = bool(given.get("compute_entropy")), given.get("batch_size") or len(ids)
    parts = [
        compute(part_ids, part_mask, part_mask[:, -width:], trainer.temperature, entropy=entropy, forward=forward)
        for part_ids, part_mask in zip(ids.split(size), mask.split(size), strict=True)
    ]
    logps = torch.cat([part.per_token_logps for part in parts])
    entropies = torch.cat([part.entropies for part in parts if part.entropies is not None]) if entropy else None
    return logps, entropies, None


def frozen_logps(engine: HybridEngine) -> Callable[..., Logps]:
    """Return `engine.logps` of a reference model, which stays in eval mode.

    By the policy's forward: while their weights are equal, the KL of the two is 0.0 and has no gradient.
    """

    def logps(*args: Any, **kwargs: Any) -> Logps:
        engine.train()
        try:
            with evaluating(engine.module):
                return engine.logps(*args, **kwargs)
        finally:
            engine.eval()

    return logps
