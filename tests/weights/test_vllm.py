"""Engines for vLLM, with its real classes, models and loaders: `hatch run vllm:test` installs what they need to import.

No kernel of vLLM runs here, and no server: workers are objects, and a client calls them as the server would.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from tests.weights.processes import TIMEOUT, Other, free_address

pytest.importorskip("vllm", reason="needs vLLM: hatch run vllm:test")

from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import composed_weight_loader, default_weight_loader
from vllm.model_executor.models.llama import LlamaForCausalLM

from shardkit.weights.vllm import Source, TrainerInit, register

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
MODELS = {
    "llama": ({}, []),
    "qwen2": ({"tie_word_embeddings": True}, []),
    "qwen3": ({"head_dim": 16, "vocab_size": 100}, ["model.embed_tokens.weight", "lm_head.weight"]),
    "gpt2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "activation_function": "gelu_pytorch_tanh"},
        ["transformer.h.0.attn.c_attn.weight"],
    ),
}
"""Options of each, and tensors that are received as a whole: padded, or transposed by the model's own loader."""


def trained(kind, directory):
    """A model of transformers, and two configurations of vLLM for it: each serves for one model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **MODELS[kind][0]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    return model


def joined(rank, size, address):
    """Is rank `rank` of the tensor-parallel workers."""
    register()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, address, rank, backend="gloo")
        initialize_model_parallel(size, 1)


def made(directory, size=1):
    """A worker with the model in a directory, and another such model that its own loader fills."""
    options = {"tokenizer": str(directory), "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
    models = []
    for _ in range(2):
        config = VllmConfig(
            model_config=ModelConfig(model=str(directory), **options),
            parallel_config=ParallelConfig(tensor_parallel_size=size),
        )
        with set_current_vllm_config(config):
            models.append(initialize_model(config))
    transfer = SimpleNamespace(backend="shardkit")
    worker = WeightTransferEngineFactory.create_engine(transfer, config, torch.device("cpu"), models[0])
    return worker, models[1]


def same(worker, model):
    """Whether the worker has what a model has that its own loader has filled."""
    here = dict(worker.model.named_parameters())
    return {name for name, one in model.named_parameters() if not torch.equal(here[name], one)} == set()


class Client:
    """Calls a worker as vLLM's server does."""

    def __init__(self, worker):
        self.worker = worker
        self.finish_weight_update = worker.finish_weight_update
        self.start_weight_update = worker.start_weight_update

    def init_weight_transfer_engine(self, info):
        self.worker.init_transfer_engine(self.worker.parse_init_info(info))

    def update_weights(self, info):  # without the synchronisation with a device that follows
        self.worker.receive_weights(self.worker.parse_update_info(info))


@pytest.mark.parametrize("kind", MODELS)
def test_a_worker_has_what_its_own_loader_would_give_it(kind, tmp_path):
    if not model_parallel_is_initialized():
        joined(0, 1, free_address())
    model = trained(kind, tmp_path)
    worker, expected = made(tmp_path)
    with set_current_vllm_config(worker.vllm_config):
        info = TrainerInit(free_address(), receivers=1, world_size=1, timeout=TIMEOUT, rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(worker), source=Source(model))
        try:
            print(kind, list(worker.whole))
            for _ in range(2):
                with torch.no_grad():
                    for one in model.parameters():
                        one.add_(torch.randn_like(one))
                expected.load_weights(iter(model.state_dict().items()))
                trainer.send_weights()
                assert same(worker, expected)
            assert set(MODELS[kind][1]) <= set(worker.whole) and bool(worker.whole) == bool(MODELS[kind][1])
        finally:
            trainer.shutdown()
            worker.shutdown()


def test_a_parameter_that_its_loader_changes_after_the_copy(tmp_path, monkeypatch):
    """As those of state-space models: they are received as a whole, and keep their values until then."""
    build = LlamaForCausalLM.__init__

    @functools.wraps(build)
    def changed(self, **options):
        build(self, **options)
        self.model.norm.weight.weight_loader = composed_weight_loader(default_weight_loader, lambda x: -x.exp())

    monkeypatch.setattr(LlamaForCausalLM, "__init__", changed)
    if not model_parallel_is_initialized():
        joined(0, 1, free_address())
    model = trained("llama", tmp_path)
    worker, expected = made(tmp_path)
    before = worker.model.model.norm.weight.clone()
    with set_current_vllm_config(worker.vllm_config):
        info = TrainerInit(free_address(), receivers=1, world_size=1, timeout=TIMEOUT, rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(worker), source=Source(model))
        try:
            assert list(worker.whole) == ["model.norm.weight"]
            assert torch.equal(worker.model.model.norm.weight, before)
            expected.load_weights(iter(model.state_dict().items()))
            trainer.send_weights()
            assert same(worker, expected)
        finally:
            trainer.shutdown()
            worker.shutdown()


def tensor_parallel_worker(pipe, rank, directory, address):
    joined(rank, 2, address)
    worker, expected = made(directory, 2)
    client = Client(worker)
    with set_current_vllm_config(worker.vllm_config):
        client.init_weight_transfer_engine(pipe.recv())
        pipe.send("ready")
        client.start_weight_update()
        client.update_weights(pipe.recv())
        client.finish_weight_update()
        expected.load_weights(iter(torch.load(f"{directory}/state.pt").items()))
        pipe.send(
            (
                same(worker, expected),
                sum(run[1] for runs in worker._receiver._layout.runs.values() for run in runs),
                list(worker.whole),
            )
        )
        pipe.recv()


def test_tensor_parallel_workers_receive_their_parts(tmp_path):
    model = trained("llama", tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    address = free_address()

    class Both:
        def init_weight_transfer_engine(self, info):
            for one in workers:
                one.pipe.send(info)
                assert one.says() == "ready"

        def start_weight_update(self):
            pass

        def update_weights(self, info):
            for one in workers:
                one.pipe.send(info)

        def finish_weight_update(self, weight_version=None):
            pass

    with (
        Other(tensor_parallel_worker, 0, tmp_path, address) as first,
        Other(tensor_parallel_worker, 1, tmp_path, address) as second,
    ):
        workers = (first, second)
        info = TrainerInit(free_address(), receivers=2, world_size=1, timeout=TIMEOUT, rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=Both(), source=Source(model))
        trainer.send_weights()
        norms = sum(one.nbytes for name, one in model.state_dict().items() if "norm" in name)
        total = sum(one.nbytes for one in model.state_dict().values())
        assert [one.says() for one in workers] == [(True, (total + norms) // 2, [])] * 2
        trainer.shutdown()
        for one in workers:
            one.pipe.send("end")


def test_a_source_of_whole_tensors_is_refused():
    register()
    info = TrainerInit(free_address(), receivers=1, world_size=1, rank=0)
    with pytest.raises(TypeError, match="a source of type ModuleSource, expected"):
        WeightTransferTrainerFactory.trainer_init(info, client=None, source=ModuleSource(torch.nn.Linear(1, 1)))
