"""Machines as OCI containers under runc or crun: the embedded default, with no daemon.

What a machine is made of, and who takes it away when everything dies at once:

    processes, mounts, loop device    the kernel, with the last process of the machine
    cgroups, folder                   `destroy`, or the next `sweep`

Mounts live only in the machine's own mount namespace, so none can be left behind.
"""

from cloche.backends.container.backend import Backend as Backend
