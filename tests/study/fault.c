/* Preloaded: the n-th call on a file below a folder fails, as of a disk that is full, broken or gone.

   fault_set(folder, n, code, calls): the n-th counted call from now on returns code; n = 0 counts only.
   fault_count() -> how many calls were counted. calls: a mask of READ, WRITE, OPEN, RENAME. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, OPEN = 4, RENAME = 8, MOST = 65536 };
static char root[4096];
static unsigned char ours[MOST];
static long wanted, counted;
static int code, mask;

void fault_set(const char *folder, long n, int error, int calls) {
    snprintf(root, sizeof root, "%s/", folder);
    wanted = n, counted = 0, code = error, mask = calls;
}
long fault_count(void) { return counted; }

static int below(const char *path) { return root[0] && path && !strncmp(path, root, strlen(root)); }
static int fails(int kind) {
    if (!(mask & kind)) return 0;
    if (++counted != wanted) return 0;
    errno = code;
    return 1;
}
static int is_ours(int fd) { return fd >= 0 && fd < MOST && ours[fd]; }
static int note(int fd, const char *path) {
    if (fd >= 0 && fd < MOST) ours[fd] = below(path);
    return fd;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define OPENER(name, ...)                                                  \
    mode_t mode = 0;                                                       \
    if (flags & (O_CREAT | O_TMPFILE)) {                                   \
        va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); \
    }                                                                      \
    REAL(name);                                                            \
    if (below(path) && !(flags & O_DIRECTORY) && fails(OPEN)) return -1;   \
    return note(real(__VA_ARGS__), path);

int open(const char *path, int flags, ...) { OPENER(open, path, flags, mode) }
int open64(const char *path, int flags, ...) { OPENER(open64, path, flags, mode) }
int openat(int at, const char *path, int flags, ...) { OPENER(openat, at, path, flags, mode) }
int openat64(int at, const char *path, int flags, ...) { OPENER(openat64, at, path, flags, mode) }
FILE *fopen64(const char *path, const char *how) {
    REAL(fopen64);
    if (below(path) && fails(OPEN)) return NULL;
    FILE *file = real(path, how);
    if (file) note(fileno(file), path);
    return file;
}
int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < MOST) ours[fd] = 0;
    return real(fd);
}
ssize_t read(int fd, void *to, size_t n) { REAL(read); return is_ours(fd) && fails(READ) ? -1 : real(fd, to, n); }
ssize_t pread64(int fd, void *to, size_t n, off64_t at) {
    REAL(pread64);
    return is_ours(fd) && fails(READ) ? -1 : real(fd, to, n, at);
}
ssize_t write(int fd, const void *from, size_t n) {
    REAL(write);
    return is_ours(fd) && fails(WRITE) ? -1 : real(fd, from, n);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(writev);
    return is_ours(fd) && fails(WRITE) ? -1 : real(fd, parts, n);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return below(from) && fails(RENAME) ? -1 : real(from, to);
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return below(path) && fails(WRITE) ? -1 : real(path, mode); }
