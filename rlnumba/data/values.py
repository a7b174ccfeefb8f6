"""Any value as JSON has it."""

import math

import numpy as np


def as_json(value, keeps_nan=False):
    """A value that JSON can represent: NumPy scalars and arrays become numbers and lists, numbers that are not finite
    None unless keeps_nan, objects of other types their str."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if keeps_nan or math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): as_json(item, keeps_nan) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, keeps_nan) for item in value]
    return value if isinstance(value, str | int | None) else str(value)
