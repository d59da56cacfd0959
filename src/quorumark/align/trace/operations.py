"""The operations of PyTorch that a trace understands, by what they do to channels."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(  # labels are moved as data is
    "permute transpose t expand squeeze unsqueeze slice select split split_with_sizes unbind index index_select flip "
    "roll constant_pad_nd repeat unfold diagonal pixel_shuffle channel_shuffle movedim narrow tensor_split"
)
VIEWS = _names("view _unsafe_view reshape _reshape_alias")
SAME = _names("clone detach alias contiguous _to_copy lift_fresh dropout native_dropout to")
HOMOGENEOUS = _names("relu relu_ leaky_relu leaky_relu_ neg abs")  # f(s·x) = s·f(x) for s > 0
UNARY = _names(
    "gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ exp log sqrt rsqrt reciprocal clamp clamp_min clamp_max "
    "hardtanh hardtanh_ hardswish hardswish_ hardsigmoid elu elu_ softplus mish mish_ pow square sin cos erf _softmax "
    "_safe_softmax _log_softmax"
)
SUMS = _names("add add_ sub sub_ rsub")
PRODUCTS = _names("mul mul_ div div_")
LINEAR = SUMS | _names("mm bmm addmm baddbmm convolution neg")
MIXES = _names(  # elementwise, of several operands, and not linear
    "where masked_fill masked_fill_ maximum minimum eq ne lt le gt ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not addcmul lerp"
)
REDUCTIONS = _names("mean sum amax amin var std var_mean linalg_vector_norm any all logsumexp")
POOLS = _names(
    "max_pool2d_with_indices max_pool2d avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d "
    "max_pool1d_with_indices avg_pool1d upsample_nearest2d upsample_bilinear2d"
)
NORMS = _names("native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit")
SIZES = _names("_local_scalar_dense is_same_size equal sym_size empty_like zeros_like")  # their results carry no data
