"""Memory, communication and time of a training job, before it runs and without a cluster."""

from shardkit.tools.estimating.job import EstimateError, Policies, TrainingJob
from shardkit.tools.estimating.result import Estimate, estimate, estimate_job

__all__ = ["Estimate", "EstimateError", "Policies", "TrainingJob", "estimate", "estimate_job"]
