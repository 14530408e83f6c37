"""`forebay weights`: what is stored, whether it is whole, and any version as a checkpoint folder."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest

from forebay.buffer.weight_merger import Merger
from forebay.buffer.weight_place import place_at, url_of
from forebay.buffer.weight_store import WeightStore
from forebay.cli.main import main
from forebay.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from forebay.wire.host_state import HostState, TensorSpec
from forebay.wire.version import Version
from forebay.wire.weights import Encoded, encode_anchor, encode_delta
from tests.buffer.support import UnsyncedDisk
from tests.core.run_files import write
from tests.wire.making import copy_of

SPECS = [
    TensorSpec(name="embed", dtype="BF16", shape=(3000, 20)),
    TensorSpec(name="empty", dtype="BF16", shape=(0,)),
    TensorSpec(name="norm", dtype="F32", shape=(20,)),
]
STEPS = 5


def history() -> tuple[list[HostState], list[Encoded]]:
    """Versions 1.0, an anchor, to 1.5."""
    rng = np.random.default_rng(0)
    states = [HostState.allocate(SPECS)]
    for spec in SPECS:
        bits = states[0].open_for_update(spec.name)
        bits[:] = rng.integers(0, 256, bits.nbytes, np.uint8).view(bits.dtype)
    encoded = [encode_anchor(states[0], version=Version(1, 0))]
    for step in range(1, STEPS + 1):
        states.append(copy_of(states[-1]))
        states[-1].open_for_update("embed")[rng.choice(60_000, 400, replace=False)] += 1
        version, base = Version(1, step), Version(1, step - 1)
        encoded.append(encode_delta(states[-2], states[-1], version=version, base_version=base))
    return states, encoded


def fill(url: str, folder: Path, encoded: list[Encoded]) -> WeightStore:
    """A store with all of these versions, and shortcuts over two."""
    store = WeightStore(folder, place=place_at(url, folder, UnsyncedDisk()), disk=UnsyncedDisk())
    for one in encoded:
        for digest, data in one.chunks.items():
            store.put_chunk(digest, data)
        store.put_manifest(one.manifest)
    assert len(Merger(store, (2,), lambda: False).work(Version(1, len(encoded) - 1))) == 2
    return store


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has published, with its model beside it."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "torch_dtype": "float32"}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"the first weights")
    (model / "model.safetensors.index.json").write_text("{}")
    fill("", tmp_path / "runs" / "small" / "buffer" / "weights", history()[1])
    return write(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output, complaints."""
    code = main(["weights", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_ls_shows_every_way_to_every_version(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "ls", str(run_file), "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == EXIT_DONE
    assert [(row["version"], row["kind"], row["base"]) for row in rows] == [
        ("1.0", "anchor", ""),
        ("1.1", "delta", "1.0"),
        ("1.2", "delta", "1.1"),
        ("1.2", "merged", "1.0"),
        ("1.3", "delta", "1.2"),
        ("1.4", "delta", "1.3"),
        ("1.4", "merged", "1.2"),
        ("1.5", "delta", "1.4"),
    ]
    manifest = history()[1][1].manifest
    assert rows[1]["bytes"] == manifest.payload_bytes
    assert rows[1]["changed_share"] == pytest.approx(400 / 60_020)
    assert rows[1]["digest"] == manifest.digest.hex()
    code, out, _ = said(capsys, "ls", str(run_file.parent / "runs" / "small" / "buffer" / "weights"))
    assert code == EXIT_DONE
    assert out.splitlines()[0].split() == ["version", "kind", "base", "bytes", "smaller", "changed", "codec", "digest"]
    assert len(out.splitlines()) == len(rows) + 1
    assert "0.67 %" in out


def test_verify_proves_every_version(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "verify", str(run_file))
    assert code == EXIT_DONE
    assert [line.partition(":")[0] for line in out.splitlines()[:-1]] == [
        *("1.0", "1.1", "1.2", "1.3", "1.4", "1.5"),
        *("1.2 from 1.0", "1.4 from 1.2"),
    ]
    assert all(line.endswith(": proved") for line in out.splitlines()[:-1])
    assert out.splitlines()[-1].endswith(": whole")


def test_verify_names_what_is_damaged(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_file.parent / "runs" / "small" / "buffer" / "weights"
    chunk = folder / "chunks" / history()[1][3].manifest.chunks[0].digest.hex()
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    code, out, _ = said(capsys, "verify", str(run_file))
    assert code == EXIT_FAILED
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert "damaged" in lines["1.3"]
    assert "no anchor leads to the weights" in lines["1.4"], "its base cannot be made any more"
    proved = [name for name, told in lines.items() if told == "proved"]
    assert proved == ["1.0", "1.1", "1.2", "1.5", "1.2 from 1.0", "1.4 from 1.2"], "the shortcut leads around 1.3"
    assert f"chunks/{chunk.name}: {len(data)} bytes whose blake3 is" in out
    assert out.splitlines()[-1].endswith(": DAMAGED, 3 found")


def test_verify_finds_a_delta_to_other_weights(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_file.parent / "runs" / "small" / "buffer" / "weights"
    shortcut = folder / "manifests" / "1.4-1.2.manifest"
    manifest = type(history()[1][0].manifest).FromString(shortcut.read_bytes())
    manifest.digest = bytes(32)
    shortcut.write_bytes(manifest.SerializeToString())
    code, out, _ = said(capsys, "verify", str(folder))
    assert code == EXIT_FAILED
    assert "1.4 from 1.2: update to 1.4 failed: the state's digest is not the manifest's" in out
    assert "1.5: proved" in out


def test_export_is_an_ordinary_checkpoint(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "export", "1.3", str(run_file))
    folder = tmp_path / "small-1.3"
    assert code == EXIT_DONE
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert HostState.from_safetensors(folder).digest() == history()[0][3].digest()
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    assert str(folder.name) in out
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed", "empty", "norm"]
        ours = file.get_tensor("embed").view(dtype=__import__("torch").uint16).numpy()
    assert ours.tobytes() == history()[0][3].view_of("embed").tobytes()
    code, _, err = said(capsys, "export", "1.3", str(run_file))
    assert (code, err.count("\n")) == (EXIT_USAGE, 1)
    assert "small-1.3: exists already" in err


def test_a_url_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, encoded = history()
    url = f"memory://{uuid.uuid4().hex}/weights"
    fill(url, tmp_path / "unused", encoded)
    assert said(capsys, "verify", url)[0] == EXIT_DONE
    code, out, _ = said(capsys, "export", "1.5", url, "--into", str(tmp_path / "new" / "out"))
    assert code == EXIT_DONE
    assert "without configuration and tokenizer" in out
    assert HostState.from_safetensors(tmp_path / "new" / "out").digest() == states[5].digest()


def test_an_adapter_is_exported_only_with_its_run(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded, url = history()[1], f"memory://{uuid.uuid4().hex}/weights"
    for one in encoded:
        one.manifest.model_digest = bytes(range(32))
    store = fill(url, tmp_path / "unused", encoded)
    assert {one.model_digest for one in store.edges([Version(1, step) for step in range(STEPS + 1)])} == {
        bytes(range(32))
    }, "shortcuts say it, too"
    code, _, err = said(capsys, "export", "1.2", url, "--into", str(tmp_path / "out"))
    assert (code, err.count("\n")) == (EXIT_USAGE, 1)
    assert "version 1.2 is an adapter" in err


def test_a_run_file_names_the_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = f"memory://{uuid.uuid4().hex}/weights"
    fill(url_of(shared, "small"), tmp_path / "unused", history()[1])
    code, out, _ = said(capsys, "verify", str(write(tmp_path, f'[publish]\nstore = "{shared}"\n')))
    assert code == EXIT_DONE
    assert out.splitlines()[-1].startswith(f"{shared}/small: 6 versions, ")


def test_runs_share_a_store_without_meeting() -> None:
    assert url_of("", "run") == ""
    assert url_of("/mnt/weights/", "run") == "/mnt/weights/run"
    assert url_of("s3://bucket/prefix?region=eu-west-1", "run") == "s3://bucket/prefix/run?region=eu-west-1"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["ls", "{empty}"], "no run folder"),
        (["ls", "nowhere.toml"], "nowhere.toml"),
        (["ls", "memory://nothing/at-all"], "no weights here"),
        (["verify", "memory://nothing/at-all"], "no weights here"),
        (["export", "seven", "{run}"], "expected INCARNATION.STEP"),
        (["export", "1.9", "{run}"], "version 1.9 is not in"),
        (["export", "1.2"], "RUN"),
    ],
)
def test_mistakes_are_told_in_a_line(
    run_file: Path, tmp_path: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = said(capsys, *(word.format(empty=tmp_path / "empty", run=run_file) for word in words))
    assert (code, err.count("\n")) == (EXIT_USAGE, 1)
    assert complaint in err
