"""Code: a snippet in any of the languages, run as a program of its own."""

from __future__ import annotations

import pytest

from cloche.core.errors import BadRequest, CommandTimeout, PathRefused, UnknownLanguage
from cloche.sandbox.sandbox import LANGUAGES, Sandbox
from cloche.testing.transcript import Transcript, eventually

GREETINGS = {
    "python": "print('hello from', 'python')",
    "typescript": "const language: string = 'typescript'; console.log('hello from', language)",
    "javascript": "console.log('hello from', 'javascript')",
    "bash": 'language=bash; echo "hello from $language"',
}
FAILURES = {
    "python": "import sys; print('oh', file=sys.stderr); sys.exit(9)",
    "typescript": "console.error('oh'); process.exit(9)",
    "javascript": "console.error('oh'); process.exit(9)",
    "bash": "echo oh >&2; exit 9",
}
ECHOES = {
    "python": "import sys; sys.stdout.write(sys.stdin.read())",
    "typescript": "process.stdin.pipe(process.stdout)",
    "javascript": "process.stdin.pipe(process.stdout)",
    "bash": "cat",
}
BROKEN = {
    "python": "def (",
    "typescript": "const = ;",
    "javascript": "const = ;",
    "bash": "if",
}

ENUM = """
enum Colour { Red = 'red', Green = 'green' }
namespace Garden { export const colour: Colour = Colour.Green }
class Plant { constructor(public readonly name: string, private height = 3) {}
  get tall() { return this.height } }
console.log(Garden.colour, Colour.Red, new Plant('fern').name, new Plant('fern').tall)
"""
DECORATORS = """
function loud(_target: any, context: any) {
  return class extends (_target as any) { shout() { return super.shout().toUpperCase() } } as any
}
@loud
class Speaker { shout() { return 'decorated' } }
console.log(new Speaker().shout())
"""
PACKAGE = """
import { grow } from 'greenhouse'
import type { Plant } from 'greenhouse'
const fern: Plant = grow('fern')
console.log(fern.name, await Promise.resolve(fern.height))
"""


@pytest.mark.asyncio(loop_scope="session")
class TestCode:
    """`run_code`, in every language."""

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_code_runs_in_its_language(self, sandbox: Sandbox, language: str) -> None:
        result = await sandbox.run_code(language, GREETINGS[language])

        assert (result.stdout, result.exit_code) == (f"hello from {language}\n", 0), result.stderr

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_codes_exit_code_and_errors_come_back(
        self, sandbox: Sandbox, language: str
    ) -> None:
        result = await sandbox.run_code(language, FAILURES[language])

        assert (result.stderr, result.exit_code) == ("oh\n", 9)

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_code_that_does_not_parse_is_a_result_and_not_an_error(
        self, sandbox: Sandbox, language: str
    ) -> None:
        result = await sandbox.run_code(language, BROKEN[language])

        assert result.exit_code != 0
        assert "rror" in result.stderr, result.stderr

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_code_reads_its_input(self, sandbox: Sandbox, language: str) -> None:
        result = await sandbox.run_code(language, ECHOES[language], stdin="línea 🪴\n".encode())

        assert result.stdout == "línea 🪴\n", result.stderr

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_code_may_be_empty_or_hold_any_character(
        self, sandbox: Sandbox, language: str
    ) -> None:
        empty = await sandbox.run_code(language, "")
        quote = {"bash": "printf '%s'", "python": "print(", "javascript": "console.log("}
        said = f"{quote.get(language, 'console.log(')} '日本語 🪴 ñ'"
        text = await sandbox.run_code(language, said + ("" if language == "bash" else ")"))

        assert (empty.exit_code, empty.stdout) == (0, "")
        assert text.stdout.strip() == "日本語 🪴 ñ", text.stderr

    @pytest.mark.parametrize("language", LANGUAGES)
    async def test_the_script_is_gone_when_the_code_has_ended(
        self, sandbox: Sandbox, folder: str, language: str, time_scale: float
    ) -> None:
        await sandbox.run_code(language, GREETINGS[language], cwd=folder)

        async def gone() -> bool:
            return not (await sandbox.files.list(folder)).entries

        await eventually(gone, "an empty folder", timeout_s=5 * time_scale)

    async def test_the_script_is_gone_after_a_timeout_too(
        self, sandbox: Sandbox, folder: str, time_scale: float
    ) -> None:
        with pytest.raises(CommandTimeout):
            await sandbox.run_code("bash", "sleep 1000", cwd=folder, timeout_s=0.5)

        async def gone() -> bool:
            return not (await sandbox.files.list(folder)).entries

        await eventually(gone, "an empty folder", timeout_s=5 * time_scale)

    async def test_code_may_remove_its_own_script(self, sandbox: Sandbox, folder: str) -> None:
        result = await sandbox.run_code("bash", 'rm -- "$0"; echo fine', cwd=folder)

        assert result.stdout == "fine\n", result.stderr

    async def test_nothing_is_kept_from_one_run_to_the_next_but_files(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.run_code("python", "x = 1; open('kept', 'w').write('yes')", cwd=folder)

        result = await sandbox.run_code("python", "print(open('kept').read()); x", cwd=folder)

        assert result.stdout == "yes\n"
        assert "NameError" in result.stderr

    @pytest.mark.parametrize("language", ["", "cobol", "Python", "../bash", "python\0"])
    async def test_an_unknown_language_is_told_with_the_known_ones(
        self, sandbox: Sandbox, language: str
    ) -> None:
        with pytest.raises(UnknownLanguage) as caught:
            await sandbox.run_code(language, "x")

        assert "typescript" in caught.value.remedy

    async def test_typescript_has_enums_namespaces_and_parameter_properties(
        self, sandbox: Sandbox
    ) -> None:
        result = await sandbox.run_code("typescript", ENUM)

        assert result.stdout == "green red fern 3\n", result.stderr

    async def test_typescript_has_decorators(self, sandbox: Sandbox) -> None:
        result = await sandbox.run_code("typescript", DECORATORS)

        assert result.stdout == "DECORATED\n", result.stderr

    async def test_typescript_imports_a_package_from_node_modules(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        package = f"{folder}/node_modules/greenhouse"
        manifest = '{"name": "greenhouse", "version": "1.0.0", "main": "index.js"}'
        await sandbox.files.write(f"{package}/package.json", manifest)
        source = "exports.grow = (name) => ({ name, height: 3 })\n"
        await sandbox.files.write(f"{package}/index.js", source)
        types = "export interface Plant { name: string; height: number }\n"
        await sandbox.files.write(
            f"{package}/index.d.ts", types + "export function grow(name: string): Plant\n"
        )

        result = await sandbox.run_code("typescript", PACKAGE, cwd=folder)

        assert result.stdout == "fern 3\n", result.stderr

    async def test_code_imports_what_lies_beside_it(self, sandbox: Sandbox, folder: str) -> None:
        await sandbox.files.write(f"{folder}/seed.py", "NAME = 'fern'\n")
        await sandbox.files.write(f"{folder}/seed.ts", "export const NAME: string = 'fern'\n")

        python = await sandbox.run_code("python", "import seed; print(seed.NAME)", cwd=folder)
        typescript = await sandbox.run_code(
            "typescript", "import { NAME } from './seed'; console.log(NAME)", cwd=folder
        )

        assert python.stdout == "fern\n", python.stderr
        assert typescript.stdout == "fern\n", typescript.stderr

    async def test_python_has_the_packages_of_the_image(self, sandbox: Sandbox) -> None:
        result = await sandbox.run_code("python", "import numpy; print(numpy.arange(4).sum())")

        assert result.stdout == "6\n", result.stderr

    async def test_code_can_be_started_and_followed(self, sandbox: Sandbox) -> None:
        process = await sandbox.start_code("python", "print(input())", stdin=True)

        async with Transcript(process) as transcript:
            await process.write(b"later\n", close=True)
            assert (await transcript.ended()).code == 0, transcript.heard()
            assert bytes(transcript.stdout) == b"later\n"

    async def test_code_does_not_run_where_no_file_may_be_written(self, sandbox: Sandbox) -> None:
        with pytest.raises(PathRefused):
            await sandbox.run_code("python", "print(1)", cwd="/etc")

    async def test_half_a_character_in_code_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(BadRequest):
            await sandbox.run_code("python", "print('\ud83e')")
