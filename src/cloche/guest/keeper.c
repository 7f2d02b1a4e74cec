/* Parent of one command and of all that it starts.
 *
 * A keeper is a child subreaper: a descendant that daemonises, changes session
 * or loses its parent becomes the keeper's own child, so "kill the whole tree"
 * has an exact end, the moment the kernel says there is no child left. It needs
 * no cgroup and so works alike on every backend. It is C because there is one
 * for each running command: 0.1 MB and 0.3 ms instead of 8 MB and 5 ms.
 *
 * keeper CWD PROCESSES FILES TTY PROGRAM [ARGUMENT ...]
 *
 * The environment and the descriptors 0, 1 and 2 are the command's. Descriptor 3
 * leads to the server. The keeper writes lines to it:
 *     started PID
 *     failed ERRNO STAGE                  c(wd), e(xec), s(etup) or f(ork)
 *     exit CODE SIGNAL SECONDS CPU RSS    when the command itself has ended
 * and closes it when no process of the tree is left. It reads single bytes:
 *     0        kill the whole tree
 *     1..64    send this signal to the command's process group
 */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CONTROL = 3, USER = 1000, STOP_PASSES = 32, PATIENCE = 100 };

/* User code goes first when the machine's memory is full, the guest last. */
static const char OOM_SCORE[] = "500";

struct failure {
    int number;
    char stage;
};

static pid_t command;
static bool ended;
static struct timespec began;

static double since_start(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - began.tv_sec) + (double)(now.tv_nsec - began.tv_nsec) / 1e9;
}

static void bound(int resource, rlim_t value) {
    struct rlimit limit;
    getrlimit(resource, &limit);
    if (limit.rlim_max != RLIM_INFINITY && limit.rlim_max < value)
        value = limit.rlim_max;
    limit.rlim_cur = limit.rlim_max = value;
    setrlimit(resource, &limit);
}

static bool become_user(char **argument) {
    setsid();
    if (argument[4][0] == '1' && ioctl(0, TIOCSCTTY, 0) < 0)
        return false;
    int score = open("/root/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (score < 0 || write(score, OOM_SCORE, sizeof OOM_SCORE - 1) < 0)
        return false;
    close(score);
    bound(RLIMIT_NPROC, strtoul(argument[2], NULL, 10));
    bound(RLIMIT_NOFILE, strtoul(argument[3], NULL, 10));
    bound(RLIMIT_CORE, 0);
    /* The kernel refuses the first number it does not know. */
    for (int capability = 0; prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0; capability++)
        continue;
    if (setgroups(0, NULL) || setresgid(USER, USER, USER) || setresuid(USER, USER, USER))
        return false;
    for (int number = 1; number < NSIG; number++)
        signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    return true;
}

static struct failure start(char **argument) {
    struct failure failure = {0, 'f'};
    int trouble[2];
    if (pipe2(trouble, O_CLOEXEC) < 0 || (command = fork()) < 0) {
        failure.number = errno;
        return failure;
    }
    if (command == 0) {
        failure.stage = 's';
        if (become_user(argument)) {
            failure.stage = 'c';
            if (chdir(argument[1]) == 0) {
                failure.stage = 'e';
                execvp(argument[5], argument + 5);
            }
        }
        failure.number = errno;
        _exit(write(trouble[1], &failure, sizeof failure) < 0 ? 126 : 127);
    }
    close(trouble[1]);
    /* The pipe closes with a successful exec. */
    if (read(trouble[0], &failure, sizeof failure) > 0)
        waitpid(command, NULL, 0);
    close(trouble[0]);
    return failure;
}

/* Collect the dead; return whether any child is left. */
static bool reap(void) {
    int status;
    struct rusage usage;
    pid_t dead;
    while ((dead = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        if (dead != command || ended)
            continue;
        ended = true;
        int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
        double cpu = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
        dprintf(CONTROL, "exit %d %d %.6f %.6f %ld\n", number ? 128 + number : WEXITSTATUS(status),
                number, since_start(), cpu, usage.ru_maxrss);
    }
    return dead == 0;
}

struct member {
    pid_t pid, parent;
    bool mine;
};

/* Return the parent of a process, or 0 when it is gone. */
static pid_t parent_of(const char *pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0)
        return 0;
    text[length] = 0;
    /* The name in parentheses may hold anything: count from the last one. */
    char *rest = strrchr(text, ')');
    int parent = 0;
    return rest && sscanf(rest + 1, " %*c %d", &parent) == 1 ? parent : 0;
}

/* List every process below this one, in memory that the caller frees; none when
 * there is no descriptor or memory left to look, and then again a moment later. */
static size_t list_tree(struct member **tree) {
    size_t count = 0, room = 0;
    struct member *members = *tree = NULL;
    DIR *proc = opendir("/proc");
    if (!proc)
        return 0;
    for (struct dirent *entry; (entry = readdir(proc));) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        if (count == room) {
            room = room ? room * 2 : 256;
            struct member *more = realloc(members, room * sizeof *members);
            if (!more)
                break;
            members = more;
        }
        struct member found = {atoi(entry->d_name), parent_of(entry->d_name), false};
        if (found.parent)
            members[count++] = found;
    }
    closedir(proc);
    pid_t self = getpid();
    for (bool grown = true; grown;) {
        grown = false;
        for (size_t one = 0; one < count; one++) {
            if (members[one].mine)
                continue;
            bool mine = members[one].parent == self;
            for (size_t other = 0; !mine && other < count; other++)
                mine = members[other].mine && members[other].pid == members[one].parent;
            grown |= members[one].mine = mine;
        }
    }
    *tree = members;
    return count;
}

/* Signal the tree; return how many processes it has. */
static size_t signal_tree(int number) {
    struct member *tree;
    size_t count = list_tree(&tree), sent = 0;
    for (size_t one = 0; one < count; one++)
        if (tree[one].mine && kill(tree[one].pid, number) == 0)
            sent++;
    free(tree);
    return sent;
}

/* End whoever traces a process of the tree: a parent does not hear of a death
 * before the tracer has, and a tracer may choose never to listen. */
static void kill_tracers(void) {
    struct member *tree;
    size_t count = list_tree(&tree);
    for (size_t one = 0; one < count; one++) {
        char path[64], text[4096];
        snprintf(path, sizeof path, "/proc/%d/status", tree[one].pid);
        int file = tree[one].mine ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (file < 0)
            continue;
        ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        text[length > 0 ? length : 0] = 0;
        char *line = strstr(text, "\nTracerPid:");
        int tracer = line ? atoi(line + strlen("\nTracerPid:")) : 0;
        if (tracer > 1)
            kill(tracer, SIGKILL);
    }
    free(tree);
}

/* Kill until the kernel says that no child is left. A stopped process cannot
 * fork, so stopping first keeps a fork bomb from outrunning the list. */
static void kill_tree(void) {
    for (int passes = 1; reap(); passes++) {
        size_t before = 0, now = signal_tree(SIGSTOP);
        for (int pass = 0; pass < STOP_PASSES && now > before; pass++) {
            before = now;
            now = signal_tree(SIGSTOP);
        }
        signal_tree(SIGKILL);
        if (passes % PATIENCE == 0)
            kill_tracers();
        struct timespec pause = {0, 500 * 1000};
        nanosleep(&pause, NULL);
    }
}

static void obey(int order) {
    if (order == 0) {
        kill_tree();
        _exit(0);
    }
    if (kill(-command, order) < 0 && !ended)
        kill(command, order);
}

int main(int count, char **argument) {
    if (count < 6)
        return 2;
    clock_gettime(CLOCK_MONOTONIC, &began);
    fcntl(CONTROL, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    sigset_t watched;
    sigemptyset(&watched);
    sigaddset(&watched, SIGCHLD);
    sigprocmask(SIG_SETMASK, &watched, NULL);
    signal(SIGPIPE, SIG_IGN);
    int signals = signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK);

    struct failure failure = start(argument);
    if (failure.number) {
        dprintf(CONTROL, "failed %d %c\n", failure.number, failure.stage);
        return 1;
    }
    dprintf(CONTROL, "started %d\n", command);
    /* Let go of the command's descriptors, so that its readers see their end. */
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int descriptor = 0; descriptor < 3; descriptor++)
        dup2(null, descriptor);

    struct pollfd ready[] = {{.fd = CONTROL, .events = POLLIN}, {.fd = signals, .events = POLLIN}};
    while (reap() || !ended) {
        if (poll(ready, 2, -1) < 0)
            continue;
        if (ready[1].revents) {
            struct signalfd_siginfo news;
            while (read(signals, &news, sizeof news) > 0)
                continue;
        }
        if (ready[0].revents) {
            unsigned char order = 0;
            /* Nothing to read means that the server is gone: so is the machine, in a moment. */
            obey(read(CONTROL, &order, 1) == 1 ? order : 0);
        }
    }
    return 0;
}
