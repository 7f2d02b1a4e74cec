"""The server inside every machine.

It runs on the machine's own Python with h11 as its only dependency and imports
nothing else of Cloche. Its host-side twin is `cloche.sandbox`, which trusts
nothing that comes from here.

Three kinds of process, all of them root of the machine and of nothing else:

    init      process 1; forks a keeper for each command, reaps, holds no state
    server    HTTP/1.1 on the machine's one channel; files, tunnels, the process table
    keeper    one for each command: parent of its whole tree, for as long as any of it lives

User code runs below a keeper as uid 1000 with no capabilities.
"""
