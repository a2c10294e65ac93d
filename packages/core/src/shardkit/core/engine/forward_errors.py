"""Adds to an error of a forward the module that it comes from, and what to do about it."""

__all__ = ["add_module"]


def add_module(error: BaseException, fqn: str) -> None:
    """Adds a note to errors of torch that do not say which module of a sharded model they come from.

    Args:
        error: raised by the forward of a state.
        fqn: name of the state's module.
    """
    if not isinstance(error, RuntimeError) or hasattr(error, "__notes__"):  # an inner module has added it
        return
    if "modified inplace. This view was created inside a custom Function" in str(error):
        error.add_note(
            f"'{fqn}' changes one of its inputs in place, or a view of one. fully_shard follows the gradients "
            "of these inputs: clone the input first"
        )
    elif "got mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            f"'{fqn}' computes with a sharded parameter. Parameters of another fully_shard call are there "
            "while a module of that call runs: compute with them in its forward, give both modules to one call "
            "(fully_shard([a, b])), or unshard() the other module first"
        )
