"""Between forward and the gradient: deferred weight gradients, recomputation, gradient readiness."""

from core.autograd.bag import StageContext, WeightGradBag
from core.autograd.embedding import deferred_embedding
from core.autograd.gradients import has_main_grad, main_grad_of
from core.autograd.linear import deferred_linear
from core.autograd.offload import OffloadHandle, offload_activations
from core.autograd.products import Comm
from core.autograd.protocols import GradSync, NullGradSync
from core.autograd.recomputation.notes import Notes, note, notes_activations, which_run
from core.autograd.recomputation.policy import apply_recompute, has_regions
from core.autograd.recomputation.region import recompute
from core.autograd.reroute import RerouteHandle, reroute

__all__ = [
    "Comm",
    "GradSync",
    "Notes",
    "NullGradSync",
    "OffloadHandle",
    "RerouteHandle",
    "StageContext",
    "WeightGradBag",
    "apply_recompute",
    "deferred_embedding",
    "deferred_linear",
    "has_main_grad",
    "has_regions",
    "main_grad_of",
    "note",
    "notes_activations",
    "offload_activations",
    "recompute",
    "reroute",
    "which_run",
]
