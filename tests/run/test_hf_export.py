"""Folders of --save-hf-interval: whole or absent, next to checkpoints, and never the end of a run."""

from unittest.mock import Mock

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.convert.hugging_face.conversion import open_hugging_face
from fugaku_megatron.observe.log import loss_plot
from fugaku_megatron.run.hf_export import HfExport, check_exportable
from tests.checks.session import Writer, session
from tests.helpers import small_run, whole_tensors
from tests.llama_models import FAMILIES

pytestmark = pytest.mark.parallel

LLAMA = {**FAMILIES["llama"], "save_hf_interval": 2, "train_iters": 4}
DEEPSEEK = {
    **LLAMA,
    "use_rope_scaling": False,
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": None,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 1,
}


@pytest.fixture
def printing(monkeypatch):
    monkeypatch.setattr(Writer, "printing", True)
    monkeypatch.setattr(loss_plot, "start_loss_curve", lambda *words: Mock())


def lines_of(tmp_path, **changes) -> tuple[list[str], dict]:
    made = session(SoloComm(), tmp_path / "save", **{**LLAMA, **changes})
    made.run()
    weights = whole_tensors(made.trainer, "weight")
    made.trainer.close()
    return made.writer.lines, weights


@pytest.mark.parametrize("flags", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_a_folder_of_every_second_iteration_has_the_weights_of_its_checkpoint(
    tmp_path, printing, monkeypatch, flags
):
    monkeypatch.setenv("PMI_SIZE", "2")  # of an MPI run, of which the writer is no rank
    lines, weights = lines_of(tmp_path, keep_last=1, **flags)
    folders = sorted((tmp_path / "save_hf").iterdir())
    assert [folder.name for folder in folders] == ["iter_0000002", "iter_0000004"]
    for folder in folders:
        assert f"saved {folder} for Hugging Face" in lines
    theirs = open_hugging_face(str(folders[1]))
    assert theirs.dtypes.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(theirs.read(name), weight[: len(theirs.read(name))])
    assert HfExport.begin(str(tmp_path / "save"), 4) is None, "a repeated iteration"


def test_training_continues_where_no_folder_can_be_written(tmp_path, printing):
    (tmp_path / "save_hf").write_text("")
    lines, _ = lines_of(tmp_path)
    warnings = [line for line in lines if line.startswith("warning: --save-hf-interval: ")]
    assert len(warnings) == 2 and "is not written, and training continues" in warnings[0]
    assert any(line.startswith("saved checkpoint of iteration 4") for line in lines)


def test_a_model_without_an_architecture_of_hugging_face_is_refused_at_the_start():
    check_exportable(small_run(**FAMILIES["llama"]).model)
    model = small_run(**{**FAMILIES["llama"], "swiglu": False, "squared_relu": True}).model
    with pytest.raises(ValueError, match="^--save-hf-interval: no architecture of Hugging Face"):
        check_exportable(model)
