"""Second derivatives: what has none says so, rather than counting as a constant."""


def no_second_derivative(what: str) -> RuntimeError:
    """To be raised by the backward of `what` where a graph of it is wanted (create_graph=True)."""
    return RuntimeError(
        f"{what} has no second derivative, and backward was asked for one (create_graph=True): Hessian-vector "
        "products and gradient penalties need a model of torch's own operations"
    )
