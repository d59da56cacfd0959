"""The operations of PyTorch that a trace understands, by what they do to channels."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(  # labels are moved as data is
    "permute transpose transpose_ t t_ expand squeeze squeeze_ unsqueeze unsqueeze_ slice select split "
    "split_with_sizes unbind index index_select flip roll constant_pad_nd repeat unfold diagonal pixel_shuffle "
    "channel_shuffle movedim narrow tensor_split chunk unsafe_chunk unsafe_split unsafe_split_with_sizes gather "
    "as_strided reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d"
)
PARTS = _names("split split_with_sizes unsafe_split unsafe_split_with_sizes unbind chunk")
APART = _names("select unbind slice split narrow")  # take parts of an axis
VIEWS = _names("view _unsafe_view reshape _reshape_alias")
SAME = _names("clone detach alias contiguous _to_copy lift_fresh dropout native_dropout to")
HOMOGENEOUS = _names("relu relu_ leaky_relu leaky_relu_ neg abs")  # f(s·x) = s·f(x) for s > 0
UNARY = _names(
    "gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ exp log sqrt rsqrt reciprocal clamp clamp_min clamp_max "
    "hardtanh hardtanh_ hardswish hardswish_ hardsigmoid hardsigmoid_ elu elu_ celu celu_ selu selu_ softplus mish "
    "mish_ pow square sin cos erf log1p expm1 sign round floor softshrink hardshrink threshold threshold_ "
    "log_sigmoid_forward _softmax _safe_softmax _log_softmax nan_to_num"
)
SUMS = _names("add add_ sub sub_ rsub")
PRODUCTS = _names("mul mul_ div div_")
LINEAR = SUMS | _names("mm bmm addmm baddbmm convolution neg")
MIXES = _names(  # elementwise, of several operands, and not linear
    "where masked_fill masked_fill_ maximum minimum eq ne lt le gt ge logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not addcmul lerp"
)
REDUCTIONS = _names("mean sum amax amin var std var_mean linalg_vector_norm any all logsumexp")
POOLS = frozenset(
    f"{kind}{dimensions}d{end}"
    for dimensions in (1, 2, 3)
    for kind, end in (
        ("max_pool", "_with_indices"), ("max_pool", ""), ("avg_pool", ""), ("_adaptive_avg_pool", ""),
        ("adaptive_avg_pool", ""), ("adaptive_max_pool", ""), ("upsample_nearest", ""), ("_upsample_nearest_exact", ""),
        ("upsample_linear", ""), ("upsample_bilinear", ""), ("_upsample_bilinear", ""), ("_upsample_bilinear", "_aa"),
        ("upsample_bicubic", ""), ("_upsample_bicubic", "_aa"), ("upsample_trilinear", ""),
    )
)  # fmt: skip
ORDERS = _names(
    "topk sort kthvalue cumsum cumprod cummax cummin logcumsumexp argsort"
)  # depend on the order of an axis
ADDS_AT = _names("index_add index_add_ index_put index_put_ _index_put_impl_ scatter_add scatter_add_")
ZEROS = _names("zeros zeros_like new_zeros zero_")
NORMS = _names("native_batch_norm _native_batch_norm_legit_no_training _native_batch_norm_legit")
SIZES = _names(
    "_local_scalar_dense is_same_size equal sym_size empty_like argmax argmin nonzero"
)  # their results carry no data
