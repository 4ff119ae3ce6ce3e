"""Programs that people run under torchrun, as warm workers: a rank is killed, and the training goes on.

They need the packages of the extra `clients`. Without one of them its test is skipped."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest

from tests.support.command import run
from tests.support.warming import needs_linux

pytestmark = [needs_linux, pytest.mark.slow]

COMMON = """
import json, os, signal
RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def die_once():
    if RESTART == 0 and RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
def done(**what):
    with open(f"done{RANK}", "w") as file: json.dump({"restart": RESTART, **what}, file)
    os._exit(0)  # torch sometimes aborts at the end of a process that has used gloo
"""
SCRIPTS = {
    "torch": """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        def main():
            dist.init_process_group("gloo")
            data = TensorDataset(torch.arange(64.0).reshape(32, 2))
            loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True)
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            optimizer = torch.optim.Adam(model.parameters())
            for epoch in range(2):
                for (batch,) in loader:
                    optimizer.zero_grad(); model(batch).mean().backward(); optimizer.step()
                if epoch == 0: die_once()
            dist.barrier(); done(world=dist.get_world_size(), rank=dist.get_rank())
        if __name__ == "__main__": main()
    """,
    "accelerate": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 1)
        data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(32, 2), 4)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), data)
        for batch in data:
            optimizer.zero_grad(); accelerator.backward(model(batch).mean()); optimizer.step()
        die_once(); accelerator.wait_for_everyone()
        done(world=accelerator.num_processes, rank=accelerator.process_index)
    """,
    "lightning": """
        import lightning, torch
        from lightning.fabric.utilities.rank_zero import rank_zero_only
        class Model(lightning.LightningModule):
            def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 1)
            def training_step(self, batch, i):
                if i == 1: die_once()
                return self.layer(batch).mean()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 1e-6)
        trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.arange(64.0).reshape(32, 2), 4))
        done(world=trainer.world_size, rank=rank_zero_only.rank)
    """,
    "transformers": """
        import torch, torch.distributed as dist
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
        tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        data = [{"input_ids": torch.arange(8), "labels": torch.tensor(i % 2)} for i in range(16)]
        class Die(TrainerCallback):
            def on_step_end(self, *args, **kwargs): die_once()
        arguments = TrainingArguments("out", use_cpu=True, max_steps=3, save_strategy="no", report_to=[])
        model = BertForSequenceClassification(BertConfig(vocab_size=32, **tiny))
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Die()])
        trainer.train(); dist.barrier()
        done(world=dist.get_world_size(), rank=dist.get_rank())
    """,
}
LEFT_OUT = {"lightning"}
"""These read their rank while they are imported, so each worker imports them for itself."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_training_goes_on_after_a_killed_rank(name: str, tmp_path: Path) -> None:
    """As these libraries find out by themselves, in which process of how many they are."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = textwrap.dedent(COMMON) + textwrap.dedent(SCRIPTS[name])
    named = f"--warm=torch,torch.distributed,torch._dynamo,{name}"
    options = ["--nproc-per-node=2", "--max-restarts=1"]
    env = {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    status, ended = run(tmp_path, *options, named, "w.py", script=script, env=env)
    assert status == 0, ended.err
    results = [json.loads((tmp_path / f"done{rank}").read_text()) for rank in range(2)]
    assert results == [{"restart": 1, "world": 2, "rank": rank} for rank in range(2)]
    assert "cold" not in ended.err, ended.err
    assert ("not imported ahead" in ended.err) == (name in LEFT_OUT), ended.err
