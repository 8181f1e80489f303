"""Data: every source gives the same arrays, damage is detected, batches are pure functions."""

import errno
import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest
import torch
from scipy.io import savemat

from steradian.lab.data import DataSet, Images, Resident, load, pack
from steradian.lab.data.sources import CHECKSUMS

RANDOM = np.random.default_rng(0)


def images(count, size=32, channels=3, classes=10):
    return Images(
        RANDOM.integers(0, 256, (count, size, size, channels), dtype=np.uint8), RANDOM.integers(0, classes, count)
    )


def data(name="cifar10", train=12, test=5, **kind):
    names = [f"class {k}" for k in range(100 if name == "cifar100" else 10)]
    return DataSet(name, images(train, **kind), images(test, **kind), names)


def assert_same(one, other):
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(one, split).pixels, getattr(other, split).pixels)
        np.testing.assert_array_equal(getattr(one, split).labels, getattr(other, split).labels)
    assert list(one.classes) == list(other.classes)


@pytest.mark.parametrize("kind", [{"size": 32}, {"size": 8, "channels": 1}, {"size": 7, "train": 10_050}])
def test_packed_data_are_read_exactly(tmp_path, kind):
    before = data("mine", **kind)
    pack(before, tmp_path, effort=0)
    assert_same(load("mine", tmp_path), before)


def test_packing_replaces_packed_data(tmp_path):
    pack(data("mine", size=4), tmp_path, effort=0)
    other = data("mine", size=4)
    pack(other, str(tmp_path), effort=0)
    assert_same(load("mine", tmp_path), other)


def test_damage_in_packed_data_is_detected(tmp_path):
    pack(data(), tmp_path, effort=0)
    with pytest.raises(ValueError, match="holds cifar10, not svhn"):
        load("svhn", tmp_path)
    labels = tmp_path / "test-labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x07")
    with pytest.raises(ValueError, match=r"test-labels\.npy is damaged"):
        load("cifar10", tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(ValueError, match=r"meta\.json does not describe packed data: it has no 'splits'"):
        load("cifar10", tmp_path)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def cifar_archive(path, name, protocol):
    """An archive as the authors made theirs: pickled dictionaries of bytes with one row per image."""
    made = data(name, train=10, test=4)

    def rows(split):
        return split.pixels.transpose(0, 3, 1, 2).reshape(len(split), -1)

    if name == "cifar10":
        folder, label = "cifar-10-batches-py", b"labels"
        parts = [Images(made.train.pixels[k : k + 2], made.train.labels[k : k + 2]) for k in range(0, 10, 2)]
        files = {f"data_batch_{k}": part for k, part in enumerate(parts, start=1)} | {"test_batch": made.test}
        names = {"batches.meta": {b"label_names": [c.encode() for c in made.classes]}}
    else:
        folder, label = "cifar-100-python", b"fine_labels"
        files = {"train": made.train, "test": made.test}
        names = {"meta": {b"fine_label_names": [c.encode() for c in made.classes]}}
    contents = {f: {b"data": rows(s), label: s.labels.tolist()} for f, s in files.items()} | names
    with tarfile.open(path, "w:gz") as archive:
        for file, content in contents.items():
            packed = pickle.dumps(content, protocol=protocol)
            info = tarfile.TarInfo(f"{folder}/{file}")
            info.size = len(packed)
            archive.addfile(info, io.BytesIO(packed))
    return made


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_original_archives_are_read(tmp_path, monkeypatch, name, protocol):
    path = tmp_path / f"cifar-{name[5:]}-python.tar.gz"
    made = cifar_archive(path, name, protocol)
    with pytest.raises(ValueError, match="is damaged or not the original"):
        load(name, tmp_path)
    monkeypatch.setitem(CHECKSUMS, name, {path.name: md5(path)})
    assert_same(load(name, tmp_path), made)


def test_svhn_is_read(tmp_path, monkeypatch):
    made = data("svhn")
    sums = {}
    for split, file in (("train", "train_32x32.mat"), ("test", "test_32x32.mat")):
        part = getattr(made, split)
        labels = np.where(part.labels == 0, 10, part.labels)[:, None]
        savemat(tmp_path / file, {"X": part.pixels.transpose(1, 2, 3, 0), "y": labels})
        sums[file] = md5(tmp_path / file)
    monkeypatch.setitem(CHECKSUMS, "svhn", sums)
    read = load("svhn", tmp_path)
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(read, split).pixels, getattr(made, split).pixels)
        np.testing.assert_array_equal(getattr(read, split).labels, getattr(made, split).labels)


def test_a_known_name_is_refused_for_other_data(tmp_path):
    pack(data("svhn", size=6), tmp_path, effort=0)
    with pytest.raises(ValueError, match=r"svhn has 10 classes of 32 × 32 pixels, and .* has other data"):
        load("svhn", tmp_path)


def test_augmentation_follows_the_name_given_to_packed_data(tmp_path):
    """Digits under another name are augmented by that name, packed or not, and keep it."""
    digits = data("digits", size=8, channels=1)
    pack(digits, tmp_path, effort=0)
    named, known = load("mine", tmp_path), load("digits", tmp_path)
    assert (named.name, known.name) == ("mine", "digits")
    assert named.fingerprint() == known.fingerprint()
    assert (Resident(named).flip, Resident(known).flip) == (True, False)


def test_wrong_images_and_labels_are_refused():
    with pytest.raises(ValueError, match=r"labels must be a whole number for each .* got float64"):
        Images(images(2).pixels, np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"pixels must be uint8 .* \(2, 0, 0, 1\)"):
        Images(np.zeros((2, 0, 0, 1), dtype=np.uint8), np.array([0, 1]))


def test_too_few_images_are_refused():
    with pytest.raises(ValueError, match="2 training images"):
        Resident(data(train=1))
    assert Resident(data(train=2), validation=0.9).counts["train"] == 1


def test_data_that_is_not_there_raises(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="data/cifar10 has neither meta"):
        load("cifar10")
    with pytest.raises(ValueError, match="data must be one of digits, cifar10"):
        load("flowers")
    with pytest.raises(ValueError, match="root must be a folder"):
        load("cifar10", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="neither meta"):
        load("cifar10", tmp_path)


def test_batches_are_crops_and_mirror_images():
    """Against cutting and flipping the padded image by hand."""
    resident = Resident(data(train=40, size=8), validation=0.25)
    assert resident.counts == {"train": 30, "validation": 10, "test": 5}
    assert resident.views == 9 * 9 * 2
    plan = resident.plan(seed=3, epoch=1, batch=15)
    assert sorted(plan.reshape(-1) // resident.views) == list(range(30))
    for codes in plan:
        batch, labels = resident.batch(torch.from_numpy(codes))
        assert batch.is_contiguous(memory_format=torch.channels_last)
        for k, code in enumerate(codes.tolist()):
            image, view = divmod(code, resident.views)
            place, mirrored = divmod(view, 2)
            down, right = divmod(place, 9)
            padded = resident.train_pixels[image].view(16, 16, 3)
            cut = padded[down : down + 8, right : right + 8]
            cut = cut.flip(1) if mirrored else cut
            normalized = (cut.float() - resident.mean) * resident.scale
            torch.testing.assert_close(batch[k], normalized.permute(2, 0, 1))
            assert labels[k] == resident.train_labels[image]


def test_training_pixels_are_centred_and_of_unit_spread():
    made = data(train=200, size=4)
    resident = Resident(made, validation=0.1)
    centre = resident.views // 2  # neither shifted nor flipped
    codes = torch.arange(resident.counts["train"]) * resident.views + centre - centre % 2
    batch, _ = resident.batch(codes)
    torch.testing.assert_close(batch.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_chunks_cover_each_part_once():
    made = data(train=16, test=7, size=4)
    resident = Resident(made, validation=0.25)
    seen = {}
    for part, (start, end) in resident.spans.items():
        seen[part] = []
        for at in range(start, end, 3):
            pixels, labels, there = resident.chunk(torch.tensor([at]), torch.tensor([end]), 3)
            assert pixels.shape == (3, 3, 4, 4)
            seen[part] += labels[there].tolist()
    assert seen["test"] == made.test.labels.tolist()
    assert sorted(seen["validation"] + resident.train_labels.tolist()) == sorted(made.train.labels.tolist())


def test_plans_depend_on_seed_and_epoch_alone():
    one, other = (Resident(data(train=100, size=4)) for _ in range(2))
    np.testing.assert_array_equal(one.plan(1, 2, 10) // one.views, other.plan(1, 2, 10) // one.views)
    different = {one.plan(s, e, 10).tobytes() for s in range(4) for e in range(4)}
    assert len(different) == 16


def test_a_full_disk_raises_with_the_file_and_leaves_no_parts(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*train-0\.webp'"):
        pack(data("mine", size=4), tmp_path, effort=0)
    assert not list(tmp_path.iterdir())
