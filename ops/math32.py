"""Float32 functions in plain arithmetic: the same bits in a vector lane and in a scalar, on every host.

Only `+ - * /`, comparisons, casts, bit casts and selects; no libm, so a batch of 7 and a batch of 256 agree to the
last bit. Three rules make that hold, and every function here keeps them:

* No branch. `select(c, a, b)` evaluates both arms, so that LLVM vectorises any loop over these functions; a Python
  `a if c else b` becomes a branch as soon as an arm is too dear to speculate.
* No reassociation and no contraction. The decorator pins `fastmath=False` even under a caller that sets fastmath
  (numba would let us inherit it); LLVM fuses a multiply and an add only when fastmath allows it. On CUDA NVVM does
  contract by default: compile device code with `fma=False` where these bits matter.
* No zero-division check. `error_model="numpy"` is pinned too; Python's model puts a branch and a raise at every `/`.

Why `register_jitable` and not `@njit(inline="always")`: it is target-neutral (a CUDA kernel compiles the same source
for itself), the callee keeps its own flags as said above, and LLVM inlines it before the loop vectoriser runs.
numba's own inliner merges the callee into the caller's IR, so that the caller's flags apply, and costs typing time.
`forceinline` because LLVM gives up on the longest (softplus stayed scalar); no wrappers because nobody calls these
from Python, and each wrapper costs compile time.

Numba types `float32 * 1.0` as float64 and `int32 + int32` as int64; hence the constants wrapped in `F` and the casts
back to int32, which LLVM folds away. Polynomials: S. Moshier, Cephes single precision (expf, logf, tanhf, sinf, cosf),
with Cody-Waite argument reduction; erf: the two minimax polynomials of N. Juffa.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

F = np.float32
INT = np.int32

_pinned: Callable[[Callable[..., Any]], Callable[..., Any]] = register_jitable(
    fastmath=False, error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """float32 -> the int32 with the same bits."""
    if x != types.float32:
        return None
    return types.int32(x), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def from_bits(typingctx: Any, bits: Any) -> Any:
    """int32 -> the float32 with the same bits."""
    if bits != types.int32:
        return None
    return types.float32(bits), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def select(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """a where condition else b, both already evaluated (float32 or int32)."""
    if condition != types.boolean or a != b:
        return None

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bit = args[0]
        if bit.type.width != 1:
            bit = builder.icmp_unsigned("!=", bit, bit.type(0))
        return builder.select(bit, args[1], args[2])

    return a(condition, a, b), lower


ROUND = F(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low mantissa bits
ROUND_BITS = INT(np.float32(ROUND).view(np.int32))
INFINITY = F(np.inf)
NAN = F(np.nan)
LOG2_E = F(1.44269504088896341)
LN2_HIGH = F(0.693359375)  # 9 significant bits, so that n * LN2_HIGH is exact
LN2_LOW = F(-2.12194440e-4)
SQRT_HALF = F(0.70710678118654752)
SQRT_HALF_BITS = INT(np.float32(SQRT_HALF).view(np.int32))


@_pinned
def exp(x):
    """e**x. 0 below -104, infinity above 88.73, denormal in between; NaN stays NaN."""
    x = F(x)
    x = select(x > F(89.0), F(89.0), x)
    x = select(x < F(-105.0), F(-105.0), x)
    shifted = x * LOG2_E + ROUND
    n = shifted - ROUND
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = F(1.9875691500e-4) * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = (p * (r * r) + r) + F(1.0)
    # 2**n in two factors: n spans [-152, 128], beyond one float's exponent.
    k = INT(bits_of(shifted) - ROUND_BITS)
    half = INT(k >> INT(1))
    rest = INT(k - half)
    return p * from_bits(INT(INT(half + INT(127)) << INT(23))) * from_bits(INT(INT(rest + INT(127)) << INT(23)))


@_pinned
def log(x):
    """Natural logarithm. log(0) = -infinity, negative -> NaN, denormals exact to the same error."""
    x = F(x)
    small = x < F(1.1754944e-38)
    scaled = select(small, x * F(8388608.0), x)
    raw = bits_of(scaled)
    exponent = INT(INT(raw - SQRT_HALF_BITS) >> INT(23))
    f = from_bits(INT(raw - INT(exponent << INT(23)))) - F(1.0)  # mantissa in [sqrt(1/2), sqrt(2)), less one
    e = F(exponent) - select(small, F(23.0), F(0.0))
    z = f * f
    p = F(7.0376836292e-2) * f - F(1.1514610310e-1)
    p = p * f + F(1.1676998740e-1)
    p = p * f - F(1.2420140846e-1)
    p = p * f + F(1.4249322787e-1)
    p = p * f - F(1.6668057665e-1)
    p = p * f + F(2.0000714765e-1)
    p = p * f - F(2.4999993993e-1)
    p = p * f + F(3.3333331174e-1)
    y = p * f * z + e * LN2_LOW - F(0.5) * z
    y = (f + y) + e * LN2_HIGH
    y = select(x == F(0.0), -INFINITY, y)
    y = select(x < F(0.0), NAN, y)
    return select(x < INFINITY, y, x)  # infinity and NaN are their own logarithm


@_pinned
def sigmoid(x):
    """1 / (1 + e**-x), to relative precision at both ends."""
    x = F(x)
    e = exp(select(x < F(0.0), x, -x))
    return select(x < F(0.0), e, F(1.0)) / (F(1.0) + e)


@_pinned
def tanh(x):
    """Hyperbolic tangent: an odd polynomial below 0.625, 1 - 2 / (e**2x + 1) above."""
    x = F(x)
    magnitude = select(x < F(0.0), -x, x)
    z = x * x
    p = F(-5.70498872745e-3) * z + F(2.06390887954e-2)
    p = p * z - F(5.37397155531e-2)
    p = p * z + F(1.33314422036e-1)
    p = p * z - F(3.33332819422e-1)
    near = p * z * x + x
    far = F(1.0) - F(2.0) / (exp(magnitude + magnitude) + F(1.0))
    far = select(x < F(0.0), -far, far)
    return select(magnitude < F(0.625), near, far)


@_pinned
def erf(x):
    """Error function, absolute error below 1.2e-7: an odd polynomial below 0.92, 1 - e**p(|x|) above."""
    x = F(x)
    magnitude = select(x < F(0.0), -x, x)
    z = x * x
    p = F(-5.96761703e-4) * z + F(4.99119423e-3)
    p = p * z - F(2.67681349e-2)
    p = p * z + F(1.12819925e-1)
    p = p * z - F(3.76125336e-1)
    p = p * z + F(1.28379166e-1)
    near = p * x + x
    q = F(-1.72853470e-5) * magnitude + F(3.83197126e-4)
    q = q * z + (F(-3.88396438e-3) * magnitude + F(2.42546219e-2))
    q = q * magnitude - F(1.06777877e-1)
    q = q * magnitude - F(6.34846687e-1)
    q = q * magnitude - F(1.28717512e-1)
    far = F(1.0) - exp(q * magnitude - magnitude)
    far = select(x < F(0.0), -far, far)
    return select(magnitude < F(0.927734375), near, far)


@_pinned
def silu(x):
    """x * sigmoid(x)."""
    x = F(x)
    return x * sigmoid(x)


@_pinned
def gelu(x):
    """x/2 * (1 + erf(x / sqrt(2))), Hendrycks & Gimpel 2016."""
    x = F(x)
    return F(0.5) * x * (F(1.0) + erf(x * SQRT_HALF))


@_pinned
def gelu_tanh(x):
    """The tanh approximation of gelu: x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x**3)))."""
    x = F(x)
    return F(0.5) * x * (F(1.0) + tanh(F(0.7978845608028654) * (x + F(0.044715) * (x * x) * x)))


@_pinned
def softplus(x):
    """log(1 + e**x) = max(x, 0) + log1p(e**-|x|)."""
    x = F(x)
    y = exp(select(x < F(0.0), x, -x))
    u = F(1.0) + y
    return select(x < F(0.0), F(0.0), x) + (log(u) + (y - (u - F(1.0))) / u)


@_pinned
def relu(x):
    """max(x, 0); NaN stays NaN."""
    x = F(x)
    return select(x < F(0.0), F(0.0), x)


@_pinned
def relu2(x):
    """relu(x) squared."""
    y = relu(x)
    return y * y


# pi/2 in four parts; the first three have 11 bits or fewer, so that n * part is exact for |n| < 2**13.
HALF_PI_1 = F(1.5703125)
HALF_PI_2 = F(4.837512969970703e-4)
HALF_PI_3 = F(7.549533620476723e-08)
HALF_PI_4 = F(2.563344151594519e-12)
TWO_OVER_PI = F(0.63661977236758134)


@_pinned
def _sin_of_quadrant(x, quadrant_shift):
    """sin(x + quadrant_shift * pi/2)."""
    shifted = x * TWO_OVER_PI + ROUND
    n = shifted - ROUND
    r = ((x - n * HALF_PI_1) - n * HALF_PI_2) - n * HALF_PI_3
    r = r - n * HALF_PI_4
    quadrant = INT(bits_of(shifted) + quadrant_shift)
    z = r * r
    s = F(-1.9515295891e-4) * z + F(8.3321608736e-3)
    s = s * z - F(1.6666654611e-1)
    s = s * z * r + r
    c = F(2.443315711809948e-5) * z - F(1.388731625493765e-3)
    c = c * z + F(4.166664568298827e-2)
    c = c * z * z - F(0.5) * z + F(1.0)
    y = select(INT(quadrant & INT(1)) != INT(0), c, s)
    return select(INT(quadrant & INT(2)) != INT(0), -y, y)


@_pinned
def sin(x):
    """Sine, absolute error below 2e-7 for |x| < 1e4."""
    return _sin_of_quadrant(F(x), INT(0))


@_pinned
def cos(x):
    """Cosine, absolute error below 2e-7 for |x| < 1e4."""
    return _sin_of_quadrant(F(x), INT(1))
