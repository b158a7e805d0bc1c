"""How the compiled tier compiles: never silently in eager mode, a limited number of times, constants where it says so."""

import pytest
import torch
from torch import Tensor

from tiers.compiled.options import compiled, first_size_varies, kinds


@pytest.fixture(autouse=True)
def _compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests switch torch.compile off, see conftest.py."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def folded(x: Tensor, *, width: int) -> Tensor:
    return x.view(-1, width)


def test_where_the_environment_switches_torch_compile_off_nothing_pretends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(RuntimeError, match=r"TORCHDYNAMO_DISABLE=1 turns torch\.compile off"):
        compiled(folded, "environment", width=2)(torch.zeros(6))


def test_where_the_settings_switch_torch_compile_off_nothing_pretends() -> None:
    # What TORCH_COMPILE_DISABLE=1 sets.
    run = compiled(folded, "settings", width=2)
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match=r"_dynamo\.config\.disable"):
        run(torch.zeros(6))


def test_a_stance_against_compiling_is_refused() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="set_stance"):
        compiled(folded, "stance", width=2)(torch.zeros(6))


def test_more_compilations_than_dynamo_allows_raise() -> None:
    run = compiled(folded, "limit", width=2)
    with torch._dynamo.config.patch(recompile_limit=2):
        assert [run(torch.zeros([4] * dimensions)).shape[1] for dimensions in (1, 2)] == [2, 2]
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run(torch.zeros(4, 4, 4))
        assert run(torch.zeros(8)).shape == (4, 2)


def test_each_combination_is_compiled_by_itself() -> None:
    before = graphs()
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (1, 2, 3, 4):
            assert compiled(folded, "apart", width=width)(torch.zeros(24)).shape == (24 // width, width)
    assert graphs() - before == 4
    assert compiled(folded, "apart", width=4) is compiled(folded, "apart", width=4)


def test_sizes_that_are_equal_at_first_may_differ_later() -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y

    before = graphs()
    for first, second in ((3, 3), (3, 5), (1, 2), (1, 1)):
        x, y = torch.randn(first, 3), torch.randn(second, 3)
        assert compiled(outer, None)(*first_size_varies(x, y)).shape == (first, second, 3)
    assert graphs() - before == 1


def test_a_size_may_be_one_where_sizes_are_said_not_to_be() -> None:
    # As of a cache of a single block beside a prompt: compiled for apart, but not refused.
    def added(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y

    for first, second in ((3, 1), (5, 1), (4, 2)):
        x, y = torch.randn(first, 3), torch.randn(second, 3)
        assert compiled(added, "ones")(*first_size_varies(x, y, ones=False)).shape == (second, 3)


def test_kinds_tell_apart_what_needs_code_of_its_own() -> None:
    x = torch.zeros(2)
    found = [kinds(x), kinds(x, None), kinds(x.half()), kinds(x.clone().requires_grad_())]
    with torch.no_grad():
        found.append(kinds(x))
    assert len(set(found)) == 5
    assert kinds(x) == kinds(torch.ones(7))
