"""The system call filter: what is not needed does not exist, by any table of numbers."""

from __future__ import annotations

import platform

import pytest

from cloche.sandbox.sandbox import Sandbox

from . import probe

# Written out here, and not taken from the filter: a call that slips into its
# list of allowed ones is to be noticed.
FORBIDDEN = """
acct add_key bpf chroot clock_adjtime clock_settime delete_module fanotify_init fanotify_mark
file_getattr file_setattr finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module
io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit io_uring_enter
io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl listmount
listns lookup_dcookie lsm_get_self_attr lsm_list_modules lsm_set_self_attr mbind migrate_pages
mknod mknodat modify_ldt mount mount_setattr move_mount move_pages nfsservctl open_by_handle_at
open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root process_madvise process_vm_readv
process_vm_writev quotactl quotactl_fd reboot request_key set_mempolicy
set_mempolicy_home_node setdomainname sethostname setns settimeofday swapoff swapon syslog
umount2 unshare userfaultfd ustat sysfs uselib vhangup vm86 vmsplice _sysctl clone3 create_module
get_kernel_syms query_module getpmsg putpmsg afs_syscall tuxcall security epoll_ctl_old
epoll_wait_old vserver rseq_slice_yield
""".split()

IN_A_CHILD = """
def in_a_child(number, *arguments):
    '''Make a call in a child, which it may cost its life; return what came of it.'''
    output, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(end, call(number, *arguments).encode())
        os._exit(0)
    os.close(end)
    _, status = os.waitpid(child, 0)
    said = os.read(output, 100).decode()
    os.close(output)
    return said or f"signal {os.WTERMSIG(status)}"
"""


async def test_every_forbidden_call_is_refused(sandbox: Sandbox, numbers: dict[str, int]) -> None:
    there = {name: numbers[name] for name in FORBIDDEN if name in numbers}

    said = await probe.ask(
        sandbox,
        IN_A_CHILD
        + """
said = {name: in_a_child(number, 0, 0, 0, 0, 0, 0) for name, number in given["calls"].items()}
answer([said, in_a_child(given["getpid"])])
""",
        calls=there,
        getpid=numbers["getpid"],
    )

    assert len(there) > 60, "the machine's headers name too few of them"
    assert said[1] == "ok", "the probe's calls do not arrive"
    assert {name: word for name, word in said[0].items() if word not in ("EPERM", "ENOSYS")} == {}


async def test_a_call_that_nobody_knows_does_not_exist(
    sandbox: Sandbox, numbers: dict[str, int]
) -> None:
    """A later kernel's calls are closed until someone opens them."""
    beyond = [max(numbers.values()) + step for step in (1, 2, 5, 10, 20, 50, 100, 500)]

    said = await probe.ask(
        sandbox,
        IN_A_CHILD + "answer({n: in_a_child(n, 0, 0, 0, 0, 0, 0) for n in given['beyond']})",
        beyond=[*beyond, 0x3FFFFFFF],
    )

    assert set(said.values()) == {"ENOSYS"}, said


async def test_only_four_families_of_sockets_exist(sandbox: Sandbox) -> None:
    said = await probe.ask(
        sandbox,
        """
        def make(family, kind):
            socket.socket(family, kind).close()
        answer({family: sorted({attempt(make, family, kind) for kind in (1, 2, 3, 5, 10)})
                for family in range(0, 64)})
        """,
    )

    allowed = {str(family) for family in (1, 2, 10, 16)}
    assert all("ok" in said[family] for family in allowed), said
    others = {family: words for family, words in said.items() if family not in allowed}
    assert {word for words in others.values() for word in words} == {"ENOSYS"}, others


async def test_no_persona_weakens_memory(sandbox: Sandbox, numbers: dict[str, int]) -> None:
    flags = {
        "READ_IMPLIES_EXEC": 0x0400000,
        "MMAP_PAGE_ZERO": 0x0100000,
        "ADDR_LIMIT_3GB": 0x8000000,
    }

    said = await probe.ask(
        sandbox,
        "answer({flag: call(given['number'], value) for flag, value in given['flags'].items()})",
        number=numbers["personality"],
        flags={**flags, "plain": 0},
    )

    assert said.pop("plain") == "ok"
    assert set(said.values()) <= {"EPERM", "ENOSYS"}, said


OTHER_TABLES = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static uint32_t *low;

static long by_int80(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c), "S"(0L),
                     "D"(0L) : "memory", "r8", "r9", "r10", "r11");
    return (int)result;
}

static long by_x32(long number, long a, long b, long c) {
    long result = syscall(0x40000000 | number, a, b, c);
    return result < 0 ? -errno : result;
}

static long by_native(long number, long a, long b, long c) {
    long result = syscall(number, a, b, c);
    return result < 0 ? -errno : result;
}

static void try(const char *name, long (*how)(long, long, long, long), long number, long a,
                long b, long c) {
    int channel[2], status;
    if (pipe(channel)) exit(1);
    if (fork() == 0) {
        long result = how(number, a, b, c);
        if (write(channel[1], &result, sizeof result) < 0) _exit(1);
        _exit(0);
    }
    close(channel[1]);
    wait(&status);
    long result;
    if (read(channel[0], &result, sizeof result) == sizeof result)
        printf("%s %ld\n", name, result);
    else
        printf("%s signal %d\n", name, WTERMSIG(status));
    close(channel[0]);
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    low = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    low[0] = 40, low[1] = 1, low[2] = 0; /* AF_VSOCK, for socketcall, which reads from memory */
    long at = (long)low;
    try("native-getppid", by_native, SYS_getppid, 0, 0, 0);
    try("i386-getppid", by_int80, 64, 0, 0, 0);
    try("i386-mount", by_int80, 21, 0, 0, 0);
    try("i386-unshare", by_int80, 310, 0x10000000, 0, 0);
    try("i386-clone", by_int80, 120, 0x10000011, 0, 0);
    try("i386-clone3", by_int80, 435, 0, 0, 0);
    try("i386-socketcall", by_int80, 102, 1, at, 0);
    try("i386-socket", by_int80, 359, 40, 1, 0);
    try("i386-ipc", by_int80, 117, 23, 0, 4096);
    try("i386-bpf", by_int80, 357, 0, 0, 0);
    try("i386-keyctl", by_int80, 288, 0, 0, 0);
    try("i386-io_uring", by_int80, 425, 1, 0, 0);
    try("i386-vm86", by_int80, 166, 0, 0, 0);
    try("i386-open_by_handle_at", by_int80, 342, 0, 0, 0);
    try("x32-getppid", by_x32, SYS_getppid, 0, 0, 0);
    try("x32-unshare", by_x32, SYS_unshare, 0x10000000, 0, 0);
    try("x32-ptrace", by_x32, 521, 0, 0, 0);
    try("x32-execve", by_x32, 520, 0, 0, 0);
    try("x32-mount", by_x32, SYS_mount, 0, 0, 0);
    return 0;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int 0x80 and x32 are x86's own")
async def test_the_32_bit_tables_are_no_way_around(sandbox: Sandbox) -> None:
    program = await probe.build(sandbox, OTHER_TABLES, "tables")

    said = (await sandbox.exec([program], timeout_s=20)).stdout
    outcomes = dict(line.split(" ", 1) for line in said.splitlines())

    assert int(outcomes.pop("native-getppid")) > 0, "the probe's calls do not arrive"
    assert len(outcomes) == 18, said
    # -1 EPERM, -38 ENOSYS; signal 31 is SIGSYS: the filter ended the process.
    assert set(outcomes.values()) <= {"-1", "-38", "signal 31"}, outcomes


async def test_the_filter_cannot_be_taken_off(sandbox: Sandbox, numbers: dict[str, int]) -> None:
    """A filter of the user's own only adds to the machine's, and execve keeps both."""
    allow_all = "struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)"
    said = await probe.ask(
        sandbox,
        f"""
        code = ctypes.create_string_buffer({allow_all})
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(code))
        installed = call(given["prctl"], 22, 2, program)
        after = call(given["unshare"], 0x10000000)
        import subprocess
        below = subprocess.run(["unshare", "--user", "true"]).returncode
        status = read("/proc/self/status", 1 << 16).splitlines()
        answer([installed, after, below, [line for line in status if "eccomp" in line]])
        """,
        prctl=numbers["prctl"],
        unshare=numbers["unshare"],
    )

    assert said[0] == "ok", "the probe installed no filter"
    assert said[1] == "EPERM"
    assert said[2] != 0
    assert said[3][0].split() == ["Seccomp:", "2"]
