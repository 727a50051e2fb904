"""Define the optimizer Muon for the filters of convolutions.

Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, so that an
update changes all directions equally (Jordan 2024, https://kellerjordan.github.io/posts/muon/).
`torch.optim.Muon` takes matrices only; this one flattens filters, and updates every other parameter,
such as biases and the parameters of norms, as AdamW does.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial whose repetition sends singular values to about one (Jordan 2024)."""
N_ITERATIONS = 5
MATCHED_RMS = 0.2
"""Root mean square of an update in units of the learning rate, as of AdamW (Liu 2025, arXiv 2502.16982), so
that both take the same learning rates."""


class Muon(torch.optim.Optimizer):
    """Update filters by their orthogonal momentum, and all other parameters as AdamW.

    Args:
        parameters: Parameters; those of two axes and more are updated as matrices.
        lr: Learning rate, of the size that AdamW would have.
        weight_decay: Decoupled weight decay.
        momentum: Share of the last momentum that is kept, with Nesterov's correction.
        betas: Averages of the gradient and of its square for the parameters that are no filters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update = self._filter_update if _is_filter(parameter) else self._adam_update
                    update(parameter, parameter.grad, group)
        return loss

    def _filter_update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - momentum)
        ahead = gradient.lerp(state["momentum"], momentum).flatten(1)
        update = orthogonal(ahead)
        scale = MATCHED_RMS * math.sqrt(max(ahead.shape))
        parameter.add_(update.reshape(parameter.shape), alpha=-group["lr"] * scale)

    def _adam_update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = float(state["step"])
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].lerp_(gradient.square(), 1 - second)
        root = (state["square"] / (1 - second**step)).sqrt_().add_(1e-8)
        parameter.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - first**step))


def _is_filter(parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix after flattening: more than a row of numbers."""
    return parameter.ndim >= 2 and parameter.shape[0] > 1 and parameter.numel() > parameter.shape[0]


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest matrix with orthogonal rows, or columns where those are fewer.

    The polynomial is applied to the small product of the matrix with itself, and the result to the
    matrix once: the same iteration for a fifth of the computation where filters are long.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = (wide / wide.norm().clamp(min=1e-7)).float()
    gram = wide @ wide.T
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = identity
    a, b, c = COEFFICIENTS
    for _ in range(N_ITERATIONS):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor @ product
        gram = factor @ gram @ factor
    result = product @ wide
    return result if matrix.shape[0] <= matrix.shape[1] else result.T
