"""Training scripts of the kinds that people run, written so that one process and two ranks can run them."""

from tests.core.engine.training_recipes import autograd, kept_aside, optimizing, parameters, several_models
from tests.core.engine.training_recipes.session import RECIPES, Session

__all__ = ["RECIPES", "Session", "autograd", "kept_aside", "optimizing", "parameters", "several_models"]
