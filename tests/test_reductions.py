"""One module looks at all coordinates at once, so that a sharded model needs sums over ranks there and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import aftershock
from aftershock.core import reductions

SOURCE = Path(aftershock.__file__).parent
FOLDERS = ("core", "api", "theory", "recorder")
# whatever they are applied to
CONTRACTIONS = {"norm", "dot", "vdot", "vecdot", "inner", "vector_norm", "einsum", "matmul", "tensordot", "bmm", "mm"}
CONTRACTIONS |= {"count_nonzero", "get_total_norm", "clip_grad_norm_", "lstsq"}
# applied to a flat vector that is named in what they are applied to
SUMS = {"sum", "mean", "max", "min", "amax", "amin", "all", "any", "equal", "allclose", "std", "var", "prod", "nonzero"}
LOCAL = {"g", "grad", "raw", "xi", "theta", "dtheta", "slope", "view"}  # the same under a local name
FLAT = {"theta", "m", "v", "xi", "raw", "g", "g_live", "g_path", "dq_dm", "dq_dv", "broken", "zero_v"}
# by file and function: why it is no reduction over the flat vector
EXCEPTIONS = {
    ("core/contributions.py", "of"): "a combination of a few vectors: coordinate by coordinate",
    ("core/responses.py", "first_disagreement"): "over horizons",
    ("core/scores.py", "_curve_error"): "over horizons",
    ("core/live_loop.py", "refuse_other_precision"): "one parameter's gradient",
    ("core/live_loop.py", "low_precision"): "one parameter's gradient",
    ("core/live_loop.py", "unused_gradients"): "one parameter's gradient",
    ("core/adamw.py", "_bounded"): "one parameter's own rate, as its optimizer computes it",
    ("core/curves.py", "beyond"): "which coordinates of a piece, one by one",
    ("theory/baselines.py", "readout_null"): "scores of draws, in NumPy",
    ("recorder/reruns.py", "state_after"): "which rows are alive",
    ("recorder/neighbours.py", "*"): "inputs of batches",
    ("theory/frozen.py", "*"): "matrices of one coordinate's memory, in NumPy",
    ("theory/channels.py", "*"): "which changes are members of which group",
    ("theory/envelopes.py", "propagator_norm"): "dense matrices of small systems",
}


def test_reductions_over_flat_vectors_stand_in_one_module() -> None:
    found = [use for folder in FOLDERS for use in _uses(folder)]
    outside = [use for use in found if not _excepted(use)]
    assert not outside, "use core/reductions.py, or say in EXCEPTIONS why not:\n" + "\n".join(
        f"{file}: {function}: {text}" for file, function, text in outside
    )


def test_no_exception_is_stale() -> None:
    found = {(file, function) for folder in FOLDERS for file, function, _ in _uses(folder)}
    files = {file for file, _ in found}
    assert not [key for key in EXCEPTIONS if key not in found and not (key[1] == "*" and key[0] in files)]


@pytest.mark.parametrize(
    "line",
    [
        "c.theta @ dx.theta.mT",
        "state.m.norm()",
        "torch.dot(a, b)",
        "torch.equal(a.v, b.v)",
        "linear.broken.sum()",
        "a.isfinite().all()",
    ],
)
def test_a_reduction_is_seen(line: str) -> None:
    assert [text for _, text in _in_tree(ast.parse(f"def f(a, b):\n    return {line}"))] == [line]


def _excepted(use: tuple[str, str, str]) -> bool:
    file, function, _ = use
    return (file, function) in EXCEPTIONS or (file, "*") in EXCEPTIONS


def _uses(folder: str) -> Iterator[tuple[str, str, str]]:
    for path in sorted((SOURCE / folder).glob("*.py")):
        file = f"{folder}/{path.name}"
        if file != "core/reductions.py":
            yield from ((file, *use) for use in _in_tree(ast.parse(path.read_text())))


def _in_tree(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _in_tree(node, node.name)
            continue
        if _reduces(node):
            yield inside, ast.unparse(node)
        yield from _in_tree(node, inside)


def _reduces(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    all_finite = node.func.attr == "all" and "isfinite" in ast.unparse(node.func.value)
    return node.func.attr in CONTRACTIONS or all_finite or (node.func.attr in SUMS and _names_a_flat_vector(node))


def _names_a_flat_vector(call: ast.Call) -> bool:
    values = [call.func.value, *call.args] if isinstance(call.func, ast.Attribute) else call.args
    return any(_is_flat(node) for value in values for node in ast.walk(value))


def _is_flat(node: ast.AST) -> bool:
    named = isinstance(node, ast.Name) and node.id in LOCAL
    return named or (isinstance(node, ast.Attribute) and node.attr in FLAT)


def test_the_functions_are_what_they_say() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[1.0, 1.0], [2.0, 5.0]])
    assert reductions.paired(a, b).tolist() == [7.0, 0.0]
    assert float(reductions.norm(a)) == float(reductions.joint_norm([a[0], a[1]])) == 5.0
    assert reductions.apart(a[0], 2 * a[0]) == 0.5
    assert [reductions.largest(x) for x in (-a, a[:0])] == [4.0, 0.0]
    assert [reductions.finite(x) for x in (a, a / 0)] == [True, False]
    assert float(reductions.mean(b)) == 2.25
    nearest = reductions.fitted(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), torch.tensor([3.0, 5.0, 7.0]))
    torch.testing.assert_close(nearest, torch.tensor([3.0, 5.0, 0.0]))  # the plane of the two leaves the third out


def test_rows_that_are_zero_are_told_from_those_that_are_not_quite() -> None:
    """Rows are read stretch by stretch: a single number in the last place of the last stretch counts, a NaN too."""
    rows = torch.zeros(5, 3 * reductions.GLANCE + 7)
    rows[1, -1], rows[2, 0], rows[3, reductions.GLANCE] = 1e-38, -1.0, torch.nan
    assert reductions.nonzero(rows).tolist() == rows.any(dim=1).tolist() == [False, True, True, True, False]
    assert reductions.nonzero(rows[:0]).shape == (0,)


GRADIENTS = {
    "one dtype": [torch.float32] * 40,
    "bfloat16": [torch.bfloat16] * 40,
    "two dtypes": [torch.float32, torch.bfloat16, torch.float64] * 13,
    "one parameter": [torch.float64],
}


@pytest.mark.parametrize("name", list(GRADIENTS))
def test_the_norm_of_a_gradient_has_the_bits_of_torchs(name: str) -> None:
    """Also from memory that is kept, which on a CPU is not taken, and where fewer parameters have a gradient."""
    draw = torch.Generator().manual_seed(0)
    total = reductions.TotalNorm()
    for count in (len(GRADIENTS[name]), len(GRADIENTS[name]), 1):
        dtypes = GRADIENTS[name][:count]
        grads = [torch.randn(7 + i, 3, generator=draw).to(dtype) * 10.0 ** (i % 5) for i, dtype in enumerate(dtypes)]
        grads[0] = grads[0][:0] if count > 1 else grads[0]
        expected = torch.nn.utils.get_total_norm(grads)
        assert float(expected) > 0
        assert torch.equal(total(grads), expected)
        assert total(grads).dtype == expected.dtype
        if name != "two dtypes":
            kept = total._together(torch._foreach_norm(grads))
            assert torch.equal(torch.linalg.vector_norm(kept), expected)


def test_the_norm_of_parameters_and_of_nothing_is_torchs() -> None:
    weights = [torch.nn.Parameter(torch.tensor([3.0])), torch.tensor([4.0])]
    assert float(reductions.TotalNorm()(weights)) == 5.0
    assert float(reductions.TotalNorm()([])) == 0.0
