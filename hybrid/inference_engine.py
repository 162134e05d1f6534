"""Where the engine was before 0.3: import it from `hybrid`."""

from hybrid.inference.engine import InferenceEngine as InferenceEngine
from hybrid.inference.engine import init_inference as init_inference
