"""The engine's module path before 0.3. Import from `hybrid` instead."""

from hybrid.engine import HybridEngine as HybridEngine
