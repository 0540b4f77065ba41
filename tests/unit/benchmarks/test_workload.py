import json

import pytest
from benchmarks import coremill_run, peers
from benchmarks.workload import LLAMA_SHAPE, Workload, llama_parameters, pack, paragraphs_of

from coremill.config.load import load_config


def a_workload(folder) -> Workload:
    return Workload(
        folder=str(folder), parameters=1, documents=2, tokens=5000, rows=9, paragraphs=100, paragraph_tokens=6144
    )


def test_the_shape_has_about_fifty_million_parameters():
    assert llama_parameters(LLAMA_SHAPE) == 51_847_680


def test_paragraphs_are_blocks_and_single_lines_join_the_next():
    text = "# heading\n\n\nfirst\nsecond\n   \nthird\nfourth\n\nlast\n"
    assert paragraphs_of(text) == ["# heading\nfirst\nsecond", "third\nfourth", "last"]
    assert paragraphs_of("\n\n \n") == []


def test_packing_closes_each_document_and_drops_the_tail():
    assert pack([[1, 2, 3], [4, 5]], end_token_id=0, length=3) == ([1, 2, 3, 0, 4, 5], 2)


def test_real_share_counts_the_padding(tmp_path):
    assert a_workload(tmp_path).real_share_when_padded == pytest.approx(0.12)


def test_the_run_file_is_one_coremill_accepts(tmp_path):
    path = tmp_path / "it's a run.yaml"
    coremill_run.write_run_file(path, a_workload(tmp_path), run=tmp_path / "run", steps=4, tokens_per_step=2048, seed=8)
    config = load_config(path, ["train.micro_batch_rows=4"]).config
    assert config.model.name == str(tmp_path / "model")
    assert (config.train.steps, config.train.tokens_per_step, config.train.micro_batch_rows) == (4, 2048, 4)
    assert config.run.export is False


def test_the_deepspeed_config_is_the_recipes_own():
    found = list((peers.ROOT.parent / "shared" / "seeds").glob("002*.txt"))
    if not found:
        pytest.skip("the recipe's text is not on this machine")
    text = found[0].read_text()
    block = text[text.index("[cpu-ds.json]") :].split("```")[1]
    ours = json.loads((peers.ROOT / "benchmarks" / "contenders" / "cpu-ds.json").read_text())
    assert ours == json.loads(block)
