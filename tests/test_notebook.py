"""How rules, explanations and reports look in a notebook, and the example notebook, cell by cell."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import thunder
import torch

import hookkit

EXAMPLE = Path(__file__).parent.parent / "examples/notebook.ipynb"


def double(x):
    return 2 * x


class Outer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def rows(table):
    """The rows of each table in some HTML."""
    return ElementTree.fromstring(f"<div>{table}</div>").findall(".//tr")


def test_the_list_of_rules_is_a_table_with_the_programs_own_rules_first():
    rule = hookkit.rule(double, mode="opaque", name="doubled")
    table = hookkit.rules()._repr_html_()
    assert ["doubled", "test_notebook.double"] in [[cell.text for cell in row][:2] for row in rows(table)]
    assert table.index("doubled") < table.index("<details>") < table.index("autograd_function")
    rule.unregister()
    assert "<details open>" in hookkit.rules("autograd*")._repr_html_()
    assert hookkit.rules("no such rule")._repr_html_() == "<p>no rules</p>"


def test_a_list_of_rules_prints_a_rule_a_line_and_is_a_list():
    found = hookkit.rules("autograd_function*")
    assert [line.partition(":")[0] for line in repr(found).splitlines()] == [rule.name for rule in found]
    assert found == list(found)


def test_tables_are_aligned_left_and_nested_calls_are_indented_in_place():
    x = torch.ones(3, requires_grad=True)
    explanation = hookkit.explain(Outer.apply, x)
    jitted = thunder.jit(Outer.apply)
    jitted(x)
    for shown in (explanation, hookkit.report(jitted)):
        header, outer, inner = rows(shown._repr_html_().partition("<svg")[0])
        assert all("text-align: left" in cell.get("style") for row in (header, outer, inner) for cell in row)
        assert outer[0].text.startswith("Outer") and "padding-left" not in outer[0].get("style")
        assert inner[0].text.startswith("sigmoid") and "padding-left: 2.0em" in inner[0].get("style")


def text_of(output):
    return "".join(output.get("text", output.get("data", {}).get("text/plain", "")))


def shown(notebook):
    """What the cells print and return; a PyTorch with CUDA, but no GPU, says so beside it."""
    outputs = [[o for o in cell.get("outputs", []) if o.get("name") != "stderr"] for cell in notebook.cells]
    return [[text_of(output) for output in outputs_of_cell] for outputs_of_cell in outputs]


def test_the_example_notebook_runs_and_shows_what_it_has():
    nbclient = pytest.importorskip("nbclient", reason="the test extra is not installed")
    import nbformat

    kept = nbformat.read(EXAMPLE, as_version=4)
    run = nbclient.NotebookClient(nbformat.read(EXAMPLE, as_version=4), timeout=300).execute()
    assert shown(run) == shown(kept)
    tables = [
        o["data"]["text/html"] for c in run.cells for o in c.get("outputs", []) if "text/html" in o.get("data", {})
    ]
    assert len(tables) == 3
    assert all("In[" in table and "/tmp/" not in table for table in tables)
