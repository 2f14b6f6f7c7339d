"""Forward and backward of the small operations around the matrix products, written out so that they can be fused.

Autograd keeps every intermediate of a norm or an activation; these keep the inputs and recompute. Each pointwise
function is looked up at call time in the `Kernels` of a run, which puts its compiled form there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from kubetune import errors
from kubetune.base import logs
from kubetune.kernels.compiling import CompilingStopped, compiling
from kubetune.plan import memory
from kubetune.plan.devices import missing_compiler


def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    late_cast: bool,
) -> tuple[Tensor, Tensor]:
    """Return `x / rms(x) * (weight + offset)` in fp32, and the reciprocal rms.

    `late_cast`: round once, at the end, as Gemma does.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = wide * scale
    if late_cast:
        return (normed * (weight.float() + offset)).to(x.dtype), scale
    # As Llama does: rounded before the product with the weight, and once more by it.
    return weight * normed.to(x.dtype), scale


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: float,
) -> Tensor:
    """Return the gradient of the input."""
    # y = n · w with n = x / rms(x). So dn = dy · w, and dx = (dn - n · mean(n · dn)) / rms(x).
    normed = x.float() * scale
    wide = grad.float() * (weight.float() + offset)
    # The part along n is taken off, since it would only lengthen x.
    return ((wide - normed * (wide * normed).mean(-1, keepdim=True)) * scale).to(x.dtype)


def rms_norm_weight_gradient(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return the gradient of the weight, summed in fp32."""
    of_tokens = grad.float() * (x.float() * scale)
    return of_tokens.reshape(-1, x.shape[-1]).sum(0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`."""
    return F.silu(gate) * up


def swiglu_backward(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    # y = silu(gate) · up
    d_gate = torch.ops.aten.silu_backward(grad * up, gate)
    d_up = grad * F.silu(gate)
    return d_gate, d_up


def _turn(x: Tensor) -> Tensor:
    """Return (-x₂, x₁) of (x₁, x₂): half a head each. With cos and sin it is the rotation of all pairs at once."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _turn_back(x: Tensor) -> Tensor:
    """Return the transpose of `_turn`."""
    first, second = x.chunk(2, -1)
    return torch.cat([second, -first], -1)


def rotary_forward(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys with their rotary position embedding (arXiv 2104.09864)."""
    # For a head with the numbers (x₁, x₂) and the angle θ of a position:
    #
    #     (x₁, x₂) cos θ + (-x₂, x₁) sin θ      90° turn (1, 0) into (0, 1)
    rotated_q = q * cos + _turn(q) * sin
    rotated_k = k * cos + _turn(k) * sin
    return rotated_q, rotated_k


def rotary_backward(
    d_q: Tensor,
    d_k: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys before the embedding."""
    # The transpose of the rotation, not its inverse: cos and sin may be scaled, as YaRN scales them.
    before_q = d_q * cos + _turn_back(d_q * sin)
    before_k = d_k * cos + _turn_back(d_k * sin)
    return before_q, before_k


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    scale: float,
    multiplier: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and `scale` × the gradient of the raw logits.

    `logits` `[rows, vocabulary]` are overwritten by the gradient.
    """
    # 1. The model's change to its raw logits: cap · tanh(multiplier · logits / cap).
    bent = logits
    if multiplier != 1.0:
        bent = bent.float() * multiplier
    if cap:
        bent = torch.tanh(bent.float() / cap) * cap

    # 2. The loss, and the gradient of the bent logits: softmax minus 1 at the label.
    log_probabilities = F.log_softmax(bent, -1, dtype=torch.float32)
    column = labels[:, None]
    loss = -log_probabilities.gather(1, column)[:, 0]
    if torch.compiler.is_compiling():
        # A scatter would cut the fused loop in two. Comparing with the label does not.
        hit = torch.arange(logits.shape[1], device=logits.device) == column
        gradient = log_probabilities.exp() - hit.float()
    else:
        minus_one = log_probabilities.new_full((1, 1), -1.0).expand_as(column)
        gradient = log_probabilities.exp_().scatter_add_(1, column, minus_one)

    if cap:
        gradient = gradient * (1 - (bent / cap) ** 2)

    return loss, logits.copy_(gradient * (scale * multiplier))


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` `[rows, width]` as 8-bit floats (e4m3), and each row's scale `[rows, 1]`.

    Their product is about `x`.
    """
    wide = x.float()
    # 448 is the largest e4m3 number. A row of zeros would divide by 0.
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (wide / scales).to(torch.float8_e4m3fn), scales


POINTWISE: tuple[Callable[..., Any], ...] = (
    rms_norm_forward,
    rms_norm_backward,
    rms_norm_weight_gradient,
    swiglu_forward,
    swiglu_backward,
    rotary_forward,
    rotary_backward,
    cross_entropy,
    round_rows,
)
_PLAIN: dict[str, Callable[..., Any]] = {f.__name__: f for f in POINTWISE}


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Return how many rows a head scores at once, by the vocabulary and the kind of device."""
    gpu_bytes = None
    if device.type == "cuda":
        gpu_bytes = torch.cuda.get_device_properties(device).total_memory
    return memory.chunk_rows(vocabulary, gpu_bytes)


class Kernels:
    """The pointwise functions of one run, each in the form to be used now: all plain until `compile`."""

    def __init__(self) -> None:
        # True if they are to be compiled after the run's first step: what is wrong with a run shows
        # in that step, and should show before the time that compiling takes.
        self.is_planned = False
        self.forms = dict(_PLAIN)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return the form to be used now; within what is compiled as a whole always the plain one."""
        if torch.compiler.is_compiling():
            return _PLAIN[name]
        return self.forms[name]

    def compile(self) -> None:
        """Use the compiled form of every function from now on. It is made on first use."""
        self.is_planned = False
        for name, function in _PLAIN.items():
            self.forms[name] = _Untried(function, self.forms)


def can_compile(device: torch.device) -> str | None:
    """Return None if torch.compile can work here, else what is missing."""
    return missing_compiler(device.type)


class _Untried:
    """The compiled form of a pointwise function before its first use.

    On that use it has to give what the plain form gives.
    """

    def __init__(self, plain: Callable[..., Any], forms: dict[str, Callable[..., Any]]) -> None:
        self.plain = plain
        self.forms = forms

    def __call__(self, *args: Any) -> Any:
        # Both forms run on the run's own numbers. The compiled one is kept only if they agree, so
        # that a compiler that fails or miscompiles costs speed, and never a wrong gradient:
        #   1. The plain form runs on copies: cross_entropy overwrites its logits.
        #   2. The compiled form is traced with sizes left open: other micro-batches need no new kernel.
        #   3. Both are compared by the norm of the difference, as fused sums add up in another order.
        # The form that is kept goes into `forms`, so that later calls do not come here. Only errors of
        # the compiler are caught: an error of the run itself is raised by the plain form.

        expected = self.plain(*(a.clone() if isinstance(a, Tensor) else a for a in args))
        compiled = torch.compile(self.plain, dynamic=True)
        try:
            with compiling():
                result = compiled(*args)
        except compiler_errors() as error:
            compile_no_more(error)
            return self._give_up(expected, reason_of(error))

        if not _agree(result, expected):
            return self._give_up(expected, "its result differs")
        self.forms[self.plain.__name__] = compiled
        return result

    def _give_up(self, expected: Any, reason: str) -> Any:
        logs.MODEL.warning("%s runs without torch.compile: %s", self.plain.__name__, reason)
        # Said once: later calls find the plain form.
        self.forms[self.plain.__name__] = self.plain
        return expected


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch.compile raises if it fails, and at its limit of variants.

    A version of torch that has no such names may raise anything: then any error leads back to the plain code, which
    raises it again if it is not the compiler's.
    """
    try:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    except ImportError:
        return (Exception,)
    return TorchDynamoException, FailOnRecompileLimitHit, CompilingStopped


def reason_of(error: BaseException) -> str:
    """Return the compiler's reason in one line, without its advice of how to see more."""
    reason = str(error).partition("Set TORCHDYNAMO_VERBOSE")[0]
    return " ".join(reason.split())[:300]


def compile_no_more(error: BaseException) -> None:
    """Compile nothing from now on, if the compiler was left because the process is to stop."""
    if any(isinstance(cause, CompilingStopped) for cause in errors.causes(error, hidden=True)):
        torch.compiler.set_stance("force_eager")


_TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 4e-3,
    torch.float16: 1e-3,
    torch.float8_e4m3fn: 2e-2,
}


def _agree(result: Any, expected: Any) -> bool:
    """True if two results, tensors or tuples of them, are equal up to rounding."""
    if not isinstance(result, Tensor):
        return all(_agree(*pair) for pair in zip(result, expected, strict=True))
    difference = result.new_zeros((), dtype=torch.float32)
    size = difference.clone()

    # In pieces: all logits in fp32 would take more memory than the step itself.
    pieces = zip(result.flatten().split(2**20), expected.flatten().split(2**20), strict=True)
    for piece, expected_piece in pieces:
        difference += (piece.float() - expected_piece.float()).square().sum()
        size += expected_piece.float().square().sum()

    return bool(difference.sqrt() <= _TOLERANCE[result.dtype] * size.sqrt())


class _RmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor,
        eps: float,
        offset: float,
        late_cast: bool,
    ) -> Tensor:
        y, scale = kernels["rms_norm_forward"](
            x,
            weight,
            eps,
            offset,
            late_cast,
        )
        ctx.save_for_backward(x, weight, scale)
        ctx.kernels = kernels
        ctx.offset = offset
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        d_x = d_weight = None
        if ctx.needs_input_grad[1]:
            d_x = ctx.kernels["rms_norm_backward"](
                grad,
                x,
                weight,
                scale,
                ctx.offset,
            )

        if ctx.needs_input_grad[2]:
            d_weight = ctx.kernels["rms_norm_weight_gradient"](grad, x, scale).to(weight.dtype)

        # One for each argument of the forward.
        return None, d_x, d_weight, None, None, None


class _SwiGlu(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        gate: Tensor,
        up: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return cast(Tensor, kernels["swiglu_forward"](gate, up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.kernels["swiglu_backward"](*ctx.saved_tensors, grad)


class _Rotary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return cast(tuple[Tensor, Tensor], kernels["rotary_forward"](q, k, cos, sin))

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_k: Tensor) -> tuple[Any, ...]:
        return None, *ctx.kernels["rotary_backward"](d_q, d_k, *ctx.saved_tensors), None, None


def rms_norm(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    late_cast: bool,
) -> Tensor:
    """Return the RMSNorm (arXiv 1910.07467) of `x`; only inputs are kept for the backward."""
    return cast(Tensor, _RmsNorm.apply(kernels, x, weight, eps, offset, late_cast))  # type: ignore[no-untyped-call]


def swiglu(kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`; only inputs are kept for the backward."""
    return cast(Tensor, _SwiGlu.apply(kernels, gate, up))  # type: ignore[no-untyped-call]


def rotary(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return `rotary_forward`; nothing of q and k is kept for the backward."""
    return cast(tuple[Tensor, Tensor], _Rotary.apply(kernels, q, k, cos, sin))  # type: ignore[no-untyped-call]
