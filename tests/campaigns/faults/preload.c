/* A disk that fails or is slow, for processes that preload this library: calls on files below FAULT_PATH.
 *
 *   FAULT_KIND   error: call number FAULT_CALL ends with EIO; slow: each call waits FAULT_CALL microseconds
 *   FAULT_MARK   a file that is made when a call has failed: where it exists, no other fails
 *   FAULT_RANK   of this rank only (PMI_RANK); without it, of all
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long calls;

static int is_below(int file) {
    char name[64], path[PATH_MAX];
    const char* folder = getenv("FAULT_PATH");
    const char *rank = getenv("FAULT_RANK"), *own = getenv("PMI_RANK");
    if (!folder || (rank && (!own || strcmp(rank, own)))) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    return length > 0 && !strncmp(path, folder, strlen(folder));
}

static int fails(int file) {
    int before = errno;
    int hit = 0;
    if (is_below(file)) {
        long number = atol(getenv("FAULT_CALL"));
        if (!strcmp(getenv("FAULT_KIND"), "slow"))
            usleep((useconds_t)number);
        else
            hit = atomic_fetch_add(&calls, 1) == number && access(getenv("FAULT_MARK"), F_OK);
    }
    if (hit) close(open(getenv("FAULT_MARK"), O_CREAT | O_WRONLY, 0600));
    errno = hit ? EIO : before;
    return hit;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void* data, size_t count) { return fails(file) ? -1 : REAL(write)(file, data, count); }
ssize_t read(int file, void* data, size_t count) { return fails(file) ? -1 : REAL(read)(file, data, count); }
int fsync(int file) { return fails(file) ? -1 : REAL(fsync)(file); }
