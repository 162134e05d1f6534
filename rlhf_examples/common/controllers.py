"""Coefficients of a loss or reward that follow a measured value, with states for checkpoints."""

import math


class FixedKLController:
    """A constant KL coefficient."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Leaves the coefficient unchanged."""

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that grows while the KL is above `target` and shrinks while it is below (Ziegler et al.,
    arXiv:1909.08593, section 2.2, and their lm-human-preferences; TRL's names).

    target: KL of a completion in nats. horizon: completions over which the coefficient can change by a fifth.
    Raises ValueError for a target or horizon that is not positive.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        super().__init__(init_kl_coef)
        for name, value in {"target": target, "horizon": horizon}.items():
            if not value > 0:
                raise ValueError(f"{name}: {value!r} given; it must be above 0")
        self.target, self.horizon = target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update after `n_steps` completions of all ranks with mean KL `current`. Raises ValueError for NaN."""
        if math.isnan(current):
            raise ValueError(
                "kl: NaN, from the logprobs of the policy or the reference; the KL coefficient would become NaN too"
            )
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class AdaptiveEntropyController:
    """The weight of an entropy bonus that keeps the entropy near a target (Skywork-OR1, arXiv:2505.22312; TRL's
    use_adaptive_entropy): it grows by `delta` after a step whose entropy is at most `target`, else it shrinks, between
    `minimum` and `maximum`; and it is applied only where the last step's entropy was at most the target.

    coef: the first weight. target: mean entropy of a token, in nats.
    """

    def __init__(self, coef: float, target: float, delta: float, minimum: float, maximum: float):
        self.coef, self.target, self.delta, self.minimum, self.maximum = coef, target, delta, minimum, maximum
        self.last_entropy = math.inf  # of the last step; at first no bonus is applied, as in TRL

    @property
    def value(self) -> float:
        """The weight for the next step."""
        return self.coef if self.last_entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Update after an optimizer step whose tokens on all ranks had this mean entropy."""
        low = entropy <= self.target
        self.coef = min(self.coef + self.delta, self.maximum) if low else max(self.coef - self.delta, self.minimum)
        self.last_entropy = entropy

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]
