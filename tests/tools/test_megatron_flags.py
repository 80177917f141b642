"""tools/megatron_flags.py: the documents' tables of flags are those of the program, and know every flag of the scripts."""

import re
from dataclasses import replace

import pytest

from fugaku_megatron.cli.arguments import build_parser, parse
from fugaku_megatron.config.megatron_flags import OTHER_FLAGS
from fugaku_megatron.config.recipes import RECIPES
from tools import megatron_flags

pytestmark = pytest.mark.parallel


def test_the_flags_of_megatron_head_are_all_known():
    head = next(flags for name, flags in megatron_flags.scripts().items() if "every flag" in name)
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert len(head) > 870 and set(head) <= known


@pytest.mark.parametrize("document", megatron_flags.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_the_documents_are_those_of_the_program(document):
    made = "\n".join(megatron_flags.DOCUMENTS[document]())
    assert document.read_text().partition(megatron_flags.LINE)[2].strip() == made.strip(), (
        "python -m tools.megatron_flags --write"
    )


def test_the_page_of_flags_has_every_flag_with_its_default_and_every_recipe():
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in megatron_flags.flag_tables()
        if line[:3] == "| `"
    ]
    named = [name for cells in rows for name in re.findall(r"`(.*?)`", cells[0])]
    flags = [
        option
        for action in build_parser()._actions
        for option in action.option_strings
        if option not in OTHER_FLAGS
    ]
    flags = [option for option in flags if option not in ("-h", "--help")]
    assert sorted(named) == sorted(
        [*flags, "--recipe", *RECIPES]
    )  # --recipe is also the head of the last table
    by_name = {re.match("`(.*?)`", cells[0])[1]: cells[1:] for cells in rows}
    assert by_name["--lr-warmup-iters"] == ["integer", "0", "iterations of linear warm-up"]
    assert by_name["--zero-stage"][:2] == ["`0` or `1` or `2` or `3`", "0"]
    assert by_name["--num-layers"][:2] == ["integer", "required"]
    assert by_name["--use-flush-denormal"] == ["", "on", "flush denormals to zero in every thread"]
    assert by_name["--max-position-embeddings"][1] == "`--seq-length`" and by_name["--bf16"][
        :2
    ] == ["", ""]
    assert by_name["--rampup-batch-size"][:2] == ["integer, 3 of them", ""]


@pytest.mark.parametrize("name", RECIPES)
def test_the_flags_that_a_recipe_stands_for_make_its_run(name):
    run = parse([*megatron_flags.recipe_flags(RECIPES[name]())]).run
    recipe = RECIPES[name]()
    assert run.optimizer.min_lr == pytest.approx(
        recipe.optimizer.min_lr, rel=1e-12
    )  # written with 12 digits
    assert replace(run, optimizer=replace(run.optimizer, min_lr=recipe.optimizer.min_lr)) == recipe


def test_every_flag_of_the_scripts_is_done_noted_or_refused():
    parser = build_parser()
    for name, flags in megatron_flags.scripts().items():
        assert (
            len(flags) > 20
            and name.count(": ") == 1
            and re.search(r"as stored at commit [0-9a-f]{12}\b|as released in", name)
        )
        for given in flags:
            found = megatron_flags.row(given, parser)
            assert found.meaning and found.status in ("done", "noted", "refused"), given
    status = {
        given: megatron_flags.row(given, parser).status
        for given in (
            "--lr",
            "--position-embedding-type rope",
            "--normalization RMSNorm",
            "--use-mup",
            "--attention-backend fused",
        )
    }
    assert [*status.values()] == ["done", "done", "done", "refused", "noted"]
