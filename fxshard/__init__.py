"""fxshard: train and run unmodified PyTorch models with the image or volume split over GPUs."""

from fxshard.api import transform
from fxshard.dry_run import Plan, plan
from fxshard.errors import FxShardError
from fxshard.verification import Verification, verify

__version__ = "0.1.0"
__all__ = ["FxShardError", "Plan", "Verification", "plan", "transform", "verify"]
