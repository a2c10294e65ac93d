"""Checkpoints in object stores: fsspec's of memory and of the local disk, and moto's S3 where it is installed."""

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError, TrainingState, saving
from shardkit.core.checkpoint.command import main
from tests.core.checkpoint.trainee import restore, save_trained, saved
from tests.support import run_ranks
from tests.support.twins import assert_equal

STORES = {"memory": "memory://", "local": "local://", "s3": "s3://"}


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """A server of S3 on this host, and the settings by which s3fs finds it."""
    for package in ("moto", "s3fs", "flask"):
        pytest.importorskip(package)
    code = (
        "import time; from moto.server import ThreadedMotoServer as Server; "
        "server = Server('127.0.0.1', 0, verbose=False); server.start(); "
        "print(server.get_host_and_port()[1], flush=True); time.sleep(3600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        settings = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_ENDPOINT_URL": url}
        with mock.patch.dict(os.environ, settings):
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
            yield settings
        server.kill()


@pytest.fixture(params=STORES)
def url(request, tmp_path) -> str:
    """A place of its own in each store."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://bucket/{tmp_path.name}-{time.monotonic_ns()}"
    return f"{STORES[request.param]}{tmp_path / 'run'}"


def objects(url: str) -> list[str]:
    """Names of all objects below, without the tokens of saves."""
    store, key = fsspec.core.url_to_fs(url, use_listings_cache=False)
    found = [one.removeprefix(key).lstrip("/").split("/") for one in store.find(key)]
    return sorted("/".join([place.split(".")[0], *rest]) for place, *rest in found)


FILES = (".metadata", "__0_0.distcp", "manifest.json")


def complete(*steps: int) -> list[str]:
    return [f"step-{step:06d}/{name}" for step in steps for name in FILES]


def test_saves_are_kept_replaced_restored_and_verified(url: str, capsys):
    state, other = (TrainingState(torch.nn.Linear(3, 2)) for _ in range(2))
    with CheckpointManager(url, keep=2) as manager:
        assert manager.restore(other) is None
        for step in (1, 2, 3, 3):
            torch.nn.init.normal_(state.model.weight)
            manager.save(step, state, info={"note": 7})
        draws = torch.rand(2)
    assert objects(url) == complete(2, 3)
    restored = CheckpointManager(url).restore(other)
    assert restored is not None and (restored.step, restored.info) == (3, {"note": 7})
    assert_equal(other.model.state_dict(), state.model.state_dict())
    assert torch.equal(torch.rand(2), draws)
    assert main(["verify", url, "--no-progress"]) == 0
    assert "2 files verified" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 1, only of \[2, 3\]"):
        CheckpointManager(url).restore(other, step=1)


def test_what_is_incomplete_is_no_checkpoint_and_goes_when_this_run_has_saved(url: str):
    """A job that only reads must not delete what a run may be writing."""
    state = TrainingState(torch.nn.Linear(3, 2))
    store, key = fsspec.core.url_to_fs(url)
    manager = saved(url, state, 1)
    store.makedirs(f"{key}/step-000002.ab", exist_ok=True)
    store.pipe(f"{key}/step-000002.ab/__0_0.distcp", b"half")
    reader = CheckpointManager(url)
    assert [one.step for one in reader.checkpoints()] == [1]
    assert objects(url) == [*complete(1), "step-000002/__0_0.distcp"]
    reader.save(3, state, blocking=True)
    assert objects(url) == complete(1, 3)
    with pytest.raises(CheckpointError, match="gained step-000003"):
        manager.save(4, state, blocking=True)
    assert objects(url) == complete(1, 3)


def test_a_damaged_one_is_set_aside(url: str):
    state = TrainingState(torch.nn.Linear(3, 2))
    manager = saved(url, state, 1, 2)
    store, key = fsspec.core.url_to_fs(str(manager.checkpoints()[1].path))
    data = bytearray(store.cat(f"{key}/__0_0.distcp"))
    data[len(data) // 2] ^= 4
    store.pipe(f"{key}/__0_0.distcp", bytes(data))
    with pytest.raises(DamagedCheckpointError, match="do not have the checksum"):
        CheckpointManager(url).restore(state)
    restored = CheckpointManager(url, keep=1).restore(state, fallback=True)
    assert restored is not None and restored.step == 1
    saved(url, state, 3, keep=1)
    damaged = [f"step-000002/{name}" for name in (*FILES[:2], "manifest.json.damaged")]
    assert objects(url) == [*damaged, *complete(3)]


def configured(rank: int, world_size: int, settings: dict[str, str], body: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(settings)
    return body(rank, world_size, *args)


def failed(rank: int, world_size: int, url: str) -> str:
    """A save in which rank 1 cannot write its data; then one that succeeds."""
    manager, state = CheckpointManager(url), TrainingState(torch.nn.Linear(3, 2))
    write_part = mock.Mock(side_effect=OSError("the store is gone")) if rank else saving.write_part
    with mock.patch.object(saving, "write_part", write_part), pytest.raises(CheckpointError, match="the store is gone"):
        manager.save(3, state, blocking=True)
    left = objects(url) if rank == 0 else []
    manager.save(3, state, blocking=True)
    return " ".join(left)


@pytest.mark.daily(store=["local"])
@pytest.mark.parametrize("store", ["local", "s3"])
def test_ranks_save_together_and_others_restore(store: str, tmp_path, request):
    settings = request.getfixturevalue("s3") if store == "s3" else {}
    url = f"local://{tmp_path}" if store == "local" else f"s3://bucket/{time.monotonic_ns()}"
    ((expected, _),) = run_ranks(2, configured, settings, save_trained, url, (2,), 2)[0]
    for seen in run_ranks(3, configured, settings, restore, url):
        assert_equal(seen, expected)
    left, _ = run_ranks(2, configured, settings, failed, url)
    both = sorted([*complete(2), "step-000002/__1_0.distcp"])
    assert left.split() == both
    assert objects(url) == both + [one.replace("000002", "000003") for one in both]


def test_a_file_url_is_a_directory(tmp_path):
    saved(f"file://{tmp_path}", TrainingState(torch.nn.Linear(3, 2)), 1)
    assert [one.name for one in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        pytest.param(
            "gs://bucket/run",
            "gs://bucket/run: .*gcsfs.*; install the package of fsspec for gs://",
            marks=pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed"),
        ),
        ("nothing://bucket", "nothing://bucket: Protocol not known: nothing; give a directory or the URL of an object"),
    ],
)
def test_a_store_that_cannot_be_opened(url: str, text: str):
    with pytest.raises(CheckpointError, match=text):
        CheckpointManager(url)
