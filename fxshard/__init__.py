"""fxshard: train and run unmodified PyTorch models with the image or volume split over GPUs."""

from fxshard.api import transform
from fxshard.errors import FxShardError

__version__ = "0.1.0"
__all__ = ["FxShardError", "transform"]
