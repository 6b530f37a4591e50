"""Our own items in the schemas of the sets of suites retrieval and longbench, the prompts that the protocols
make of them while they fit into the window, and an answer that is right. All written out by hand."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    item: dict[str, Any]
    prompt: str
    right: str


def _keyed(text: str, key: str, value: str) -> dict[str, Any]:
    return {"doc_id": "ours", "file_name": "ours.txt", "key": key, "value": value, "text": text}


def _asked(context: str, question: str, answers: list[str], **more: Any) -> dict[str, Any]:
    return {"doc_id": "ours", "context": context, "question": question, "answers": answers, **more}


RETRIEVAL = {
    "fda": [
        Case(
            _keyed("Device name: Pulse Ox.\nClass: II.\nclass:", "class", "II"),
            "Device name: Pulse Ox.\nClass: II. Class:",
            " II",
        ),
        Case(
            _keyed("510(k) Number: K042\nOwner: Ann Lee\n", "owner", "Ann Lee"),
            "510(k) Number: K042\nOwner: Ann Lee. Owner:",
            " ann lee, of Rome",
        ),
    ],
    "swde": [
        Case(
            _keyed(
                "<h1>Rain</h1> director Bo Ek \n\nSummary of information above... Director:",
                "director",
                "Bo Ek",
            ),
            "<h1>Rain</h1> director Bo Ek. Director:",
            " BO EK",
        ),
        Case(
            _keyed("Rain, by Bo Ek \n director:", "director", "Bo Ek"), "Rain, by Bo Ek. Director:", " Bo Ek"
        ),
    ],
    "squad": [
        Case(
            {
                "doc_id": "ours",
                "text": " The Ur is a river. The name of the river is the \n",
                "value": "Ur",
                "question": "?",
                "answers": {"text": ["other"], "answer_start": [4]},
            },
            "The Ur is a river. The name of the river is the",
            " Ur.",
        )
    ],
    "nq": [
        Case(
            _asked(
                "The mill burnt in 1901..", "The mill burnt in the year", ["1901"], alt_answers=[], tok_pos=4
            ),
            "The mill burnt in 1901. The mill burnt in the year",
            " 1901",
        ),
        Case(
            _asked("Ann ran. The winner was", "The winner was", ["Bo", "Ann"], tok_pos=0),
            "Ann ran. The winner was",
            " Ann",
        ),
    ],
    "triviaqa": [
        Case(
            _asked(
                "[DOC] [TLE] Tea[PAR]Tea grows in Assam.",
                "Tea grows in",
                ["Assam", "India"],
                orig_question="?",
            ),
            "Tea Tea grows in Assam. Tea grows in".replace("Tea Tea", "TeaTea"),
            " assam",
        )
    ],
    "drop": [
        Case(
            _asked("Ann won 3 games, Bo 1.", "Ann won more games by", ["2"], orig_question="?"),
            "Ann won 3 games, Bo 1. Ann won more games by",
            " 2",
        )
    ],
}


def _long(
    context: str, question: str, answers: list[str], classes: list[str] | None = None
) -> dict[str, Any]:
    return {
        "input": question,
        "context": context,
        "answers": answers,
        "length": len(context.split()),
        "dataset": "ours",
        "language": "en",
        "all_classes": classes,
        "_id": "ours",
    }


ONLY = "Only give me the answer and do not output any other words."
PASSAGES = f"Answer the question based on the given passages. {ONLY}"
TREC = ["Date", "City", "Other location"]
LONGBENCH = {
    "narrativeqa": (_long("A hen met a fox.", "Whom did the hen meet?", ["a fox", "the fox"]), " The fox."),
    "qasper": (_long("We use GRUs.", "What do they use?", ["GRUs"]), " GRUs"),
    "multifieldqa_en": (_long("Ur flows north.", "Where does Ur flow?", ["north"]), " North"),
    "hotpotqa": (_long("Passage 1:\nBo is 9.", "How old is Bo?", ["9"]), " 9"),
    "2wikimqa": (_long("Passage 1:\nAnn is Bo's aunt.", "Who is Ann?", ["Bo's aunt"]), " bos aunt"),
    "musique": (_long("Passage 1:\nIt rained.", "What did it do?", ["rained", "it rained"]), " It rained!"),
    "gov_report": (_long("Roads cost 9.", "", ["roads cost nine."]), "roads cost nine."),
    "qmsum": (_long("A: hi. B: hi.", "What was said?", ["they said hi."]), "they said hi."),
    "multi_news": (_long("Rain fell. Ice fell.", "", ["rain and ice fell."]), "rain and ice fell."),
    "trec": (
        _long("Question: When?\nType: Date", "Question: Where is Ur?\nType:", ["City"], TREC),
        "\nCity\nQuestion: Who?",
    ),
    "triviaqa": (_long("Passage: x\nAnswer: x", "Passage: Bo.\nAnswer:", ["Bo"]), " Bo\nPassage:"),
    "samsum": (
        _long("Dialogue: hi\nSummary: hi", "Dialogue: bye\nSummary:", ["they part."]),
        "\nthey part.\nDialogue:",
    ),
    "lcc": (
        _long("def f(x):\n", "", ["    return x + 1"]),
        "# adds one\n    return x + 1\n\n",
    ),
    "repobench-p": (_long("# a.py\nclass A: ...\n", "# b.py\nimport a\n", ["b = a.A()"]), "b = a.A()\nc = b"),
}
# Whole prompts of the four tasks in which lm-eval's lack a newline or cut differently.
PROMPTS = {
    "trec": "Please determine the type of the question below. Here are some examples of questions.\n\n"
    "Question: When?\nType: Date\nQuestion: Where is Ur?\nType:",
    "triviaqa": f"Answer the question based on the given passage. {ONLY} The following are some examples."
    "\n\nPassage: x\nAnswer: x\n\nPassage: Bo.\nAnswer:",
    "lcc": "Please complete the code given below. \ndef f(x):\nNext line of code:\n",
    "repobench-p": "Please complete the code given below. \n# a.py\nclass A: ...\n# b.py\nimport a\n"
    "Next line of code:\n",
    "hotpotqa": f"{PASSAGES}\n\nThe following are given passages.\nPassage 1:\nBo is 9.\n\n{PASSAGES}\n\n"
    "Question: How old is Bo?\nAnswer:",
}
