"""Commands: what goes in, what comes out, and who runs them."""

from __future__ import annotations

import asyncio
import math
import signal
import time

import pytest

from cloche.core.errors import BadRequest, CommandNotStarted
from cloche.sandbox.sandbox import Sandbox

EVERY_BYTE = bytes(range(256))


@pytest.mark.asyncio(loop_scope="session")
class TestCommands:
    """`exec`, as a caller sees it."""

    async def test_a_command_answers_with_its_output_and_exit_code(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])

        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        assert result.exit.reason == "exit code 3"

    @pytest.mark.parametrize("code", [0, 1, 42, 127, 255])
    async def test_every_exit_code_comes_back_as_it_is(self, sandbox: Sandbox, code: int) -> None:
        result = await sandbox.exec(["sh", "-c", f"exit {code}"])

        assert (result.exit_code, result.exit.signal) == (code, None)

    @pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGKILL", "SIGSEGV", "SIGXFSZ"])
    async def test_a_signal_is_told_as_128_and_its_number(
        self, sandbox: Sandbox, name: str
    ) -> None:
        number = signal.Signals[name]

        result = await sandbox.exec(["sh", "-c", f"kill -{number} $$"])

        assert (result.exit_code, result.exit.signal) == (128 + number, number), result.exit
        assert result.exit.reason == f"killed by {name}"

    async def test_no_shell_stands_between_argv_and_the_program(self, sandbox: Sandbox) -> None:
        awkward = ["", " ", "a b", "$HOME", "*", "'\"\\", "a\nb", "-n", "--", "&& false"]

        result = await sandbox.exec(["printf", "%s\\0", *awkward])

        assert result.stdout.split("\0")[:-1] == awkward

    async def test_argv_and_environment_carry_any_unicode(self, sandbox: Sandbox) -> None:
        text = "naïve 日本語 🪴 \N{COMBINING ACUTE ACCENT} \u202e \x01\x7f"

        result = await sandbox.exec(
            ["sh", "-c", 'printf "%s|%s" "$1" "$GRÜN"; env | grep -c ^GRÜN=', "sh", text],
            env={"GRÜN": text},
        )

        assert result.stdout.startswith(f"{text}|"), result.stdout

    async def test_a_long_argument_arrives_whole(self, sandbox: Sandbox) -> None:
        # Linux bounds one argument at 128 KiB and all of them at a quarter of the stack.
        result = await sandbox.exec(["sh", "-c", 'printf %s "$1" | wc -c', "sh", "x" * 120_000])

        assert result.stdout.strip() == "120000", result.stderr

    async def test_arguments_too_long_for_the_kernel_are_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(CommandNotStarted):
            await sandbox.exec(["true", "x" * 200_000])

    async def test_a_request_larger_than_the_channel_takes_is_refused(
        self, sandbox: Sandbox
    ) -> None:
        with pytest.raises(BadRequest, match="most"):
            await sandbox.exec(["true", *["x" * 100_000] * 50])

    @pytest.mark.parametrize(
        ("argv", "env", "cwd"),
        [
            (["echo", "a\0b"], {}, "/workspace"),
            (["ec\0ho"], {}, "/workspace"),
            (["true"], {"A": "a\0b"}, "/workspace"),
            (["true"], {"A\0B": "x"}, "/workspace"),
            (["true"], {}, "/work\0space"),
        ],
    )
    async def test_a_nul_byte_is_refused_wherever_it_stands(
        self, sandbox: Sandbox, argv: list[str], env: dict[str, str], cwd: str
    ) -> None:
        with pytest.raises(BadRequest, match="NUL"):
            await sandbox.exec(argv, env=env, cwd=cwd)

    @pytest.mark.parametrize(
        ("argv", "env", "cwd"),
        [
            (["echo", "\ud83e"], {}, "/workspace"),
            (["echo", "a", "b\udc80"], {}, "/workspace"),
            (["true"], {"A": "\udc80"}, "/workspace"),
            (["true"], {"\ud83e": "x"}, "/workspace"),
            (["true"], {}, "/workspace/\udcff"),
        ],
    )
    async def test_half_a_character_is_refused_wherever_it_stands(
        self, sandbox: Sandbox, argv: list[str], env: dict[str, str], cwd: str
    ) -> None:
        with pytest.raises(BadRequest):
            await sandbox.exec(argv, env=env, cwd=cwd)

        assert await sandbox.processes() is not None, "the process list is unharmed"

    @pytest.mark.parametrize("argv", [[], [""], "echo hello"])
    async def test_an_argv_without_a_program_is_refused(
        self, sandbox: Sandbox, argv: list[str]
    ) -> None:
        with pytest.raises(BadRequest):
            await sandbox.exec(argv)

    @pytest.mark.parametrize("name", ["", "A=B", "="])
    async def test_a_variable_needs_a_proper_name(self, sandbox: Sandbox, name: str) -> None:
        with pytest.raises(BadRequest):
            await sandbox.exec(["true"], env={name: "x"})

    @pytest.mark.parametrize("timeout_s", [0, -1, -0.5, math.inf, math.nan])
    async def test_a_timeout_is_above_zero_and_finite(
        self, sandbox: Sandbox, timeout_s: float
    ) -> None:
        with pytest.raises(BadRequest, match="timeout_s"):
            await sandbox.exec(["true"], timeout_s=timeout_s)
        with pytest.raises(BadRequest, match="timeout_s"):
            await sandbox.start(["true"], timeout_s=timeout_s)

    async def test_a_timeout_of_a_century_is_fine(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["true"], timeout_s=3.2e9)

        assert result.exit_code == 0

    async def test_output_bounds_below_zero_are_refused_and_zero_allows_silence(
        self, sandbox: Sandbox
    ) -> None:
        with pytest.raises(BadRequest, match="max_output_bytes"):
            await sandbox.exec(["true"], max_output_bytes=-1)

        silent = await sandbox.exec(["true"], max_output_bytes=0)

        assert silent.exit_code == 0

    async def test_output_is_binary_safe(self, sandbox: Sandbox) -> None:
        code = "import sys; b = bytes(range(256)); sys.stdout.buffer.write(b); sys.stderr.buffer."

        result = await sandbox.exec(["python3", "-c", code + "write(b[::-1])"])

        assert result.stdout_bytes == EVERY_BYTE
        assert result.stderr_bytes == EVERY_BYTE[::-1]

    async def test_variables_are_added_to_the_usual_ones(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["env"], env={"COLOUR": "green", "LANG": "C", "EMPTY": ""})

        told = dict(line.split("=", 1) for line in result.stdout.splitlines())
        assert told["COLOUR"] == "green"
        assert told["LANG"] == "C", "the caller's value wins"
        assert told["EMPTY"] == ""
        assert told["HOME"] == "/home/user"
        assert told["USER"] == "user"
        assert "/usr/bin" in told["PATH"].split(":")

    async def test_the_environment_tells_nothing_of_the_host(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["env"])

        names = {line.partition("=")[0] for line in result.stdout.splitlines()}
        usual = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH"}
        assert names == usual, "only these are documented"

    async def test_a_command_runs_in_the_workspace_or_where_it_is_told(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        usual = await sandbox.exec(["pwd"])
        told = await sandbox.exec(["pwd"], cwd=folder)
        outside = await sandbox.exec(["pwd"], cwd="/usr/lib")

        assert (usual.stdout, told.stdout, outside.stdout) == (
            "/workspace\n",
            f"{folder}\n",
            "/usr/lib\n",
        )

    @pytest.mark.parametrize("cwd", ["/workspace/nowhere", "/etc/passwd", "/root"])
    async def test_a_folder_that_cannot_be_entered_is_told_as_such(
        self, sandbox: Sandbox, cwd: str
    ) -> None:
        with pytest.raises(CommandNotStarted, match="folder") as caught:
            await sandbox.exec(["true"], cwd=cwd)

        assert cwd in caught.value.message

    async def test_a_relative_folder_is_refused(self, sandbox: Sandbox) -> None:
        with pytest.raises(BadRequest, match="absolute"):
            await sandbox.exec(["true"], cwd="src")

    @pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "/etc/passwd"])
    async def test_a_program_that_is_missing_or_not_executable_is_told_as_such(
        self, sandbox: Sandbox, program: str
    ) -> None:
        with pytest.raises(CommandNotStarted) as caught:
            await sandbox.exec([program])

        assert program in caught.value.message

    async def test_a_script_without_a_known_interpreter_is_told_as_such(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/script", "#!/no/such/interpreter\n", mode=0o755)

        with pytest.raises(CommandNotStarted):
            await sandbox.exec([f"{folder}/script"])

    async def test_a_program_in_the_working_folder_runs(
        self, sandbox: Sandbox, folder: str
    ) -> None:
        await sandbox.files.write(f"{folder}/greet", "#!/bin/sh\necho hello\n", mode=0o755)

        result = await sandbox.exec(["./greet"], cwd=folder)

        assert result.stdout == "hello\n", result.stderr

    async def test_time_and_memory_are_accounted_for(self, sandbox: Sandbox) -> None:
        code = "import time; b = b'x' * (64 << 20); t = time.process_time()\nwhile time"

        result = await sandbox.exec(["python3", "-c", code + ".process_time() - t < 0.2: pass"])

        assert result.exit_code == 0, result.stderr
        assert result.exit.cpu_s >= 0.2, result.exit
        assert result.exit.duration_s >= 0.2, result.exit
        assert result.exit.max_rss_kib >= 64 << 10, result.exit

    async def test_many_commands_run_at_once_and_none_gets_anothers_output(
        self, sandbox: Sandbox, time_scale: float
    ) -> None:
        commands = [
            sandbox.exec(["sh", "-c", f"echo {n}; sleep 0.2; echo {n} >&2; exit {n}"])
            for n in range(20)
        ]
        began = time.monotonic()

        results = await asyncio.gather(*commands)

        for number, result in enumerate(results):
            told = (result.stdout, result.stderr, result.exit_code)
            assert told == (f"{number}\n", f"{number}\n", number)
        took_s = time.monotonic() - began
        assert took_s < 20 * 0.2 * time_scale, f"one after the other? {took_s:.1f} s"


@pytest.mark.asyncio(loop_scope="session")
class TestUser:
    """Who the user's code is, and what it may not become."""

    async def test_commands_run_as_uid_1000_in_no_other_group(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "id -u; id -ru; id -g; id -G"])

        assert result.stdout.split() == ["1000", "1000", "1000", "1000"]

    async def test_commands_have_no_capability_and_no_way_to_one(self, sandbox: Sandbox) -> None:
        status = await sandbox.exec(["cat", "/proc/self/status"])

        fields = dict(line.split(":\t", 1) for line in status.stdout.splitlines())
        sets = {name: int(value, 16) for name, value in fields.items() if name.startswith("Cap")}
        assert len(sets) == 5, fields
        assert not any(sets.values()), sets
        assert fields["NoNewPrivs"].strip() == "1"

    async def test_commands_start_with_no_signal_blocked_or_ignored(self, sandbox: Sandbox) -> None:
        status = await sandbox.exec(["cat", "/proc/self/status"])

        fields = dict(line.split(":\t", 1) for line in status.stdout.splitlines())
        # 32 and 33 are the C library's own, and posix_spawn ignores them on purpose.
        own = 0b11 << 31
        held = {name: int(fields[name], 16) & ~own for name in ("SigBlk", "SigIgn", "SigCgt")}
        assert not any(held.values()), held

    async def test_commands_inherit_no_file_but_the_three_standard_ones(
        self, sandbox: Sandbox
    ) -> None:
        result = await sandbox.exec(["ls", "-l", "/proc/self/fd"])

        # `ls` itself has the folder it lists open, as number 3.
        names = [line.split()[8] for line in result.stdout.splitlines()[1:]]
        assert names == ["0", "1", "2", "3"], result.stdout
        assert "/proc/" in result.stdout.splitlines()[-1], result.stdout

    async def test_home_and_workspace_are_the_users_to_write(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "for f in ~ /workspace /tmp; do touch $f/mine && echo $f; done"]
        )

        assert result.stdout.split() == ["/home/user", "/workspace", "/tmp"], result.stderr

    @pytest.mark.parametrize("path", ["/etc/passwd", "/usr/bin/env", "/opt/cloche/bin/guest"])
    async def test_the_systems_files_are_not(self, sandbox: Sandbox, path: str) -> None:
        result = await sandbox.exec(["sh", "-c", f"echo spoiled >> {path}"])

        assert result.exit_code != 0
        assert "denied" in result.stderr or "Read-only" in result.stderr, result.stderr

    async def test_sudo_and_su_lead_nowhere(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(["find", "/", "-xdev", "-perm", "/6000", "-type", "f"])

        assert result.stdout == "", "no program may change who runs it"

    async def test_the_guest_cannot_be_signalled_or_looked_into(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "kill -9 1; kill -9 -1; ls /proc/1/fd; cat /proc/1/environ"]
        )

        assert result.exit_code != 0
        after = await sandbox.exec(["echo", "still here"])
        assert after.stdout == "still here\n"

    async def test_there_is_no_network_but_loopback(self, sandbox: Sandbox) -> None:
        code = (
            "import socket\n"
            "s = socket.socket(); s.settimeout(5)\n"
            "try: s.connect(('192.0.2.1', 80))\n"
            "except OSError as error: print(type(error).__name__, error.strerror)\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n"
        )

        result = await sandbox.exec(["python3", "-c", code])

        assert "unreachable" in result.stdout, result
        assert "['lo']" in result.stdout, result
