"""params.yaml: the shipped file is whole, and every mistake is one line that names key, value and remedy."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mdn.config import FORMATS, SOURCES, ConfigError, RunConfig, load

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "params.yaml"
PARAMS = load(SHIPPED)


def edited(tmp_path: Path, *edits: tuple[str, object]) -> Path:
    """The shipped file with values replaced, `None` as value of a key ending in "~" removing it."""
    raw = OmegaConf.to_container(OmegaConf.load(SHIPPED))
    for key, value in edits:
        node = raw
        *path, last = key.split("/")
        for part in path:
            node = node[part]
        if last.endswith("~"):
            del node[last[:-1]]
        else:
            node[last] = value
    path = tmp_path / "params.yaml"
    OmegaConf.save(OmegaConf.create(raw), path)
    return path


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("scales/smoke/training/lr", "abc", ["scales.smoke.training.lr", "'abc'", "number"]),
        ("scales/smoke/training/lr", -1e-3, ["scales.smoke.training.lr", "-0.001", "3e-4"]),
        ("scales/smoke/d_modl", 3, ["scales.smoke.d_modl", "unknown", "d_model"]),
        ("scales/smoke/d_model~", None, ["scales.smoke.d_model", "missing"]),
        ("scales/smoke/training/tokens", 32769, ["training.tokens", "32769", "32768"]),
        ("scales/smoke/training/context", 300, ["batch_tokens", "1024", "context=300", "900"]),
        ("scales/smoke/machine/micro_batch", 3, ["micro_batch", "3", "divisor of 4"]),
        ("scales/smoke/machine/micro_batch", 0, ["machine.micro_batch", "0", "1 or more"]),
        ("scales/smoke/machine/nodes", 2, ["machine.nodes", "2", "torchrun or slurm"]),
        ("scales/smoke/machine/launcher", "slrum", ["machine.launcher", "'slrum'", "slurm"]),
        ("scales/smoke/machine/strategy", "zero", ["machine.strategy", "'zero'", "ddp, zero2, fsdp"]),
        ("scales/smoke/training/context", 0, ["training.context", "0", "1 or more"]),
        ("scales/smoke/training/batch_tokens", -1024, ["training.batch_tokens", "-1024", "1 or more"]),
        ("scales/smoke/training/warmup_tokens", 65536, ["warmup_tokens", "65536", "tokens=32768"]),
        ("scales/smoke/evaluation/limit", 0, ["evaluation.limit", "0", "1 or more"]),
        ("scales/smoke/data", "nowhere", ["scales.smoke.data", "'nowhere'", "slimpajama"]),
        ("runs/smoke/mdm", "mdm", ["runs.smoke.mdm", "unknown model", "mdn"]),
        ("runs/smoke/mdn", "gdn", ["runs.smoke.mdn", "'gdn'", "mdn: mdn"]),
        ("runs/tiny", {}, ["runs.tiny", "unknown scale", "smoke"]),
        ("runs/400m", {"mdn": "mdn"}, ["data.prepare", "'slimpajama'", "add"]),
        ("runs/small", None, ["runs.small", "nothing", "{}"]),
        ("suites", ["lm", "lm"], ["suites", "'lm'", "2 times", "once"]),
        ("suites", ["lmm"], ["suites", "'lmm'", "commonsense"]),
        ("suites", "lm", ["suites", "'lm'", "list"]),
        ("scales/smoke/evaluation/niah_lengths", [512, 256], ["niah_lengths[1]", "256", "512 to 131072"]),
        ("scales/smoke/evaluation/niah_lengths", [], ["niah_lengths", "[]", "one item or more"]),
        ("scales/smoke/evaluation/niah_items", 0, ["niah_items", "0", "1 or more"]),
        ("scales/smoke/evaluation/position_length", 1000, ["position_length", "1000", "4096"]),
        ("scales/smoke/evaluation/position_windows", -1, ["position_windows", "-1", "1 or more"]),
        ("shapes/smoke/mdn-h-3to1/layers", 6, ["layers=6", "length 4", "use 4 or 8"]),
        ("shapes/smoke/mdn/heads", 0, ["shapes.smoke.mdn.heads", "0", "1 or more"]),
        ("shapes/smoke/transformer/heads", 3, ["shapes.smoke.transformer", "3 heads", "64", "divisor of 32"]),
        ("shapes/smoke/mamba2/heads", 5, ["shapes.smoke.mamba2", "heads=5", "160", "use heads=4"]),
        ("shapes/smokey", {}, ["shapes.smokey", "unknown scale", "smoke"]),
        ("shapes/smoke/gnd", {"layers": 1, "heads": 1, "head_k": 8, "head_v": 8}, ["smoke.gnd", "mean gdn"]),
        ("shapes/smoke/mdn~", None, ["shapes.smoke", "'mdn'", "add"]),
        ("models/kda/pattern", "kdaa", ["models.kda.pattern", "'kdaa'", "mdn"]),
        ("models/mdn-h-3to1/pattern", "mdn:x", ["models.mdn-h-3to1.pattern", "'mdn:x'", "mdn:N"]),
        ("models/mdn-mu-1/base", "mdx", ["models.mdn-mu-1.base", "'mdx'"]),
        ("models/mdn-mu-1/base", "mdn-alpha-1", ["models.mdn-mu-1.base", "has a base itself", "'mdn'"]),
        ("models/mdn/options", {"mdn": {"log_mu_mn": -1}}, ["options.mdn.log_mu_mn", "log_mu_min"]),
        ("models/mdn/options", {"mdn": {"eta": "tan"}}, ["eta", "'tan'", "sigmoid"]),
        ("models/kda-gdn-init/options", {"kda": {"init": "gdm"}}, ["init", "'gdm'", "kda, gdn"]),
        ("mqar/runs/smoke/mdn", "gdn", ["mqar.runs.smoke.mdn", "'gdn'", "mdn: mdn"]),
        ("mqar/runs/tiny", {}, ["mqar.runs.tiny", "unknown scale", "paper"]),
        ("mqar/runs/smoke/mdn-h-3to1", "mdn-h-3to1", ["mqar.scales.smoke.shape", "layers=2", "use 4"]),
        ("mqar/scales/smoke/data", "zoo", ["mqar.scales.smoke.data", "'zoo'", "zoology"]),
        ("mqar/scales/smoke/lrs", [0.0], ["mqar.scales.smoke.lrs[0]", "0.0", "above 0"]),
        ("mqar/scales/smoke/widths", [33], ["mqar.scales.smoke.shape", "2 heads", "d_model=33", "an even"]),
        ("mqar/scales/smoke/widths", [], ["mqar.scales.smoke.widths", "[]", "one item or more"]),
        ("mqar/data/tiny/vocabulary", 16, ["mqar.data.tiny.vocabulary", "16", "18 to 32768"]),
        ("models/mdn/options", {"mdn": {"tau": "sqrt"}}, ["tau", "'sqrt'", "sqrt(d/h)"]),
        ("models/mdn/options", {"mdn": {"beta_bound": 3}}, ["beta_bound", "3", "true or false"]),
        ("optimizer/beta1", 1.5, ["optimizer.beta1", "1.5", "from 0 to 1"]),
        ("data/sets/slimpajama/source", "hf", ["slimpajama.source", "'hf'", "huggingface"]),
        ("data/sets/slimpajama/holdout", 5, ["slimpajama.holdout", "5", "from 0 to 1"]),
        ("data/prepare", ["x"], ["data.prepare", "'x'"]),
        ("data/hub/sets", {"wikitext": "main"}, ["data.hub.sets", "'wikitext'", "owner/name"]),
        ("data/hub/fetch", "yes please", ["data.hub.fetch", "true or false"]),
        ("scales/smoke/evaluation/retrieval_window", 49, ["retrieval_window", "49", "retrieval_answer=48"]),
        ("scales/smoke/evaluation/fail_on_truncation", ["lmm"], ["fail_on_truncation", "'lmm'", "longbench"]),
        ("seed", 1.5, ["seed", "1.5", "whole number"]),
        ("seed", "${optimizer.clip}", ["seed", "${optimizer.clip}", "write it out"]),
    ],
)
def test_a_mistake_is_refused_in_one_line(tmp_path, key, value, words):
    with pytest.raises(ConfigError) as caught:
        load(edited(tmp_path, (key, value)))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["1e-5", "0.00001", "1E-5", "'1e-5'"])
def test_small_numbers_are_floats_however_written(tmp_path, text):
    path = tmp_path / "params.yaml"
    path.write_text(SHIPPED.read_text().replace("      lr: 3e-3", f"      lr: {text}"))
    assert load(path).scales["smoke"].training.lr == 1e-5


def test_every_row_resolves_at_every_scale_that_has_its_shape():
    for scale, shapes in PARAMS.shapes.items():
        for name, model in PARAMS.models.items():
            if (model.base or name) in shapes:
                run = PARAMS.run(scale, name)
                assert run.lr > 0
                assert set(run.options) == set(run.pattern.replace(":", ",").split(",")) & set(run.options)


def test_a_derived_model_takes_its_bases_values_and_its_own(tmp_path):
    path = edited(
        tmp_path,
        ("models/mdn/lr", 1e-4),
        ("models/mdn/options", {"mdn": {"log_mu_min": -3.0}}),
    )
    derived = load(path).run("smoke", "mdn-no-correction")
    assert derived.lr == 1e-4
    assert derived.options["mdn"]["log_mu_min"] == -3.0
    assert derived.options["mdn"]["output_correction"] is False
    assert load(path).models["mdn-no-correction"].title == "w/o output correction"


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("mdn-no-correction", "output_correction", False),
        ("mdn-no-beta-bound", "beta_bound", False),
        ("mdn-eta-sigmoid", "eta", "sigmoid"),
        ("mdn-mu-1.5", "log_mu_min", -1.5),
        ("mdn-mu-1.357", "log_mu_min", -1.357),
        ("mdn-mu-1", "log_mu_min", -1.0),
        ("mdn-no-mu-bound", "log_mu_min", None),
        ("mdn-alpha-1", "alpha_bound", False),
    ],
)
def test_an_ablation_differs_from_mdn_in_one_option(name, option, value):
    mdn, ablation = PARAMS.run("400m", "mdn"), PARAMS.run("400m", name)
    assert ablation.options["mdn"] == mdn.options["mdn"] | {option: value}
    assert ablation.options["mdn"] != mdn.options["mdn"]


def test_the_fingerprint_is_that_of_the_experiment_alone(tmp_path):
    before = PARAMS.run("smoke", "mdn").fingerprint()
    untouched = [
        ("scales/smoke/machine/checkpoint_every", 7),
        ("scales/smoke/evaluation/limit", 7),
        ("models/gdn/lr", 7e-3),
        ("models/mdn/title", "other"),
        ("scales/400m/training/lr", 7e-3),
    ]
    assert load(edited(tmp_path, *untouched)).run("smoke", "mdn").fingerprint() == before
    changes = [("seed", 43), ("models/mdn/lr", 7e-3), ("optimizer/clip", 2.0), ("models/mdn/kernel", "v1")]
    for change in changes:
        assert load(edited(tmp_path, change)).run("smoke", "mdn").fingerprint() != before


def test_a_run_survives_its_yaml(tmp_path):
    for name in ("mdn", "mdn-no-mu-bound", "mamba2-h-3to1"):
        run = PARAMS.run("smoke", name)
        run.to_yaml(tmp_path / "config.yaml")
        assert RunConfig.from_yaml(tmp_path / "config.yaml") == run


def test_the_papers_budgets_are_the_papers():
    assert PARAMS.scales["400m"].training.tokens == pytest.approx(15e9, rel=1e-4)
    assert PARAMS.scales["1b3"].training.tokens == pytest.approx(100e9, rel=1e-4)
    assert PARAMS.scales["400m"].training.warmup_tokens == pytest.approx(0.5e9, rel=1e-3)
    assert PARAMS.scales["1b3"].training.warmup_tokens == pytest.approx(1e9, rel=1e-3)
    for scale in ("400m", "1b3"):
        assert PARAMS.run(scale, "mdn").lr == 3e-4
        assert PARAMS.scales[scale].training.context == 4096


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="--params"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2", "not valid YAML"),
        ("a:\n\tb: 2", "spaces, not tabs"),
        ("seed: 1\nseed: 2", "duplicate key seed"),
        ("- seed", "no mapping"),
        ("", "empty"),
        ("# nothing yet", "empty"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, text, words):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_the_formats_and_sources_are_those_that_are_read():
    from mdn.data.groups import ROOTS
    from mdn.data.sources import FORMATS as READERS

    assert set(FORMATS) == set(READERS)
    assert set(SOURCES) == {*ROOTS, "huggingface"}
