"""Real values beside the numbers of a field overflow silently, as they do in a proof."""

import numpy as np
import pytest


@pytest.fixture
def silent_floats():
    with np.errstate(all="ignore"):
        yield
