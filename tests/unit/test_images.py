"""Recipes, package sources and progress: everything of an image build that is arithmetic."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.core.errors import OperatorError
from cloche.sandbox.images import sources as host_sources
from cloche.sandbox.images.build import Meter, Progress
from cloche.sandbox.images.folders import is_whole
from cloche.sandbox.images.recipe import Recipe, find_recipe
from cloche.sandbox.images.sources import AptEntry, debian_sources

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "packages.txt").write_text("bash\n")
    (tmp_path / "provision.sh").write_text('step 3 "One"\n  step 4 "Two"\n')
    (tmp_path / "build.sh").write_text('step() { true; }\nstep 10 "Zero"\n')
    (tmp_path / "requirements/user.in").write_text("numpy\n")
    (tmp_path / "requirements/user.txt").write_text("numpy==2.0\n")
    return Recipe(folder=tmp_path)


def test_the_checkout_has_a_recipe() -> None:
    assert (find_recipe().folder / "packages.txt").is_file()


@pytest.mark.parametrize("name", ["packages.txt", "provision.sh", "requirements/user.txt"])
def test_another_content_is_another_image(recipe: Recipe, name: str) -> None:
    before = recipe.digest()

    (recipe.folder / name).write_text("changed\n")

    assert recipe.digest() != before


def test_another_name_is_another_image(recipe: Recipe) -> None:
    before = recipe.digest()

    (recipe.folder / "packages.txt").rename(recipe.folder / "packages2.txt")

    assert recipe.digest() != before


def test_what_locks_are_made_from_is_not_in_the_image(recipe: Recipe) -> None:
    before = recipe.digest()

    (recipe.folder / "requirements/user.in").write_text("changed\n")
    (recipe.folder / "README.md").write_text("new\n")
    (recipe.folder / "lock.sh").write_text("new\n")

    assert recipe.digest() == before


def test_suite_and_architecture_are_part_of_the_digest(recipe: Recipe) -> None:
    others = [
        Recipe(folder=recipe.folder, suite="forky"),
        Recipe(folder=recipe.folder, architecture="riscv64"),
    ]

    assert len({recipe.digest(), *(other.digest() for other in others)}) == 3


def test_a_moved_recipe_is_the_same_image(recipe: Recipe) -> None:
    before = recipe.digest()

    moved = recipe.folder.rename(recipe.folder.with_name("moved"))

    assert Recipe(folder=moved).digest() == before


def test_the_recipe_knows_how_long_it_takes(recipe: Recipe) -> None:
    assert recipe.seconds() == 17


def test_no_lock_names_a_registry() -> None:
    locks = [path for path in find_recipe().files() if path.suffix in {".txt", ".json"}]

    naming = [path.name for path in locks if "://" in path.read_text("utf-8")]

    assert len(locks) >= 6
    assert naming == []


@given(
    steps=st.lists(st.tuples(st.integers(0, 90), st.floats(0, 300)), max_size=12),
    total_s=st.integers(0, 200),
)
def test_progress_never_falls_and_ends_below_one(
    steps: list[tuple[int, float]], total_s: int
) -> None:
    seen: list[Progress] = []
    meter = Meter(total_s, seen.append)
    now = 1000.0

    for weight, took_s in steps:
        meter.read(f"::step {weight} Something", now)
        for _ in range(3):
            now += took_s / 3
            meter.tick(now)
        meter.read("an ordinary line", now)

    fractions = [progress.fraction for progress in seen]
    assert all(0 <= fraction < 1 for fraction in fractions)
    assert all(a <= b for a, b in itertools.pairwise(fractions))


def test_a_step_that_takes_as_long_as_it_said_gets_most_of_its_share() -> None:
    seen: list[Progress] = []
    meter = Meter(100, seen.append)

    meter.read("::step 60 Installing Debian packages", 0.0)
    meter.tick(60.0)
    meter.read("::step 40 Installing JupyterLab", 60.0)

    assert [progress.step for progress in seen][-1] == "Installing JupyterLab"
    assert 0.4 < seen[1].fraction < 0.6
    assert seen[2].fraction == pytest.approx(0.6)


def test_mirrors_are_read_from_deb822(tmp_path: Path) -> None:
    _apt(
        tmp_path,
        "debian.sources",
        f"""
        Types: deb deb-src
        # http://snapshot.example/old
        URIs: http://mirror.example/debian
        Suites: bookworm
          bookworm-updates
        Components: main contrib
        Signed-By: {KEYRING}

        Types: deb
        URIs: http://mirror.example/debian-security
        Suites: bookworm-security
        Components: main
        Signed-By: {KEYRING}

        Enabled: no
        Types: deb
        URIs: http://off.example/debian
        Suites: bookworm
        Components: main
        """,
    )

    sources = debian_sources(host_sources.apt_entries(tmp_path), "trixie")

    assert sources == (
        f"deb [signed-by={KEYRING}] http://mirror.example/debian trixie main\n"
        f"deb [signed-by={KEYRING}] http://mirror.example/debian trixie-updates main\n"
        f"deb [signed-by={KEYRING}] http://mirror.example/debian-security trixie-security main\n"
    )


def test_mirrors_are_read_from_one_line_lists(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://off.example/debian bookworm main\n"
        "deb-src http://mirror.example/pool bookworm main\n"
        "deb [arch=amd64 trusted=yes] http://mirror.example/pool bookworm main # ours\n"
        "deb http://mirror.example/pool bookworm-updates main\n"
    )

    sources = debian_sources(host_sources.apt_entries(tmp_path), "trixie")

    assert sources == (
        "deb [trusted=yes] http://mirror.example/pool trixie main\n"
        "deb [trusted=yes] http://mirror.example/pool trixie-updates main\n"
    )


@pytest.mark.parametrize(
    "entry",
    [
        AptEntry(uri="http://a.example/ubuntu", suites=("noble",), components=("main",)),
        AptEntry(uri="http://a.example/linux", suites=("bookworm",), components=("stable",)),
        AptEntry(uri="http://a.example/apt", suites=("bookworm",), components=("main",)),
        AptEntry(uri="http://a.example/debian", suites=("bookworm-pgdg",), components=("main",)),
        AptEntry(uri="cdrom:[disc]/debian", suites=("bookworm",), components=("main",)),
    ],
    ids=["ubuntu", "other-component", "other-publisher", "other-suite", "cdrom"],
)
def test_what_is_not_debians_archive_is_left_alone(entry: AptEntry) -> None:
    assert debian_sources([entry], "trixie") is None


def test_only_apt_settings_about_reaching_a_mirror_are_taken() -> None:
    dump = (
        'Acquire::http::Proxy "http://proxy.example:3128";\n'
        'Acquire::https::Proxy::mirror.example "DIRECT";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::Languages "";\n'
        'APT::Default-Release "stable";\n'
        'DPkg::Post-Invoke:: "rm -rf /";\n'
    )

    assert host_sources.apt_options(dump).splitlines() == dump.splitlines()[:3]


def test_pip_settings_come_from_files_and_the_environment_wins(tmp_path: Path) -> None:
    path = tmp_path / "pip.conf"
    path.write_text(
        "[global]\nindex-url = https://file.example/simple\ntrusted-host = file.example\n"
        "[install]\ntarget = /somewhere\n[list]\nformat = json\n"
    )
    environ = {"PIP_INDEX_URL": "https://env.example/simple", "PIP_DEFAULT_TIMEOUT": "180"}

    settings = host_sources.pip_settings(environ, [path])
    result = host_sources.environment(environ, settings)

    assert result["PIP_INDEX_URL"] == "https://env.example/simple"
    assert result["PIP_TRUSTED_HOST"] == "file.example"
    assert result["PIP_TIMEOUT"] == "180"
    assert "PIP_TARGET" not in result


def test_wheel_folders_of_the_host_are_shown_under_another_name(tmp_path: Path) -> None:
    settings = {"find_links": f"{tmp_path} /not/there https://wheels.example/ ./relative"}

    folders, _ = host_sources.wheel_folders(settings)
    result = host_sources.environment({}, settings)

    assert folders == [tmp_path]
    assert result["PIP_FIND_LINKS"] == "https://wheels.example/ /run/build/wheels/0"


def test_a_build_gets_nothing_else_of_the_environment() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "x",
        "PYTHONPATH": "/x",
        "https_proxy": "http://proxy.example",
        "npm_config_registry": "https://npm.example",
        "npm_config_prefix": "/x",
    }

    result = host_sources.environment(environ, {})

    assert set(result) == {"PATH", "HOME", "LANG", "https_proxy", "npm_config_registry"}


def test_npm_keeps_registries_and_their_keys_alone() -> None:
    text = (
        "registry=https://npm.example/\n@team:registry = https://team.example/\n"
        "//npm.example/:_authToken=${TOKEN}\nprefix=/usr/local\ncafile=/etc/x\nnodedir=/usr\n"
    )

    lines = host_sources.npmrc([text], {"TOKEN": "secret"}).splitlines()

    assert lines == [
        "registry=https://npm.example/",
        "@team:registry = https://team.example/",
        "//npm.example/:_authToken=secret",
    ]


def test_a_sources_file_that_is_not_there_is_the_operators_to_mend(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="cannot be read") as caught:
        host_sources.describe(
            tmp_path / "host", suite="trixie", dump="", apt_sources=tmp_path / "none"
        )

    assert "CLOCHE_APT_SOURCES" in caught.value.remedy


def test_links_are_followed_inside_the_root_file_system(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3.13").write_text("x")
    (tmp_path / "usr/bin/python3").symlink_to("python3.13")
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "absolute").symlink_to("/usr/bin/python3")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "host").symlink_to("/etc/passwd")
    (tmp_path / "empty").touch()

    whole = {name for name in ("bin/python3", "absolute", "usr") if is_whole(tmp_path, name)}
    broken = {name for name in ("loop", "host", "empty", "none") if is_whole(tmp_path, name)}

    assert whole == {"bin/python3", "absolute", "usr"}
    assert broken == set()


def _apt(folder: Path, name: str, text: str) -> None:
    path = folder / "sources.list.d" / name
    path.parent.mkdir()
    lines = [line.removeprefix(" " * 8) for line in text.splitlines()]
    path.write_text("\n".join(lines))
