"""Detects changes of the training weights, and keeps their version."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hybrid.execution.sleep import Sleep
from hybrid.weights.model_weights import WeightVersion
from hybrid.weights.module_dicts import ModuleTree
from hybrid.weights.watch import WeightWatch


class WeightChanges:
    """Detects changes of weights that the engine does not make itself: by the optimizer, by writes, by other modules.

    Args:
        policy: the part of the engine's module that generates.
        tree: the modules of the engine's module.
        version: counts the changes.
        sleep: of the engine; at level 2 the weights are in host memory, and nothing is detected.
        optimizer: whose steps write weights.

    Attributes:
        is_outdated: modules or parameters were replaced since the model was last read.
    """

    def __init__(self, policy: nn.Module, tree: ModuleTree, version: WeightVersion, sleep: Sleep, optimizer: Any):
        self.policy, self.tree, self.version, self.sleep, self.is_outdated = policy, tree, version, sleep, False
        self.watch = WeightWatch(policy.parameters())
        is_hooked = isinstance(optimizer, torch.optim.Optimizer)
        self.hook = optimizer.register_step_pre_hook(version.begin_update) if is_hooked else None

    def detect(self, in_window: bool) -> bool:
        """Update the weight version for changes since the last call.

        Args:
            in_window: whether a window is open; replaced modules then count once it has ended.

        Returns:
            Whether modules or parameters were added, removed, replaced or cast.
        """
        if self.sleep.level == 2:
            return False
        self.version.end_update()
        if self.tree.differs():
            if not in_window:
                self.tree.changed()
                self.watch, self.is_outdated = WeightWatch(self.policy.parameters()), True
                self.version.loads += 1
            return True
        self.version.loads += self.watch.written()
        return False

    @contextmanager
    def ignoring(self) -> Iterator[None]:
        """Do not count writes inside the block: the engine counts them, or they do not change values."""
        with self.watch.ignoring():
            yield

    def close(self) -> None:
        """Take the hook off the optimizer, and the counters off the parameters."""
        if self.hook is not None:
            self.hook.remove()
        self.watch.close()
