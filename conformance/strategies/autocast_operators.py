"""Calls of the operators that autocast has rules for on some device, and of similar operators without a rule.

The calls do not say which rule an operator has. The reference shows it.
"""

from __future__ import annotations

import torch

from conformance.strategies.operator_calls import D, DrawnTensor, N, OperatorCall, P, call, ints

_OF_ONE = """
    acos asin atan cosh sinh tan tanh erf erfinv exp expm1 exp2 log log10 log2 log1p reciprocal rsqrt sqrt
    square sin cos sigmoid softplus relu gelu silu mish elu selu celu hardtanh hardswish leaky_relu
    logsigmoid tanhshrink softsign abs neg sign floor round lgamma digamma sinc i0 prod sum mean std var max
    min argmax median numel norm trace isfinite clone t flatten detach contiguous nonzero
"""
_TRANSFORMS = """
    fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 hfft2 ihfft2 fftn ifftn rfftn irfftn hfftn ihfftn
    fftshift
"""
_OF_MATRICES = """
    cholesky cholesky_inverse inverse pinverse geqrf _lu_with_info qr svd det logdet slogdet matrix_exp
    linalg_cond linalg_cholesky linalg_cholesky_ex linalg_inv linalg_inv_ex linalg_qr linalg_svd
    linalg_svdvals linalg_eig linalg_eigvals linalg_eigh linalg_eigvalsh linalg_pinv linalg_lu_factor
    linalg_lu linalg_matrix_rank linalg_det
"""
_OF_TWO = """
    add sub mul div maximum minimum fmod remainder hypot eq ne ge gt le lt equal allclose isclose logaddexp
    copysign float_power true_divide type_as
"""

# Arguments of an LSTM with 3 input and 4 output features.
_WEIGHTS, _STATES = [N(16, 3), N(16, 4), N(16), N(16)], (N(1, 2, 4), N(1, 2, 4))
_LENGTHS = (ints([1, 2], [2, 1]), [4, 4], [2, 2])
_LU = (torch.tensor([[1, 2, 3]], dtype=torch.int32),)

CALLS: dict[str, OperatorCall] = {
    # Products, and operators that are built on products.
    "mm": call(N(3, 4), N(4, 2)),
    "bmm": call(N(2, 3, 4), N(2, 4, 2)),
    "matmul": call(N(2, 3, 4), N(4, 2)),
    "mv": call(N(3, 4), N(4)),
    "dot": call(N(4), N(4)),
    "vdot": call(N(4), N(4)),
    "inner": call(N(3, 4), N(2, 4)),
    "outer": call(N(3), N(4)),
    "addmm": call(N(3, 2), N(3, 4), N(4, 2)),
    "addmv": call(N(3), N(3, 4), N(4)),
    "addr": call(N(3, 4), N(3), N(4)),
    "addbmm": call(N(3, 2), N(2, 3, 4), N(2, 4, 2)),
    "baddbmm": call(N(2, 3, 2), N(2, 3, 4), N(2, 4, 2)),
    "_addmm_activation": call(N(2), N(3, 4), N(4, 2)),
    "linear": call(N(3, 4), N(2, 4), N(2)),
    "bilinear": call(N(2, 3), N(2, 4), N(5, 3, 4), N(5)),
    "einsum": call("bij,bkj->bik", [N(2, 3, 4), N(2, 5, 4)]),
    "tensordot": call(N(2, 3), N(3, 4), [1], [0]),
    "chain_matmul": call([N(2, 3), N(3, 4), N(4, 2)]),
    "linalg_multi_dot": call([N(2, 3), N(3, 4), N(4, 2)]),
    "linalg_vecdot": call(N(3, 4), N(3, 4)),
    "linalg_matmul": call(N(3, 4), N(4, 2)),
    "linalg_matrix_power": call(N(3, 3), 3),
    "kron": call(N(2, 2), N(2, 3)),
    "cdist": call(N(3, 4), N(2, 4)),
    "pdist": call(N(3, 4)),
    "scaled_dot_product_attention": call(N(1, 2, 4, 8), N(1, 2, 4, 8), N(1, 2, 4, 8)),
    "_scaled_dot_product_flash_attention": call(N(1, 2, 4, 8), N(1, 2, 4, 8), N(1, 2, 4, 8)),
    "_native_multi_head_attention": call(
        N(2, 3, 8), N(2, 3, 8), N(2, 3, 8), 8, 2, N(24, 8), N(24), N(8, 8), N(8)
    ),
    "conv1d": call(N(1, 2, 5), N(3, 2, 3), N(3)),
    "conv1d.padding": call(N(1, 2, 5), N(3, 2, 3), N(3), 1, "same"),
    "conv2d": call(N(1, 2, 5, 5), N(3, 2, 3, 3), N(3)),
    "conv2d.padding": call(N(1, 2, 5, 5), N(3, 2, 3, 3), N(3), 1, "valid"),
    "conv3d": call(N(1, 2, 4, 4, 4), N(3, 2, 2, 2, 2), N(3)),
    "conv3d.padding": call(N(1, 2, 4, 4, 4), N(3, 2, 3, 3, 3), N(3), 1, "same"),
    "conv_tbc": call(N(5, 1, 2), N(3, 2, 3), N(3), 1),
    "conv_transpose1d": call(N(1, 2, 5), N(2, 3, 3), N(3)),
    "conv_transpose2d.input": call(N(1, 2, 4, 4), N(2, 3, 3, 3), N(3)),
    "conv_transpose3d.input": call(N(1, 2, 3, 3, 3), N(2, 3, 2, 2, 2), N(3)),
    "convolution": call(N(1, 2, 5), N(3, 2, 3), N(3), [1], [0], [1], False, [0], 1),
    "_convolution": call(
        N(1, 2, 5), N(3, 2, 3), N(3), [1], [0], [1], False, [0], 1, False, False, False, False
    ),
    "_convolution.deprecated": call(
        N(1, 2, 5), N(3, 2, 3), N(3), [1], [0], [1], False, [0], 1, False, False, False
    ),
    "cudnn_convolution": call(N(1, 2, 5, 5), N(3, 2, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, False, False),
    "cudnn_convolution_transpose": call(
        N(1, 2, 5, 5), N(2, 3, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, False
    ),
    "mkldnn_rnn_layer": call(N(5, 2, 3), *_WEIGHTS, *_STATES, False, [], 2, 4, 1, True, False, False, False),
    "_cudnn_rnn": call(
        N(5, 2, 3), _WEIGHTS, 4, None, *_STATES, 2, 4, 0, 1, False, 0.0, False, False, [], None
    ),
    "lstm_cell": call(N(2, 3), [N(2, 4), N(2, 4)], N(16, 3), N(16, 4)),
    "gru_cell": call(N(2, 3), N(2, 4), N(12, 3), N(12, 4)),
    "rnn_tanh_cell": call(N(2, 3), N(2, 4), N(4, 3), N(4, 4)),
    "rnn_relu_cell": call(N(2, 3), N(2, 4), N(4, 3), N(4, 4)),
    "_thnn_fused_lstm_cell": call(N(2, 16), N(2, 16), N(2, 4)),
    "_thnn_fused_gru_cell": call(N(2, 12), N(2, 12), N(2, 4)),
    # Losses.
    "mse_loss": call(N(3, 4), N(3, 4)),
    "l1_loss": call(N(3, 4), N(3, 4)),
    "smooth_l1_loss": call(N(3, 4), N(3, 4)),
    "huber_loss": call(N(3, 4), N(3, 4)),
    "soft_margin_loss": call(N(3, 4), N(3, 4)),
    "kl_div": call(N(3, 4), P(3, 4)),
    "poisson_nll_loss": call(N(3, 4), P(3, 4), True, False, 1e-8, 1),
    "binary_cross_entropy": call(P(3, 4), P(3, 4)),
    "binary_cross_entropy_with_logits": call(N(3, 4), P(3, 4)),
    "cosine_embedding_loss": call(N(2, 4), N(2, 4), ints(1, -1)),
    "cosine_similarity": call(N(3, 4), N(3, 4)),
    "pairwise_distance": call(N(3, 4), N(3, 4)),
    "hinge_embedding_loss": call(N(3), ints(1, -1, 1)),
    "margin_ranking_loss": call(N(3), N(3), ints(1, -1, 1)),
    "triplet_margin_loss": call(N(3, 4), N(3, 4), N(3, 4)),
    "multi_margin_loss": call(N(3, 4), ints(0, 1, 3)),
    "multilabel_margin_loss": call(N(2, 4), ints([3, 0, -1, 1], [1, -1, 0, 2])),
    "multilabel_margin_loss_forward": call(N(2, 4), ints([3, 0, -1, 1], [1, -1, 0, 2]), 1),
    "nll_loss": call(N(3, 4), ints(0, 1, 3)),
    "nll_loss2d": call(N(1, 3, 2, 2), ints([[0, 1], [2, 0]])),
    "nll_loss_nd": call(N(1, 3, 2, 2), ints([[0, 1], [2, 0]])),
    "cross_entropy_loss": call(N(3, 4), ints(0, 1, 3)),
    "ctc_loss.IntList": call(N(4, 2, 3), *_LENGTHS),
    "ctc_loss.Tensor": call(N(4, 2, 3), _LENGTHS[0], ints(4, 4), ints(2, 2)),
    "dist": call(N(3), N(3)),
    # Operators that need the range or the precision of float32 on some device.
    **{name: call(P(3, 4)) for name in _OF_ONE.split()},
    "pow.Tensor_Scalar": call(P(3), 1.5),
    "pow.Tensor_Tensor": call(P(3), N(3)),
    "pow.Scalar": call(1.5, N(3)),
    "prod.dim_int": call(P(3, 4), 1),
    "prod.dim_Dimname": call(DrawnTensor((3, 4), "positive", ("a", "b")), "a"),
    "sum.dim_IntList": call(N(3, 4), [1]),
    "sum.dim_DimnameList": call(N(3, 4, names=("a", "b")), ["a"]),
    "softmax.int": call(N(3, 4), 1),
    "log_softmax.int": call(N(3, 4), 1),
    "softmax.Dimname": call(N(3, 4, names=("a", "b")), "b"),
    "log_softmax.Dimname": call(N(3, 4, names=("a", "b")), "b"),
    "cumsum.dimname": call(N(3, 4, names=("a", "b")), "b"),
    "cumprod.dimname": call(N(3, 4, names=("a", "b")), "b"),
    "norm.names_ScalarOpt_dim": call(N(3, 4, names=("a", "b")), 2, ["b"], False),
    "softmin": call(N(3, 4), 1),
    "cumsum": call(N(3, 4), 1),
    "cumprod": call(N(3, 4), 1),
    "logsumexp": call(N(3, 4), [1]),
    "norm.Scalar": call(N(3, 4)),
    "norm.ScalarOpt_dim": call(N(3, 4), 2, [1], False),
    "frobenius_norm.dim": call(N(3, 4), [0, 1]),
    "nuclear_norm": call(N(3, 4)),
    "nuclear_norm.dim": call(N(3, 4), [0, 1]),
    "linalg_vector_norm": call(N(3, 4)),
    "linalg_matrix_norm": call(N(3, 4), 1),
    "linalg_matrix_norm.str_ord": call(N(3, 4), "nuc"),
    "linalg_norm": call(N(3, 4)),
    "renorm": call(N(3, 4), 2, 0, 1.0),
    "layer_norm": call(N(3, 4), [4], N(4), N(4)),
    "native_layer_norm": call(N(3, 4), [4], N(4), N(4), 1e-5),
    "rms_norm": call(N(3, 4), [4], N(4)),
    "group_norm": call(N(2, 4, 3), 2, N(4), N(4)),
    "instance_norm": call(N(2, 4, 3), None, None, N(4), N(4), True, 0.1, 1e-5, False),
    "batch_norm": call(N(5, 3), N(3), P(3), N(3), N(3), False, 0.1, 1e-5, False),
    "polar": call(P(3), N(3)),
    "quantile": call(N(5), P(2)),
    "quantile.scalar": call(N(5), 0.3),
    "nanquantile": call(N(5), P(2)),
    "nanquantile.scalar": call(N(5), 0.3),
    "stft": call(N(16), 4, return_complex=True),
    "stft.center": call(N(16), 4, center=True, return_complex=True),
    "view_as_complex": call(N(3, 2)),
    "complex": call(N(3), N(3)),
    "fake_quantize_per_tensor_affine": call(N(3, 4), 0.1, 0, 0, 255),
    # Pooling, padding, resampling.
    "avg_pool1d": call(N(1, 2, 4), [2]),
    "avg_pool2d": call(N(1, 2, 4, 4), [2, 2]),
    "avg_pool3d": call(N(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_pool1d": call(N(1, 2, 4), [2]),
    "max_pool2d": call(N(1, 2, 4, 4), [2, 2]),
    "max_pool3d": call(N(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_unpool2d": call(N(1, 1, 2, 2), ints([[[0, 3], [8, 10]]]), [4, 4]),
    "max_unpool3d": call(N(1, 1, 1, 2, 2), ints([[[[0, 3], [8, 10]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0]),
    "adaptive_avg_pool1d": call(N(1, 2, 4), [2]),
    "adaptive_avg_pool2d": call(N(1, 2, 4, 4), [2, 2]),
    "adaptive_avg_pool3d": call(N(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool2d": call(N(1, 2, 4, 4), [2, 2]),
    "adaptive_max_pool3d": call(N(1, 2, 4, 4, 4), [2, 2, 2]),
    "fractional_max_pool2d": call(N(1, 2, 5, 5), [2, 2], [2, 2], P(1, 2, 2)),
    "fractional_max_pool3d": call(N(1, 2, 5, 5, 5), [2, 2, 2], [2, 2, 2], P(1, 2, 3)),
    "reflection_pad1d": call(N(1, 2, 4), [1, 1]),
    "reflection_pad2d": call(N(1, 2, 4, 4), [1, 1, 1, 1]),
    "reflection_pad3d": call(N(1, 2, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    "replication_pad1d": call(N(1, 2, 4), [1, 1]),
    "replication_pad2d": call(N(1, 2, 4, 4), [1, 1, 1, 1]),
    "replication_pad3d": call(N(1, 2, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    "constant_pad_nd": call(N(2, 3), [1, 1]),
    "grid_sampler": call(N(1, 2, 3, 3), N(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_2d": call(N(1, 2, 3, 3), N(1, 2, 2, 2), 0, 0, False),
    "grid_sampler_3d": call(N(1, 2, 3, 3, 3), N(1, 2, 2, 2, 3), 0, 0, False),
    "_grid_sampler_2d_cpu_fallback": call(N(1, 2, 3, 3), N(1, 2, 2, 2), 0, 0, False),
    "upsample_nearest1d": call(N(1, 2, 3), [6]),
    "_upsample_nearest_exact1d": call(N(1, 2, 3), [6]),
    "upsample_nearest2d": call(N(1, 2, 3, 3), [6, 6]),
    "_upsample_nearest_exact2d": call(N(1, 2, 3, 3), [6, 6]),
    "upsample_nearest3d": call(N(1, 2, 3, 3, 3), [4, 4, 4]),
    "_upsample_nearest_exact3d": call(N(1, 2, 3, 3, 3), [4, 4, 4]),
    "upsample_linear1d": call(N(1, 2, 3), [6], False),
    "upsample_bilinear2d": call(N(1, 2, 3, 3), [6, 6], False),
    "_upsample_bilinear2d_aa": call(N(1, 2, 6, 6), [3, 3], False),
    "upsample_trilinear3d": call(N(1, 2, 3, 3, 3), [4, 4, 4], False),
    "upsample_bicubic2d": call(N(1, 2, 3, 3), [6, 6], False),
    "_upsample_bicubic2d_aa": call(N(1, 2, 6, 6), [3, 3], False),
    "pixel_shuffle": call(N(1, 4, 2, 2), 2),
    # Fourier transforms and linear algebra.
    **{f"fft_{name}": call(N(4, 4)) for name in _TRANSFORMS.split()},
    **{name: call(D(3, 3)) for name in _OF_MATRICES.split()},
    "linalg_cond.p_str": call(D(3, 3), "fro"),
    "linalg_matrix_rank.tol_tensor": call(D(3, 3), P()),
    "linalg_matrix_rank.atol_rtol_tensor": call(D(3, 3), atol=P(), rtol=P()),
    "linalg_matrix_rank.atol_rtol_float": call(D(3, 3), atol=0.1, rtol=0.1),
    "cholesky_solve": call(N(3, 2), D(3, 3)),
    "lu_solve": call(N(1, 3, 2), D(1, 3, 3), *_LU),
    "orgqr": call(N(3, 2), P(2)),
    "ormqr": call(N(3, 2), P(2), N(3, 4)),
    "triangular_solve": call(N(3, 2), D(3, 3)),
    "linalg_solve": call(D(3, 3), N(3, 2)),
    "linalg_solve_triangular": call(D(3, 3), N(3, 2), upper=True),
    "linalg_lstsq": call(D(3, 3), N(3, 2)),
    "linalg_householder_product": call(N(3, 2), P(2)),
    "linalg_tensorinv": call(N(2, 3, 6)),
    "linalg_tensorsolve": call(N(2, 3, 6), N(2, 3)),
    # Operators whose operands get one dtype, by autocast or by type promotion.
    "cat": call([N(3), N(3)]),
    "cat.names": call([N(3, names=("a",)), N(3, names=("a",))], "a"),
    "stack": call([N(3), N(3)]),
    "hstack": call([N(3), N(3)]),
    "index_copy": call(N(3, 2), 0, ints(2, 0), N(2, 2)),
    "index_copy.dimname": call(N(3, 2, names=("a", "b")), "a", ints(2, 0), N(2, 2)),
    "index_add": call(N(3, 2), 0, ints(2, 0), N(2, 2)),
    "index_put": call(N(3), [ints(0, 2)], N(2)),
    "index_select": call(N(3, 2), 0, ints(2, 0)),
    "scatter_add": call(N(3, 2), 0, ints([0, 1], [2, 0]), N(2, 2)),
    "gather": call(N(3, 2), 0, ints([0, 1], [2, 0])),
    "masked_fill": call(N(2), torch.tensor([True, False]), 1.5),
    "where": call(torch.tensor([True, False]), N(2), N(2)),
    "addcdiv": call(N(3), N(3), P(3)),
    "addcmul": call(N(3), N(3), N(3)),
    "atan2": call(N(3), N(3)),
    "cross": call(N(2, 3), N(2, 3)),
    "lerp": call(N(3), N(3), 0.5),
    "embedding": call(N(4, 3), ints(1, 3)),
    "prelu": call(N(2, 3), P(3)),
    "glu": call(N(2, 4)),
    "dropout": call(N(3), 0.5, False),
    "chunk": call(N(4), 2),
    "sort": call(N(4)),
    "topk": call(N(4), 2),
    "clamp": call(N(4), -0.5, 0.5),
    "view_as": call(N(2, 3), N(3, 2)),
    "transpose": call(N(2, 3), 0, 1),
    **{name: call(N(3), N(3)) for name in _OF_TWO.split()},
}

# Operators that LAPACK computes, or that are composed of such operators.
FACTORIZING = frozenset(name.partition(".")[0] for name in CALLS if name.startswith("linalg_")) | {
    *_OF_MATRICES.split(),
    *("cholesky_solve", "lu_solve", "orgqr", "ormqr", "triangular_solve", "nuclear_norm"),
}
