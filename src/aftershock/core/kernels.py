"""The Triton kernels of `fused`: one program per block of coordinates, rows in a loop. Imported on CUDA only."""

# mypy: ignore-errors
# no `from __future__ import annotations`: Triton reads tl.constexpr from the annotations themselves

import triton
import triton.language as tl


@triton.jit
def scale(x, BLOCK: tl.constexpr):
    """Doubles one number: does Triton work here?"""
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < 1), mask=at < 1)


@triton.jit
def _control(raw, theta, m, v, numbers, at, mask):
    """The gradient that reaches the moments, and moments after the control's step."""
    g = tl.load(raw + at, mask=mask, other=0.0) * tl.load(numbers)
    coupled = tl.load(numbers + 1)
    if coupled != 0:
        g += coupled * tl.load(theta + at, mask=mask, other=0.0)
    before = tl.load(m + at, mask=mask, other=0.0)
    after_m = before + tl.load(numbers + 2) * (g - before)
    after_v = tl.load(numbers + 3) * tl.load(v + at, mask=mask, other=0.0) + tl.load(numbers + 4) * g * g
    return g, after_m, after_v


@triton.jit
def _sensitivities(m, v, numbers):
    """M and V; V = 0 where v = 0."""
    root = tl.sqrt(v / tl.load(numbers + 5))
    d = root + tl.load(numbers + 6)
    dq_dm = tl.where(d == 0, 0.0, tl.load(numbers + 7) / d)
    dq_dv = tl.where(root == 0, 0.0, tl.load(numbers + 8) * m / (root * d * d))
    return dq_dm, dq_dv


@triton.jit
def tangent(raw, theta, m, v, dtheta, dm, dv, u, numbers, size, count, s0, s1, s2, s3, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g, after_m, after_v = _control(raw, theta, m, v, numbers, at, mask)
    dq_dm, dq_dv = _sensitivities(after_m, after_v, numbers)
    rest1, beta2, rest2, shrink = (
        tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 9)
    )  # fmt: skip
    for row in range(count):
        r = row.to(tl.int64)
        du = tl.load(u + r * s3 + at, mask=mask, other=0.0)
        old_m = tl.load(dm + r * s1 + at, mask=mask, other=0.0)
        old_v = tl.load(dv + r * s2 + at, mask=mask, other=0.0)
        old = tl.load(dtheta + r * s0 + at, mask=mask, other=0.0)
        new_m = old_m + rest1 * (du - old_m)
        new_v = beta2 * old_v + 2 * rest2 * g * du
        tl.store(dm + r * s1 + at, new_m, mask=mask)
        tl.store(dv + r * s2 + at, new_v, mask=mask)
        tl.store(dtheta + r * s0 + at, shrink * old + dq_dm * new_m + dq_dv * new_v, mask=mask)


@triton.jit
def semilinear(
    raw, theta, m, v, dtheta, dm, dv, xi, factors, changes, numbers, size, count, s0, s1, s2, s3, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g, after_m, after_v = _control(raw, theta, m, v, numbers, at, mask)
    plain = tl.load(raw + at, mask=mask, other=0.0)
    coupled, rest1, beta2, rest2 = (
        tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4)
    )  # fmt: skip
    bias2, eps, rate, shrink = (
        tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 9)
    )  # fmt: skip
    sign = tl.load(numbers + 10)
    root = tl.sqrt(after_v / bias2)
    d = root + eps
    step = tl.where(d == 0, 0.0, after_m / d)
    for row in range(count):
        r = row.to(tl.int64)
        factor, change = tl.load(factors + row), tl.load(changes + row)
        old = tl.load(dtheta + r * s0 + at, mask=mask, other=0.0)
        u = sign * (factor * tl.load(xi + r * s3 + at, mask=mask, other=0.0) + change * plain) + coupled * old
        old_m = tl.load(dm + r * s1 + at, mask=mask, other=0.0)
        old_v = tl.load(dv + r * s2 + at, mask=mask, other=0.0)
        new_m = old_m + rest1 * (u - old_m)
        new_v = beta2 * old_v + rest2 * (u + 2 * g) * u
        shocked_v = tl.where(after_v + new_v < 0, 0.0, after_v + new_v)  # what is no number stays: a maximum drops it
        shocked = tl.sqrt(shocked_v / bias2)
        # √a − √b = (a − b)/(√a + √b): no digits are lost where δv is small
        both = shocked + root
        apart = tl.where(both == 0, 0.0, (tl.where(new_v < -after_v, -after_v, new_v) / bias2) / both)
        moved = shocked + eps
        ratio = tl.where(moved == 0, 0.0, (new_m - apart * step) / moved)
        tl.store(dm + r * s1 + at, new_m, mask=mask)
        tl.store(dv + r * s2 + at, new_v, mask=mask)
        tl.store(dtheta + r * s0 + at, shrink * old + rate * ratio, mask=mask)


@triton.jit
def adjoint(raw, theta, m, v, ctheta, cm, cv, w, numbers, size, count, s0, s1, s2, s3, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g, after_m, after_v = _control(raw, theta, m, v, numbers, at, mask)
    dq_dm, dq_dv = _sensitivities(after_m, after_v, numbers)
    rest1, beta2, rest2, shrink = (
        tl.load(numbers + 2), tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 9)
    )  # fmt: skip
    for row in range(count):
        r = row.to(tl.int64)
        old = tl.load(ctheta + r * s0 + at, mask=mask, other=0.0)
        new_m = tl.load(cm + r * s1 + at, mask=mask, other=0.0) + dq_dm * old
        new_v = tl.load(cv + r * s2 + at, mask=mask, other=0.0) + dq_dv * old
        tl.store(w + r * s3 + at, rest1 * new_m + 2 * rest2 * g * new_v, mask=mask)
        tl.store(ctheta + r * s0 + at, shrink * old, mask=mask)
        tl.store(cm + r * s1 + at, (1 - rest1) * new_m, mask=mask)
        tl.store(cv + r * s2 + at, beta2 * new_v, mask=mask)
