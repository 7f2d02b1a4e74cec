"""The server inside every machine.

It runs on the machine's own Python, depends on no library, and imports nothing
else of Cloche. Its host-side twin is `cloche.sandbox`, which trusts
nothing that comes from here.

Two kinds of process, both of them root of the machine and of nothing else:

    server    process 1: HTTP/1.1 on the machine's one channel; files, tunnels, processes
    keeper    one for each command: parent of its whole tree, as long as any of it lives

User code runs below a keeper as uid 1000 with no capabilities.
"""
