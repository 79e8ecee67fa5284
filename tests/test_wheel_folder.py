"""A wheel's folder of compiled kernels: what is found in it, and what is refused and why."""

from __future__ import annotations

import json
import os
import shutil
import zipfile

import pytest
from stub_compiler import TOOLS, VERSION, artifact_of, spec, write_sources, write_wheel

from flashattn.jit import wheel as wheel_module
from flashattn.jit.artifact import SCHEMA, Artifact, dump_meta
from flashattn.jit.spec import source_digest
from flashattn.jit.wheel import MANIFEST, Miss, Wheel, verify_folder, write_manifest

SPECS = (spec(2), spec(3))


@pytest.fixture
def digest(tmp_path):
    return source_digest(write_sources(tmp_path / "kernels"))


@pytest.fixture
def folder(tmp_path, digest):
    return write_wheel(tmp_path / "_aot", SPECS)


@pytest.fixture
def find(tmp_path, digest):
    """What a fresh reader finds for `SPECS[0]`."""

    def find(version=VERSION, digest=digest, wanted=SPECS[0], target="sm_90"):
        return Wheel(tmp_path / "_aot", target, version).find(wanted.key, digest)

    return find


def change_manifest(folder, change) -> None:
    """Write the manifest anew after `change(manifest)`."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def entry_of(manifest, wanted=SPECS[0]) -> dict:
    return manifest["entries"][wanted.key]


def test_what_was_written_is_found(folder, find, digest):
    assert find() == artifact_of(SPECS[0], digest, TOOLS)
    assert find(wanted=SPECS[1]) == artifact_of(SPECS[1], digest, TOOLS)
    assert verify_folder(folder) == []


def test_the_manifest_says_what_the_wheel_holds(folder, digest):
    manifest = json.loads((folder / MANIFEST).read_text())
    artifact = artifact_of(SPECS[0], digest, TOOLS)
    entries = manifest.pop("entries")
    assert manifest == {
        "schema": SCHEMA,
        "version": VERSION,
        "source_digest": digest,
        "toolchain": TOOLS,
        "target": "sm_90",
        "profile": "core",
    }
    assert set(entries) == {each.key for each in SPECS}
    assert entries[SPECS[0].key]["code"] == f"{artifact.key}.cubin"
    assert entries[SPECS[0].key]["label"] == SPECS[0].label()


def test_the_same_wheel_gives_the_same_manifest_whatever_the_order(tmp_path, digest):
    artifacts = [artifact_of(each, digest) for each in SPECS]
    texts = []
    for number, ordered in enumerate((artifacts, artifacts[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_manifest(folder, ordered, version=VERSION, source_digest=digest, toolchain=TOOLS, profile="core")
        texts.append((folder / MANIFEST).read_bytes())
    assert texts[0] == texts[1]


def test_a_folder_holds_kernels_for_one_target(tmp_path, digest):
    mixed = [artifact_of(spec(target=target), digest) for target in ("sm_80", "sm_90")]
    with pytest.raises(ValueError, match="one target"):
        write_manifest(tmp_path, mixed, version=VERSION, source_digest=digest, toolchain=TOOLS, profile="core")


def test_an_amd_kernel_is_found(tmp_path, find, digest):
    wanted = spec(target="gfx942")
    folder = write_wheel(tmp_path / "_aot", [wanted])
    assert find(wanted=wanted, target="gfx942") == artifact_of(wanted, digest, TOOLS)
    assert any(path.suffix == ".hsaco" for path in folder.iterdir())


def test_what_compiled_the_wheel_does_not_matter(tmp_path, find):
    write_wheel(tmp_path / "_aot", SPECS, toolchain={"triton": "9.9", "env": {}})
    assert isinstance(find(), Artifact)


def test_the_version_does_not_matter_where_sources_can_be_compared(folder, find):
    assert isinstance(find(version="0.0.1"), Artifact)


@pytest.mark.parametrize("built", [VERSION, f"{VERSION}+rocm7"])
@pytest.mark.parametrize("version", [VERSION, f"{VERSION}+cu130"])
def test_without_readable_sources_a_wheel_of_the_same_version_is_believed(folder, find, version, built):
    change_manifest(folder, lambda manifest: manifest.update(version=built))
    assert isinstance(find(digest=None, version=version), Artifact)


def test_without_readable_sources_a_wheel_of_another_version_is_not_believed(folder, find):
    miss = find(digest=None, version="1.2.4")
    assert (miss.reason, miss.listed, miss.of_folder) == ("source", True, True)
    assert miss.text == "it was compiled by version 1.2.3, and the sources of 1.2.4 cannot be read"


def test_a_wheel_in_a_zip_is_read(tmp_path, folder, digest):
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as file:
        for path in folder.iterdir():
            file.write(path, f"app/_aot/sm_90/{path.name}")
    inside = zipfile.Path(tmp_path / "app.zip", "app/_aot/")
    assert isinstance(Wheel(inside, "sm_90", VERSION).find(SPECS[0].key, None), Artifact)
    assert Wheel(inside, "sm_80", VERSION).find(SPECS[0].key, None).reason == "not built"


# ---- Each reason


def test_no_folder_at_all(find):
    assert find() == Miss("not built", "it holds no kernels at all", of_folder=True)


def test_no_folder_for_this_target(folder, find):
    miss = find(target="sm_89")
    assert miss == Miss("not built", "it holds kernels for sm_90 and none for sm_89", of_folder=True)


def test_a_kernel_that_is_not_listed(folder, find):
    assert find(wanted=spec(4)) == Miss("not declared", "its MANIFEST.json for sm_90 does not list it")


def test_other_sources(folder, find, digest):
    miss = find(digest="0" * 64)
    assert (miss.reason, miss.listed, miss.of_folder) == ("source", True, True)
    assert miss.text == f"it was compiled from other sources of the kernels ({digest[:12]}, here they are 000000000000)"


def test_a_folder_under_the_name_of_another_target(folder, find):
    """Whatever is compatible with what: an sm_89 never takes an sm_80 entry."""
    folder.rename(folder.with_name("sm_80"))
    miss = find(wanted=spec(2, "sm_80"), target="sm_80")
    assert (miss.reason, miss.of_folder) == ("arch", True)
    assert miss.text == "its folder sm_80 holds kernels for sm_90, and a target is matched exactly"


def test_an_entry_for_another_target(tmp_path, find):
    write_wheel(tmp_path / "_aot", SPECS, target="sm_80").rename(tmp_path / "_aot" / "sm_90")
    change_manifest(tmp_path / "_aot" / "sm_90", lambda manifest: manifest.update(target="sm_90"))
    miss = find()
    assert (miss.reason, miss.listed) == ("arch", True)
    assert miss.text == "its machine code is for sm_80, and a target is matched exactly"


def test_an_entry_from_other_sources_than_its_folder(folder, find):
    change_manifest(folder, lambda manifest: manifest.update(source_digest="0" * 64))
    miss = find(digest="0" * 64)
    assert miss.reason == "source"
    assert miss.text == "it was compiled from other sources of the kernels than the rest of its folder"


def test_an_entry_compiled_with_a_variable_that_changes_code(tmp_path, find):
    write_wheel(tmp_path / "_aot", SPECS, toolchain={"triton": "3.6.0", "env": {"DISABLE_LLVM_OPT": "1"}})
    text = "it was compiled with DISABLE_LLVM_OPT set, which changes code"
    assert find() == Miss("environment taint", text, listed=True)


def test_a_manifest_of_another_schema(folder, find):
    change_manifest(folder, lambda manifest: manifest.update(schema=2))
    assert find() == Miss("schema", "its MANIFEST.json has schema 2, this version reads 1", of_folder=True)


def test_an_entry_of_another_schema(folder, find):
    path = folder / f"{entry_of(json.loads((folder / MANIFEST).read_text()))['artifact_key']}.json"
    path.write_bytes(dump_meta({**json.loads(path.read_text()), "schema": 2}))
    assert find() == Miss("schema", "it has schema 2, this version reads 1", listed=True)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}", b'{"schema": 1}', b"[" * 100000])
def test_a_manifest_that_is_no_manifest(folder, find, content):
    (folder / MANIFEST).write_bytes(content)
    miss = find()
    assert (miss.reason, miss.of_folder) == ("corrupt", True)
    assert miss.text.startswith("its MANIFEST.json cannot be understood (")


@pytest.mark.parametrize("name", ["version", "source_digest", "target", "profile"])
def test_a_manifest_with_fields_of_the_wrong_type(folder, find, name):
    change_manifest(folder, lambda manifest: manifest.update({name: 5}))
    assert find() == Miss("corrupt", "its MANIFEST.json has fields of the wrong type", of_folder=True)


def test_a_folder_without_a_manifest(folder, find):
    (folder / MANIFEST).unlink()
    assert find() == Miss("corrupt", "its file MANIFEST.json is missing", of_folder=True)


@pytest.mark.parametrize("suffix", ["cubin", "json"])
def test_a_file_that_is_missing(folder, find, digest, suffix):
    key = artifact_of(SPECS[0], digest, TOOLS).key
    (folder / f"{key}.{suffix}").unlink()
    assert find() == Miss("corrupt", f"its file {key[:12]}...{suffix} is missing", listed=True)


@pytest.mark.parametrize("name", [MANIFEST, "cubin", "json"])
def test_a_file_that_cannot_be_read(folder, find, digest, name):
    key = artifact_of(SPECS[0], digest, TOOLS).key
    path = folder / (name if name == MANIFEST else f"{key}.{name}")
    path.unlink()
    path.mkdir()
    miss = find()
    assert (miss.reason, miss.of_folder) == ("unreadable", name == MANIFEST)
    assert miss.text.endswith(f"cannot be read ({os.strerror(21)})")


@pytest.mark.parametrize("field", ["code", "artifact_key"])
@pytest.mark.parametrize("name", ["../{key}.cubin", "/etc/passwd", "{key}.so", "{key}0", "x.cubin", None, 5, ["a"], ""])
def test_a_manifest_cannot_name_a_file_that_is_no_kernel(folder, find, digest, name, field):
    key = artifact_of(SPECS[0], digest, TOOLS).key
    shutil.copytree(folder, folder.parent, dirs_exist_ok=True)
    name = name.format(key=key) if isinstance(name, str) else name
    change_manifest(folder, lambda manifest: entry_of(manifest).update({field: name}))
    miss = find()
    assert (miss.reason, miss.listed) == ("corrupt", True)
    assert "is not a kernel's name" in miss.text
    assert any("is not a kernel's name" in problem for problem in verify_folder(folder))


def test_an_entry_that_is_listed_under_the_key_of_another_kernel(folder, find):
    def swap(manifest):
        first, second = (entry_of(manifest, each) for each in SPECS)
        manifest["entries"] = {SPECS[0].key: second, SPECS[1].key: first}

    change_manifest(folder, swap)
    miss = find()
    assert (miss.reason, miss.listed) == ("corrupt", True)
    assert miss.text == f"MANIFEST.json lists {SPECS[1].label()} under the key of another kernel"


def test_the_code_of_one_kernel_with_the_description_of_another(folder, find, digest):
    first, second = (artifact_of(each, digest, TOOLS).key for each in SPECS)
    shutil.copy(folder / f"{second}.json", folder / f"{first}.json")
    assert find().reason == "corrupt"
    shutil.copy(folder / f"{second}.cubin", folder / f"{first}.cubin")
    assert find().reason == "corrupt"


@pytest.mark.parametrize("field", ["code_sha256", "code_bytes", "meta_sha256"])
def test_a_digest_that_is_not_that_of_the_file(folder, find, field):
    change_manifest(folder, lambda manifest: entry_of(manifest).update({field: "0" * 64}))
    assert find().reason == "corrupt"


@pytest.mark.parametrize("suffix", ["cubin", "json"])
def test_no_flipped_bit_of_a_kernel_goes_unnoticed(folder, find, digest, suffix):
    path = folder / f"{artifact_of(SPECS[0], digest, TOOLS).key}.{suffix}"
    sound = path.read_bytes()
    for position in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert find().reason in ("corrupt", "schema")
        assert len(verify_folder(folder)) == 1


def test_a_flipped_bit_of_the_manifest_gives_the_right_kernel_or_none(folder, find, digest):
    sound, right = (folder / MANIFEST).read_bytes(), artifact_of(SPECS[0], digest, TOOLS)
    found = []
    for position in range(0, len(sound), 3):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 7
        (folder / MANIFEST).write_bytes(damaged)
        found.append(find())
        assert found[-1] == right or isinstance(found[-1], Miss)
    assert any(isinstance(each, Miss) for each in found)


# ---- verify_folder


def test_verify_names_each_problem(folder, digest):
    first, second = (artifact_of(each, digest, TOOLS).key for each in SPECS)
    (folder / f"{first}.cubin").write_bytes(b"")
    (folder / f"{second}.json").unlink()
    (folder / "stray.cubin").write_bytes(b"")
    problems = verify_folder(folder)
    assert sorted(problems) == sorted(
        [
            f"{SPECS[0].label()}: corrupt: {first[:12]}...cubin does not have the size and digest in MANIFEST.json",
            f"{SPECS[1].label()}: corrupt: its file {second[:12]}...json is missing",
            "MANIFEST.json does not name the file stray.cubin",
        ]
    )


def test_verify_says_why_a_whole_folder_is_refused(folder):
    (folder / MANIFEST).write_text("{")
    assert verify_folder(folder) == ["corrupt: its MANIFEST.json cannot be understood (JSONDecodeError)"]
    assert verify_folder(folder.parent / "sm_80")[0].startswith("not built: ")


def test_the_manifest_is_read_once(folder, tmp_path, digest, monkeypatch):
    reader = Wheel(tmp_path / "_aot", "sm_90", VERSION)
    reader.find(SPECS[0].key, digest)
    read = []
    monkeypatch.setattr(wheel_module.json, "loads", read.append)
    assert reader.find(spec(4).key, digest).reason == "not declared"
    assert read == []
