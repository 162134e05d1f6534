"""The engine's module path before 0.3. Import from `hybrid` instead."""

from hybrid.inference.engine import InferenceEngine as InferenceEngine
from hybrid.inference.engine import init_inference as init_inference
