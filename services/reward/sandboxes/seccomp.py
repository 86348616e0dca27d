"""The seccomp filter of sandboxes: system calls that have broken sandboxes before fail with EPERM.

Namespaces do not restrict calls that trace other processes, load code into the kernel, make further
namespaces (and with them root's powers over mounts and networks), or have had more faults than
uses. The filter is compiled by libseccomp, where it is installed, for this machine's architecture;
a process that makes calls of another architecture is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from typing import Final

import structlog

log = structlog.get_logger("troupe.reward")

DENIED: Final = (
    # Other processes.
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "pidfd_getfd"),
    # Namespaces and file systems.
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount"),
    *("open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    *("open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd", "swapon", "swapoff"),
    # Code in the kernel, and what watches it.
    *("bpf", "perf_event_open", "userfaultfd", "kexec_load", "kexec_file_load", "init_module"),
    *("finit_module", "delete_module", "create_module", "fanotify_init", "syslog"),
    *("lookup_dcookie", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    # Keys are not namespaced.
    *("keyctl", "add_key", "request_key"),
    # The machine.
    *("reboot", "acct", "iopl", "ioperm", "modify_ldt", "vm86", "vm86old", "settimeofday"),
    *("clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname", "setdomainname"),
    *("vhangup", "nfsservctl", "move_pages", "migrate_pages", "personality"),
)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, each by itself.
_NAMESPACES: Final = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
# Allowed socket families. Others leave the network namespace, AF_VSOCK for example.
_FAMILIES: Final = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_FAMILIES_END: Final = 17
# Calls that act on another process of the same user, with the index of its id among the arguments:
# denied on a sandbox's first process, from which all calls come.
_ON_OTHERS: Final = {
    "prlimit64": 0,
    "sched_setaffinity": 0,
    "sched_setscheduler": 0,
    "sched_setparam": 0,
    "sched_setattr": 0,
    "setpriority": 1,
    "ioprio_set": 1,
}
_FIRST: Final = 1
# Calls that can act on all processes of a user: PRIO_USER, IOPRIO_WHO_USER.
_ON_USERS: Final = {"setpriority": 2, "ioprio_set": 3}
# Requests that put input into a terminal.
_TERMINAL: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_EQ: Final = 4
_GE: Final = 5
_MASKED: Final = 7
_LIBRARY: Final = "libseccomp.so.2"


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@functools.cache
def filter_path() -> str | None:
    """Return the path of a file with the filter, which lives as long as this process; None without
    libseccomp, which is logged."""
    try:
        program = compile_filter()
    except OSError as error:
        log.warning("system calls of sandboxes are not filtered", reason=str(error))
        return None
    descriptor = os.memfd_create("troupe-seccomp")
    os.write(descriptor, program)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def compile_filter() -> bytes:
    """Return the filter as the kernel takes it (BPF). Raises OSError."""
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_rule_add_array.argtypes = (
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint),
        ctypes.POINTER(_Comparison),
    )
    context = library.seccomp_init(_ALLOW)
    if not context:
        raise OSError("libseccomp makes no filter")

    def deny(name: str, *comparison: int, error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:  # younger than the library, or older than the kernel
            return
        rule = _Comparison(*comparison) if comparison else None
        done = library.seccomp_rule_add_array(
            context, _ERRNO | error, number, int(bool(comparison)), rule
        )
        # A call that this architecture does not have cannot be made anyway.
        if done not in (0, -errno.EDOM, -errno.EFAULT):
            raise OSError(-done, f"a rule for {name}")

    try:
        for name in DENIED:
            deny(name)
        for flag in _NAMESPACES:
            deny("clone", 0, _MASKED, flag, flag)
        # A filter cannot read its flags, which are in memory; libraries fall back to clone.
        deny("clone3", error=errno.ENOSYS)
        for family in set(range(_FAMILIES_END)) - set(_FAMILIES):
            deny("socket", 0, _EQ, family, 0)
        deny("socket", 0, _GE, _FAMILIES_END, 0)
        for name, place in _ON_OTHERS.items():
            deny(name, place, _MASKED, 0xFFFFFFFF, _FIRST)
        for name, users in _ON_USERS.items():
            deny(name, 0, _MASKED, 0xFFFFFFFF, users)
        for request in _TERMINAL:
            deny("ioctl", 1, _MASKED, 0xFFFFFFFF, request)
        return _export(library, context)
    finally:
        library.seccomp_release(context)


def _export(library: ctypes.CDLL, context: int) -> bytes:
    with contextlib.closing(os.fdopen(os.memfd_create("troupe-seccomp"), "r+b")) as file:
        done = library.seccomp_export_bpf(context, file.fileno())
        if done:
            raise OSError(-done, "libseccomp exports no filter")
        file.seek(0)
        return file.read()
