"""The recipes: each loop and model, small, pretrains and fine-tunes what it has saved. And the other examples."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.trainers.launch import ROOT, succeeded

RECIPES = ROOT / "examples" / "recipes"
RUN = [sys.executable, "-m", "shardkit.core", "run", "--strict"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def losses(*options: object, name: str = "train.py") -> list[float]:
    command = [*RUN, *TORCHRUN, "--standalone", "--nproc-per-node=2", RECIPES / name, "--steps=20", *options]
    return [float(value) for value in re.findall(r"(?:loss |'loss': '?)([0-9.]+)", succeeded(command).stdout)]


@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs ip and unshare")
def test_the_slurm_script_trains_on_two_nodes(tmp_path: Path):
    """Both are this host, in a network of their own, where the script's port is free."""
    pytest.importorskip("accelerate", reason="takes long, and `hatch run trainers:test` runs it")
    programs = {
        "scontrol": "echo localhost",
        "srun": '"$@" & other=$!; "$@" && wait $other',
        "shardkit": f'exec {sys.executable} -m shardkit.core "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    alone = ["unshare", "--map-root-user", "--net", "bash", "-c", 'ip link set lo up && exec bash "$@"', "bash"]
    script = [RECIPES / "slurm.sh", "--model", RECIPES / "llama-tiny.json", "--steps=20", "--out", tmp_path / "out"]
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "RANKS_PER_NODE": "1"}
    job |= {"RECIPE": str(RECIPES / "train.py"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = succeeded([*alone, *script], **job, PET_LOCAL_ADDR="localhost", GLOO_SOCKET_IFNAME="lo")
    assert "5 groups, 2 ranks" in done.stderr
    first, last = (float(value) for value in re.findall(r"loss ([0-9.]+)", done.stdout))
    assert last < first


@pytest.mark.parametrize("trainer", ["accelerate", "torchtitan"])
def test_a_plan_is_a_configuration_that_the_trainer_reads(trainer: str, tmp_path):
    reader = {"accelerate": "accelerate.commands.config.config_args", "torchtitan": "torchtitan.config.manager"}[
        trainer
    ]
    read_by = pytest.importorskip(reader)
    out, model = tmp_path / "plan", RECIPES / "llama-tiny.json"
    options = ["--sequence=64", "--world-size=16", "--most-micro-batch=2", "--global-batch=64"]
    options += [f"--hf-config={model}", f"--format={trainer}", f"--write={out}"]
    succeeded([sys.executable, "-m", "shardkit.tools", "plan", *options])
    text = out.read_text()
    if trainer == "accelerate":
        read = read_by.load_config_from_file(str(out))
        assert (read.num_machines, read.num_processes, read.fsdp_config["fsdp_version"]) == (2, 16, 2)
        assert read.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    else:
        words = [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]
        read = read_by.ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *words])
        assert read.training.global_batch_size == 64 and read.parallelism.tensor_parallel_degree in (1, 2, 4, 8)
        degrees = read.parallelism
        both = degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree
        assert both * degrees.tensor_parallel_degree == 16


def test_the_image_is_made_of_files_that_exist():
    text = (RECIPES / "Dockerfile").read_text()
    copied = dict(re.findall(r"^COPY (\S+) (\S+)$", text, re.MULTILINE))
    assert copied and all((ROOT / source).exists() for source in copied)
    for path in re.findall(r"/src/packages/\w+", text):
        assert (ROOT / path.removeprefix("/src/") / "pyproject.toml").exists()


@pytest.mark.daily(model=["llama"])
@pytest.mark.parametrize("model", ["llama", "qwen-moe"])
@pytest.mark.parametrize("loop", ["plain", "accelerate", "trainer"])
def test_each_loop_pretrains_and_fine_tunes(loop: str, model: str, tmp_path):
    pytest.importorskip("peft")
    base = tmp_path / "base"
    first = losses("--model", RECIPES / f"{model}-tiny.json", "--loop", loop, "--out", base)
    assert first[-1] < first[0]
    tuned = losses("--weights", base, "--task=full", "--loop", loop, "--out", tmp_path / "full", "--lr=1e-3")
    assert tuned[-1] < first[-1]
    lora = losses("--weights", base, "--task=lora", "--loop", loop, "--out", tmp_path / "lora")
    assert lora[-1] < first[-1]
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()
    assert (tmp_path / "full" / "model.safetensors").exists()


LOSS = {"hf_trainer": r"'loss': '?([0-9.]+)", "lightning": r"loss ([0-9.]+)"}


@pytest.mark.parametrize("name", sorted(LOSS))
def test_an_example_trains_on_our_engine(name: str, tmp_path):
    pytest.importorskip("accelerate" if name == "hf_trainer" else "lightning")
    script = ROOT / "examples" / name / "train.py"
    command = [sys.executable, str(script), "--steps=20"]
    if name == "hf_trainer":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command.append(f"--directory={tmp_path}")
    done = succeeded(command, tmp_path)
    ran = r"^shardkit .* runs .*: [\d,]+ parameters in \d+ groups, 2 ranks$"
    assert len(re.findall(ran, done.stderr, re.MULTILINE)) == 1
    losses = [float(value) for value in re.findall(LOSS[name], done.stdout + done.stderr)]
    assert len(losses) >= 2, done.stdout
    assert losses[-1] < losses[0]
