import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.errors import SpecError
from spile.spec.taps import Tap, layers_text, parse_layers, parse_tap_words, select_taps


def test_a_tap_is_written_as_site_and_layer():
    assert str(Tap("residual", 12)) == "residual.12"
    assert Tap.parse("mlp.3") == Tap("mlp", 3)


@pytest.mark.parametrize("text", ["residual", "resid.3", "mlp.-1", "mlp.x", ""])
def test_what_is_no_tap_is_refused(text):
    with pytest.raises(SpecError, match=r"expected KIND\.LAYER such as residual\.12, found"):
        Tap.parse(text)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", None), ("0-2,20", (0, 1, 2, 20)), ("0 1 2", (0, 1, 2)), ("3,3,1", (1, 3)), ("7-7", (7,))],
)
def test_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "1-", "0-99999999", "all 3"])
def test_bad_layers_say_what_was_expected(text):
    with pytest.raises(SpecError, match="--layers: expected all, or numbers and ranges such as 0-11,20, found"):
        parse_layers(text)


@given(st.sets(st.integers(0, 50), min_size=1))
def test_layers_text_reverses(layers):
    assert parse_layers(layers_text(tuple(layers))) == tuple(sorted(layers))


def test_sites_come_in_a_fixed_order():
    assert parse_tap_words(["mlp,attn", "residual"]) == ("residual", "attn", "mlp")
    with pytest.raises(SpecError, match=r"expected some of residual, attn, mlp, embed, .*, found foo"):
        parse_tap_words(["foo"])


def test_a_layer_beyond_the_model_is_named():
    with pytest.raises(SpecError, match=r"--layers: expected layers 0 to 3 \(the model has 4\), found 4-5"):
        select_taps(("residual",), (0, 4, 5), 4)


def test_taps_go_layer_by_layer():
    assert [str(tap) for tap in select_taps(("residual", "mlp"), None, 2)] == [
        "residual.0",
        "mlp.0",
        "residual.1",
        "mlp.1",
    ]
