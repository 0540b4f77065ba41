"""Examples to rows on disk and back: files of every kind, labels, bad rows, what is held out, the cache."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coremill.config.schema import RunConfig
from coremill.data.encode import AskedLabels, check_examples, prepare_examples
from coremill.data.encoded import EncodedRows
from coremill.data.encoded_split import EncodedSplit
from coremill.data.examples import ExampleForm, labelled_texts, questions_of
from coremill.data.labels import Labels
from coremill.data.run_sources import with_examples
from coremill.data.sources import open_text, resolve_source
from coremill.errors import InputError
from pair_tokenizers import make_bert_tokenizer, make_roberta_tokenizer

PAIRS = labelled_texts(("first", "second"), "label")
QUESTIONS = questions_of(question="question", context="context", answers="answers", id_column="id")
ROWS = [
    {"first": f"the mill turns {'and turns ' * (number % 7)}", "second": f"the store {number}", "label": number % 3}
    for number in range(40)
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return make_bert_tokenizer(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def prepare(bert: Path, tmp_path: Path) -> Callable[..., EncodedRows]:
    def make(source: Path, form: ExampleForm = PAIRS, *, asked: AskedLabels | None = None, **data: Any) -> EncodedRows:
        how = {"tokenizer_folder": data.pop("tokenizer", bert), "vocabulary_rows": data.pop("vocabulary", 400)}
        stride, seed, progress = data.pop("stride", 8), data.pop("seed", 7), data.pop("progress", None)
        config = RunConfig.model_validate(
            {"data": {"source": str(source), "sequence_length": 32, **data}, "train": {"seed": seed}}
        )
        return prepare_examples(
            config,
            form=form,
            doc_stride=stride,
            asked=asked,
            **how,
            max_positions=64,
            cache=tmp_path,
            progress=progress,
        )

    return make


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_are_encoded_as_the_tokenizer_does(prepare, bert, tmp_path):
    from tokenizers import Tokenizer

    long = [{"first": "numbers " * 50, "second": "mill " * 20, "label": 1}]
    rows = prepare(write_jsonl(tmp_path / "set.jsonl", ROWS + long))
    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    tokenizer.enable_truncation(32, strategy="longest_first")
    theirs = tokenizer.encode_batch([(row["first"], row["second"]) for row in ROWS + long])
    split = EncodedSplit(rows, "train")
    assert split.lengths.tolist() == [len(each) for each in theirs]
    assert split.targets["labels"].tolist() == [row["label"] for row in ROWS + long]
    assert (rows.train_rows, rows.cut_rows, rows.longest_row) == (41, 1, 32) and rows.labels == Labels(
        kind="classes", count=3
    )
    chosen = np.array([40, 3, 0, 6])
    ids, mask, types = split.padded(chosen)
    assert ids.shape == mask.shape == (4, 32) and types is not None
    for place, row in enumerate(chosen):
        assert ids[place][mask[place]].tolist() == theirs[row].ids
        assert types[place][mask[place]].tolist() == theirs[row].type_ids
        assert (ids[place][~mask[place]] == tokenizer.token_to_id("[PAD]")).all()
    narrow = split.padded(np.array([0]))[0]
    assert narrow.shape == (1, len(theirs[0])) and split.padded(np.array([0]), width=40)[0].shape == (1, 40)
    assert split.padded(np.zeros(0, np.int64))[0].shape == (0, 1)
    assert EncodedRows.from_json(json.loads(json.dumps(rows.to_json()))) == rows
    assert json.loads(json.dumps(rows.counts()))["mean_row_tokens"] == pytest.approx(split.lengths.mean())
    assert all(path.is_file() for path in rows.files())


def test_files_of_every_kind_give_the_same_rows(prepare, tmp_path):
    import pyarrow
    import pyarrow.parquet

    write_jsonl(tmp_path / "set.jsonl", ROWS)
    (tmp_path / "array.json").write_text(json.dumps(ROWS))
    with (tmp_path / "set.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["label", "first", "second"])
        writer.writeheader()
        writer.writerows(ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "set.parquet")
    found = [prepare(tmp_path / name) for name in ("set.jsonl", "array.json", "set.csv", "set.parquet")]
    splits = [EncodedSplit(rows, "train") for rows in found]
    everything = np.arange(40)
    for split in splits[1:]:
        assert np.array_equal(split.padded(everything)[0], splits[0].padded(everything)[0])
        assert np.array_equal(split.targets["labels"], splits[0].targets["labels"])


def test_classes_have_the_names_of_the_dataset(prepare, tmp_path):
    """A parquet file of the hub knows the names of its classes."""
    import datasets

    features = datasets.Features(
        {name: datasets.Value("string") for name in ("first", "second")}
        | {"label": datasets.ClassLabel(names=["different", "same", "unsure"])}
    )
    table = datasets.Dataset.from_list(ROWS, features=features)
    table.to_parquet(str(tmp_path / "train.parquet"))
    file, names = tmp_path / "train.parquet", ("different", "same", "unsure")
    rows = prepare(file)
    assert rows.labels.names == names and EncodedSplit(rows, "train").targets["labels"][:3].tolist() == [0, 1, 2]
    # A head, or other data, in another order: by name, on both sides.
    head = AskedLabels(Labels(kind="classes", count=3, names=("Unsure", "Different", "Same")), "the model's head")
    rows = prepare(file, asked=head, evaluation_source=str(file))
    for side in ("train", "evaluation"):
        assert EncodedSplit(rows, side).targets["labels"][:3].tolist() == [1, 2, 0]
    assert [note.partition(":")[0] for note in rows.notes] == ["labels go by name", "to evaluate on"]
    lines = write_jsonl(tmp_path / "named.jsonl", [row | {"label": "scale"[row["label"]]} for row in ROWS])
    with pytest.raises(InputError, match="not those of the labels of the training data"):
        prepare(lines, evaluation_source=str(file))


def test_labels_of_training_decide(prepare, tmp_path):
    named = [{**row, "label": "abc"[row["label"]]} for row in ROWS]
    train = write_jsonl(tmp_path / "train.jsonl", named)
    tested = write_jsonl(tmp_path / "test.jsonl", [{**row, "label": "c"} for row in ROWS[:5]])
    rows = prepare(train, evaluation_source=str(tested))
    assert rows.labels is not None and rows.labels.names == ("a", "b", "c")
    assert EncodedSplit(rows, "evaluation").targets["labels"].tolist() == [2] * 5
    assert (rows.train_rows, rows.evaluation_rows) == (40, 5)
    write_jsonl(tested, [ROWS[0] | {"label": "b"}, ROWS[1] | {"label": "d"}])
    with pytest.raises(InputError, match="'d' is not known") as error:
        prepare(train, evaluation_source=str(tested))
    assert error.value.where == f"{tested}:2" and "the labels of the training data" in error.value.why
    rows = prepare(train, evaluation_source=str(tested), on_bad_rows="skip")
    assert (rows.evaluation_rows, rows.bad_rows) == (1, 1) and "'d' is not known" in rows.bad_rows_words
    asked = AskedLabels(Labels(kind="classes", count=4, names=("c", "b", "a", "d")), "model.labels")
    rows = prepare(train, evaluation_source=str(tested), asked=asked)
    assert EncodedSplit(rows, "train").targets["labels"][:3].tolist() == [2, 1, 0]


def test_predictions_name_file_and_row(prepare, tmp_path):
    """As messages do, whatever was left out before and whatever is held out."""
    from coremill.tasks.sequence_classification.scoring import score_rows

    write_jsonl(tmp_path / "a.jsonl", [{**ROWS[0], "label": None}, *ROWS[:9]])
    (tmp_path / "b.jsonl").write_text("")
    write_jsonl(tmp_path / "c.jsonl", ROWS[9:])
    whole = prepare(tmp_path / "*.jsonl", on_bad_rows="skip", evaluation_fraction=0.5)
    apart = prepare(tmp_path / "c.jsonl", evaluation_source=str(tmp_path / "[ab].jsonl"), on_bad_rows="skip")
    assert EncodedRows.from_json(json.loads(json.dumps(apart.to_json()))) == apart
    seen = set()
    for rows in (whole, apart):
        row_ids = np.arange(rows.evaluation_rows)[::-1]
        scored = score_rows(rows, row_ids, np.zeros((len(row_ids), 3), np.float32))
        for line in json.loads(scored.files["predictions.json"]):
            named = json.loads(Path(line["file"]).read_text().splitlines()[line["row"] - 1])
            assert named["label"] == line["label"]
            seen.add(Path(line["file"]).name)
    assert seen == {"a.jsonl", "c.jsonl"}
    (tmp_path / "c.jsonl").rename(tmp_path / "d.jsonl")  # the same encoding, found in the cache
    again = prepare(tmp_path / "*.jsonl", on_bad_rows="skip", evaluation_fraction=0.5)
    assert again.from_cache and again.evaluation_files[-1] == str(tmp_path / "d.jsonl")


def test_numbers_to_predict(prepare, tmp_path):
    scored = write_jsonl(tmp_path / "scores.jsonl", [row | {"label": row["label"] + 0.25} for row in ROWS])
    rows = prepare(scored)
    assert rows.labels == Labels(kind="regression") and EncodedSplit(rows, "train").targets["labels"][0] == 0.25
    assert any("regression" in note for note in rows.notes)


BAD = [
    ({"label": None}, "the row has no label (column 'label')"),
    ({"label": ""}, "the row has no label"),
    ({"label": [1]}, "column 'label' holds no label"),
    ({"label": float("nan")}, "the label is no number: nan"),
    ({"first": None}, "there is no text in column 'first'"),
    ({"first": 3}, "column 'first' holds no text"),
    ({"first": " ", "second": ""}, "there is no text in 'first' and 'second'"),
    ({"first": "a\0b"}, "holds a NUL character"),
]


@pytest.mark.parametrize(("bad", "said"), BAD)
def test_bad_rows_have_file_row_reason_and_cure(tmp_path, bad, said):
    source = write_jsonl(tmp_path / "set.jsonl", [*ROWS[:4], {**ROWS[4], **bad}, *ROWS[5:8]])
    pieces = open_text(with_examples(resolve_source(str(source), column="text", split="train"), PAIRS)).pieces
    with pytest.raises(InputError) as error:
        list(pieces)
    assert said in str(error.value) and error.value.where == f"{source}:5"
    assert "data.on_bad_rows=skip" in error.value.do


def test_bad_rows_are_left_out_and_counted(prepare, tmp_path):
    source = write_jsonl(tmp_path / "set.jsonl", [*ROWS, *({**ROWS[4], **bad} for bad, _ in BAD)])
    rows = prepare(source, on_bad_rows="skip")
    assert (rows.train_rows, rows.bad_rows) == (40, len(BAD)) and "listed in" in rows.bad_rows_words
    listed = [json.loads(line) for line in (rows.folder / "bad-rows.jsonl").read_text().splitlines()]
    assert [each["where"] for each in listed] == [f"{source}:{row}" for row in range(41, 49)]


@pytest.mark.parametrize(
    ("form", "data", "said", "cure"),
    [
        (labelled_texts(("first", "secnd"), "label"), {}, "did you mean 'second'?", "data.text_columns"),
        (labelled_texts(("first",), "labels"), {}, "no column 'labels'", "data.label_column"),
        (QUESTIONS, {}, "no column 'question'", "set data.question_column to the one that holds the question"),
        (PAIRS, {"source": "built-in"}, "built-in is plain text and has no columns", ".jsonl"),
        (PAIRS, {"sequence_length": 128}, "longer than the model's 64 positions", "data.sequence_length"),
        (PAIRS, {"evaluation_split": "test"}, "only a dataset of the hub has splits", "data.evaluation_source"),
    ],
)
def test_what_is_found_in_a_second(tmp_path, form, data, said, cure):
    source = str(write_jsonl(tmp_path / "set.jsonl", ROWS))
    config = RunConfig.model_validate({"data": {"source": source, "sequence_length": 32, **data}})
    with pytest.raises(InputError) as error:
        check_examples(config, form, max_positions=64)
    assert said in str(error.value) and cure in (error.value.do or "")


def test_a_dataset_without_answers(tmp_path):
    source = write_jsonl(tmp_path / "set.jsonl", [{"question": "who?", "context": "the mill"}])
    config = RunConfig.model_validate({"data": {"source": str(source)}})
    with pytest.raises(InputError, match="there is no column 'answers'") as error:
        check_examples(config, QUESTIONS, max_positions=None)
    assert "without answers there is nothing to learn" in error.value.do


def test_a_token_the_model_has_no_row_for(prepare, tmp_path):
    with pytest.raises(InputError, match="is beyond the model's embedding of 20 rows") as error:
        prepare(write_jsonl(tmp_path / "set.jsonl", ROWS), vocabulary=20)
    assert "set.jsonl:1" in error.value.where


def test_an_empty_dataset(prepare, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="the dataset is empty"):
        prepare(tmp_path / "empty.jsonl")
    source = write_jsonl(tmp_path / "bad.jsonl", [ROWS[0] | {"label": None}])
    with pytest.raises(InputError, match="the dataset is empty") as error:
        prepare(source, on_bad_rows="skip")
    assert "1 bad row left out" in error.value.why


def questions() -> list[dict[str, Any]]:
    """Four contexts with five questions each; one in five has no answer, some are long."""
    found = []
    for number in range(20):
        context = f"Mill {number // 5} was built in 18{number // 5}1. " + "It turns and turns. " * (number // 5 * 8)
        start = context.index("18")
        answers = {"text": [context[start : start + 4]], "answer_start": [start]}
        none: dict[str, list[Any]] = {"text": [], "answer_start": []}
        row = {"id": f"q{number}", "question": f"when was mill {number} built?", "context": context}
        found.append({**row, "answers": answers if number % 5 else none})
    return found


def test_questions_become_windows(prepare, tmp_path):
    rows = prepare(write_jsonl(tmp_path / "qa.jsonl", questions()), QUESTIONS)
    split = EncodedSplit(rows, "train")
    assert rows.train_rows == split.count > 20 and rows.train_examples == split.example_count == 20
    assert rows.unanswerable == 4 and split.null_position == 0
    asked = list(split.questions())
    assert [each.id for each in asked] == [f"q{number}" for number in range(20)]
    answered = set()
    for row in range(split.count):
        start, end = (int(split.targets[name][row]) for name in ("start_positions", "end_positions"))
        question, offsets = asked[split.row_examples[row]], split.offsets(row)
        if start:
            answered.add(question.id)
            assert question.context[offsets[start, 0] : offsets[end, 1]] == question.answers[0]
        else:
            assert end == 0
    assert answered == {each.id for each in asked if each.answers}
    assert "windows of 20 questions" in rows.in_words() and rows.counts()["unanswerable"] == 4


def test_the_published_file_is_read_as_it_is(prepare, tmp_path):
    flat, articles = questions(), []
    for number in range(4):
        asked = []
        for row in flat[5 * number : 5 * number + 5]:
            answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
            listed = [{"text": text, "answer_start": start} for text, start in answers]
            asked.append({"id": row["id"], "question": row["question"], "answers": listed})
            if not listed:
                asked[-1] |= {"is_impossible": True, "plausible_answers": [{"text": "no", "answer_start": 0}]}
        articles.append({"title": "mills", "paragraphs": [{"context": flat[5 * number]["context"], "qas": asked}]})
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": articles}))
    (tmp_path / "lines.json").write_text(json.dumps({"data": articles}, indent=1))
    rows = [
        prepare(path, QUESTIONS)
        for path in (write_jsonl(tmp_path / "qa.jsonl", flat), tmp_path / "squad.json", tmp_path / "lines.json")
    ]
    splits = [EncodedSplit(each, "train") for each in rows]
    for split in splits[1:]:
        assert list(split.questions()) == list(splits[0].questions())
        assert np.array_equal(split.padded(np.arange(split.count))[0], splits[0].padded(np.arange(split.count))[0])
    articles[2]["paragraphs"][0]["qas"][1]["answers"][0]["answer_start"] += 2
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    with pytest.raises(InputError, match="answer_start is not") as error:
        prepare(tmp_path / "squad.json", QUESTIONS)
    assert error.value.where == f"{tmp_path}/squad.json, data[2].paragraphs[0].qas[1]"


def test_bad_questions_and_ids(prepare, tmp_path):
    rows = questions()
    rows[3]["question"] = "when " * 40  # leaves no room
    rows[4]["answers"]["answer_start"] = [5]
    rows[6]["id"] = "q5"
    source = write_jsonl(tmp_path / "qa.jsonl", rows)
    found = prepare(source, QUESTIONS, on_bad_rows="skip")
    assert found.bad_rows == 2 and found.train_examples == 18
    assert "q5#2" in [each.id for each in EncodedSplit(found, "train").questions()]
    assert any("have the id of an earlier one" in note for note in found.notes)
    for row, name in zip(rows, ("x#2", "x", "x", "x", "x#2"), strict=False):  # some are named as others would become
        row["id"] = name
    ids = [
        each.id
        for each in EncodedSplit(prepare(write_jsonl(source, rows), QUESTIONS, on_bad_rows="skip"), "train").questions()
    ]
    assert len(set(ids)) == len(ids) == 18 and ids[:3] == ["x#2", "x", "x#3"]
    write_jsonl(source, [*rows[:4], *rows[5:]])
    with pytest.raises(InputError, match="the question is too long") as error:
        prepare(source, QUESTIONS)
    assert error.value.where == f"{source}:4"


def test_what_is_held_out(prepare, tmp_path):
    """Whole contexts, by the seed; nothing on both sides, and nothing is encoded again."""
    source = write_jsonl(tmp_path / "qa.jsonl", questions())
    first = prepare(source, QUESTIONS, evaluation_fraction=0.25)
    splits = {name: EncodedSplit(first, name) for name in ("train", "evaluation")}
    asked = {name: list(split.questions()) for name, split in splits.items()}
    assert [len(asked["train"]), len(asked["evaluation"])] == [15, 5]
    assert not {each.context for each in asked["train"]} & {each.context for each in asked["evaluation"]}
    assert splits["train"].count == first.train_rows and splits["evaluation"].count == first.evaluation_rows
    assert splits["evaluation"].row_examples.tolist() == sorted(splits["evaluation"].row_examples.tolist())
    assert "5 of 20 questions (25.0%), with whole contexts" in first.evaluation_words
    others = [prepare(source, QUESTIONS, evaluation_fraction=0.25, seed=seed) for seed in range(6)]
    assert all(each.from_cache for each in others) and len({each.key for each in [first, *others]}) == 7
    held = {tuple(each.id for each in EncodedSplit(rows, "evaluation").questions()) for rows in others}
    assert len(held) > 1
    assert prepare(source, QUESTIONS, evaluation_fraction=0.25).key == first.key
    one = write_jsonl(tmp_path / "one.jsonl", questions()[:5])
    with pytest.raises(InputError, match="questions on one context cannot be shared"):
        prepare(one, QUESTIONS, evaluation_fraction=0.25)


def test_the_cache_knows_what_rows_are_made_of(prepare, tmp_path, bert):
    source = write_jsonl(tmp_path / "set.jsonl", ROWS)
    said = []
    first = prepare(source, progress=said.append)
    assert said and said[-1].is_done and said[-1].documents_done == 40
    again = prepare(source)
    assert again.from_cache and again.key == first.key
    roberta = make_roberta_tokenizer(tmp_path / "roberta")
    changed = [
        prepare(source, sequence_length=16),
        prepare(source, tokenizer=roberta),
        prepare(source, labelled_texts(("first",), "label")),
        prepare(source, asked=AskedLabels(Labels(kind="regression"), "model.labels")),
    ]
    assert len({each.key for each in [first, *changed]}) == 5 and not any(each.from_cache for each in changed)
    assert EncodedSplit(changed[1], "train").padded(np.arange(2))[2] is None  # no token types
    write_jsonl(source, ROWS[1:])
    assert prepare(source).key != first.key
