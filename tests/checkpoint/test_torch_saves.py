"""torch's own ways to save tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tables import contents, make, train


def test_a_pickle_says_what_to_do_instead(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"rec_sdk_torch\.Saver\(\)\.save.*state_dict\(\)"):
        torch.save(torch.nn.Sequential(make()), tmp_path / "model.pt")


def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    """Of index and hash tables; its load fills the tensors it is given, so hash tables come with their own sizes."""
    source, target = make(), make()
    train(source, range(5))
    dcp.save(source.state_dict(), checkpoint_id=tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    sizes = reader.read_metadata().state_dict_metadata
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in sizes.items()}
    dcp.load(state, storage_reader=reader)
    target.load_state_dict(state)
    for name in "abcd":
        ids = source.view(name).ids()
        assert torch.equal(target.view(name).ids(), ids)
        assert torch.equal(target.view(name).read(ids).parts["weight"], source.view(name).read(ids).parts["weight"])
    assert contents(target).keys() == contents(source).keys()
