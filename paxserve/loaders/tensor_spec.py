"""What is known of a stored tensor before it is read."""

from typing import NamedTuple

import numpy as np


class TensorSpec(NamedTuple):
    """Shape and type that `Checkpoint.read` returns for a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype
