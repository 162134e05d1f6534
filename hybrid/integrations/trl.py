"""Where TRL's `rollout_func` was before 0.3: import it from `hybrid.compat.trl`."""

from hybrid.compat.trl import *  # noqa: F403
