"""Which observations are images; nets treat all others as vectors."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box


def is_image(space: gymnasium.Space) -> bool:
    """Whether observations of this space are images for convolutions: uint8 [C, H, W], at least 36 x 36."""
    return isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) == 3 and min(space.shape[1:]) >= 36
