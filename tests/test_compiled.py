"""The compiled elementwise pass agrees with the plain one."""

from __future__ import annotations

import pytest
import torch

from aftershock.core import adamw
from aftershock.core.operators import as_rows

from .cases import make


def test_compiled_equals_plain_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("two_groups")
    path = case.path(3)
    layout = path.point.loss.layout
    hypers = path.steps[1].hypers
    assert hypers[0].beta1 != hypers[1].beta1, "two sets of betas: a kernel with one baked in must fail"
    xi = layout.expand(torch.randn(3, layout.size, generator=torch.Generator().manual_seed(0)).double())
    plain = as_rows(layout, path.write_in(1).mv(xi))
    calls = []
    compiled = adamw.compiled_absorb()
    if compiled is adamw._absorb_:
        pytest.skip("nothing compiles on this machine")
    monkeypatch.setattr(adamw, "COMPILE_FROM", 1)
    monkeypatch.setattr(adamw, "compiled_absorb", lambda: lambda *a: calls.append(1) or compiled(*a))
    fused = as_rows(layout, path.write_in(1).mv(xi))
    assert len(calls) == 2, "one call per parameter group"
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-14)


def test_without_a_compiler_the_plain_pass_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        def fails(*_: object) -> None:
            raise RuntimeError("no C++ compiler found")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    adamw.compiled_absorb.cache_clear()
    try:
        assert adamw.compiled_absorb() is adamw._absorb_
    finally:
        adamw.compiled_absorb.cache_clear()
