"""Which system calls exist inside a machine.

An allow-list: what is not named here does not exist (ENOSYS), so a call that a
later kernel adds is closed until someone opens it. What programs probe for and
handle a refusal of is refused with EPERM, as it would be without the right.
The kernel still judges every allowed call by the caller's rights, which are none.
"""

from __future__ import annotations

import errno
from typing import Any

# Not io_setup: the whole host shares one count of its contexts (fs.aio-max-nr).
_ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown
clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup
dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod
fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr
fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait futex_waitv futex_wake
futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid
getresuid getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr
getxattrat inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
ioctl ioprio_get ioprio_set kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen listxattr
listxattrat llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier
memfd_create memfd_secret mincore mkdir mkdirat mlock mlock2 mlockall mmap mprotect mq_getsetattr
mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd
msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat open openat openat2 pause
pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl
pread64 preadv preadv2 prlimit64 process_mrelease pselect6 ptrace pwrite64 pwritev pwritev2 read
readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr
removexattrat rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending
rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg
sendmsg sendto set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups
setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setsockopt
setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4
socketpair splice stat statfs statmount statx symlink symlinkat sync sync_file_range syncfs
sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat
uretprobe utime utimensat utimes vfork wait4 waitid waitpid write writev
""".split()

_REFUSED = """
acct add_key bpf chroot clock_adjtime clock_settime delete_module finit_module fsconfig fsmount
fsopen fspick init_module kcmp kexec_file_load kexec_load keyctl lookup_dcookie
mount mount_setattr move_mount move_pages open_by_handle_at open_tree perf_event_open pidfd_getfd
pivot_root process_madvise process_vm_readv process_vm_writev quotactl quotactl_fd reboot
request_key setdomainname sethostname setns settimeofday stime swapoff swapon syslog umount
umount2 unshare userfaultfd vhangup
""".split()

_NEW_NAMESPACE = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

_MODE_ARGUMENTS = {"mknod": 1, "mknodat": 2}
_KIND, _NAMED_PIPE, _DEVICES = 0o170000, 0o010000, (0o020000, 0o060000)
"""S_IFMT and S_IFIFO; S_IFCHR and S_IFBLK."""

_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, and AF_NETLINK: without it, programs cannot list interfaces."""

_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""Plain Linux, and no address randomisation, which debuggers ask for."""


def profile() -> dict[str, Any]:
    """Return the `linux.seccomp` part of an OCI configuration."""
    allow = "SCMP_ACT_ALLOW"
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        # No architecture is named, so only the machine's own is there: a 32-bit or x32 call,
        # whose numbers mean something else, ends its process.
        "syscalls": [
            {"names": _ALLOWED, "action": allow},
            {"names": _REFUSED, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
            {
                # clone3 hides its flags in memory, where a filter cannot look, and so does
                # not exist (ENOSYS by default): the C library falls back to clone.
                "names": ["clone"],
                "action": allow,
                "args": [_masked(0, _NEW_NAMESPACE, 0)],
            },
            # Named pipes, which builds and shells use, and nothing else.
            *(
                {"names": [name], "action": allow, "args": [_masked(index, _KIND, _NAMED_PIPE)]}
                for name, index in _MODE_ARGUMENTS.items()
            ),
            *(
                {
                    "names": [name],
                    "action": "SCMP_ACT_ERRNO",
                    "errnoRet": errno.EPERM,
                    "args": [_masked(index, _KIND, device)],
                }
                for name, index in _MODE_ARGUMENTS.items()
                for device in _DEVICES
            ),
            *(
                {"names": ["socket"], "action": allow, "args": [_equal(0, family)]}
                for family in _FAMILIES
            ),
            *(
                {"names": ["personality"], "action": allow, "args": [_equal(0, persona)]}
                for persona in _PERSONALITIES
            ),
        ],
    }  # fmt: skip


def _equal(index: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": value, "op": "SCMP_CMP_EQ"}


def _masked(index: int, mask: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
