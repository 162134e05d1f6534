"""Where the engine was before 0.3: import it from `hybrid`."""

from hybrid.engine import HybridEngine as HybridEngine
