from dataclasses import replace

import pytest
import torch

from mdn.config import ConfigError, Params
from mdn.mqar import cells
from mdn.mqar.train import build

SIX = ["transformer", "mamba2", "gdn", "comba", "kda", "mdn"]


def test_the_papers_sweep_is_every_width_rate_and_seed(params: Params):
    planned = cells.plan(params, "paper", SIX)
    assert len(planned) == 6 * 2 * 4 * 2
    assert len({cell.name for cell in planned}) == len({cell.fingerprint() for cell in planned}) == 96
    assert [cell.model for cell in planned[:6]] == SIX
    assert {cell.width for cell in planned[:6]} == {256}
    assert planned[0].scale == "mqar-paper"
    rates = sorted({cell.lr for cell in planned})
    assert rates == pytest.approx([10**e for e in (-3, -2.5, -2, -1.5)], rel=1e-3)
    train = [(part.length, part.pairs, part.examples) for part in planned[0].data.train]
    assert train == [(64, 4, 100_000), (128, 8, 20_000), *((256, p, 20_000) for p in (16, 32, 64))]
    test = [(part.length, part.pairs) for part in planned[0].data.test]
    assert (test[0], test[-1], len(test)) == ((512, 32), (2048, 512), 9)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("name", SIX)
def test_every_system_is_built_at_the_papers_shapes(params: Params, name: str, width: int):
    """Two layers without MLP; two heads, keys of 128 channels, values of 256 where the width does not fix
    them; one matrix for embedding and head."""
    cell = cells.cell(params, "paper", name, width, 1e-3, 1)
    with torch.device("meta"):
        model = build(cell)
    assert len(model.blocks) == 2
    assert all(block.mlp is None for block in model.blocks)
    assert model.head.weight is model.embedding.weight
    mixer = model.mixer(0)
    if name == "transformer":
        assert (mixer.heads, mixer.head_size) == (2, width // 2)
    else:
        values = width if name == "mamba2" else 256  # inner width 2·width, in two heads
        assert mixer.state_shape == (2, 128, values)


def test_cells_come_back_from_json_as_they_were(params: Params):
    planned = cells.plan(params, "paper", [*SIX, "mdn-v1-logspace"])
    back = cells.from_json(cells.to_json(planned))
    assert back == planned
    assert back[6].kernel == "v1_logspace"
    assert [cell.fingerprint() for cell in back] == [cell.fingerprint() for cell in planned]


@pytest.mark.parametrize("change", ['"widht":', '"log_mu_mim":'])
def test_json_with_an_unknown_key_is_refused(params: Params, change: str):
    text = cells.to_json(cells.plan(params, "smoke", ["mdn"]))
    known = {'"widht":': '"width":', '"log_mu_mim":': '"log_mu_min":'}[change]
    with pytest.raises(ValueError, match=r"cells: not what this version writes.*plan them again"):
        cells.from_json(text.replace(known, change))


def test_extending_the_sweep_leaves_its_cells_what_they_were(params: Params):
    before = cells.plan(params, "paper", ["mdn"])
    scale = params.mqar.scales["paper"]
    wider = replace(scale, widths=[*scale.widths, 512], lrs=[*scale.lrs, 1e-1], seeds=[1, 2, 3], workers=2)
    mqar = replace(params.mqar, scales=params.mqar.scales | {"paper": wider})
    after = {cell.name: cell for cell in cells.plan(replace(params, mqar=mqar), "paper", ["mdn"])}
    assert all(after[cell.name].fingerprint() == cell.fingerprint() for cell in before)


@pytest.mark.parametrize(
    ("scale", "models", "words"),
    [("papre", ["mdn"], ["'papre'", "paper"]), ("paper", ["mdm"], ["'mdm'", "mdn"])],
)
def test_a_scale_or_model_that_does_not_exist_is_named(params: Params, scale, models, words):
    with pytest.raises(ConfigError) as error:
        cells.plan(params, scale, models)
    assert all(word in str(error.value) for word in words)
