"""A wall clock for the processes of a job that can jump, as when a host's clock is set; the monotonic clock goes on.

A small library, compiled here and loaded before libc by LD_PRELOAD, adds seconds from a file to what libc's clocks say.
libfaketime would also change how long Python's `time.sleep` sleeps.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

_FILE = "SHARDKIT_CHAOS_CLOCK"
_COMPILERS = ("cc", "gcc", "clang")
_BYTES = 8
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

int close(int); /* unistd.h would declare syscall otherwise */

static volatile long long *ahead;

__attribute__((constructor)) static void begin(void) {
  const char *name = getenv("SHARDKIT_CHAOS_CLOCK");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) ahead = found;
  close(file);
}

static void *of_libc(const char *name) {
  void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2"); /* of two versions of a condition the new one */
  return found ? found : dlsym(RTLD_NEXT, name);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = of_libc(#name)

int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime); /* not the system call: collectives that wait ask all the time */
  int failed = real(clock, now);
  if (!failed && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
  return failed;
}

int gettimeofday(struct { long seconds, micros; } *now, void *zone) {
  struct timespec found;
  int failed = clock_gettime(CLOCK_REALTIME, &found);
  if (now) now->seconds = found.tv_sec, now->micros = found.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}

/* The kernel's clock does not jump: a wait until a time would end at once, again and again. Times since the start of
   the machine are smaller than those since 1970. */
static const struct timespec *kernel(const struct timespec *until, struct timespec *space) {
  if (!until || !ahead || until->tv_sec < 1000000000) return until;
  *space = *until;
  space->tv_sec -= *ahead;
  return space;
}

int pthread_cond_timedwait(pthread_cond_t *on, pthread_mutex_t *with, const struct timespec *until) {
  struct timespec space;
  REAL(pthread_cond_timedwait);
  return real(on, with, kernel(until, &space));
}

int pthread_cond_clockwait(pthread_cond_t *on, pthread_mutex_t *with, clockid_t clock, const struct timespec *until) {
  struct timespec space;
  REAL(pthread_cond_clockwait);
  return real(on, with, clock, kernel(until, &space));
}

int sem_timedwait(sem_t *on, const struct timespec *until) {
  struct timespec space;
  REAL(sem_timedwait);
  return real(on, kernel(until, &space));
}

long syscall(long number, long a, long b, long c, long d, long e, long f) {
  struct timespec space;
  REAL(syscall);
  if (number == SYS_futex && (b & 256)) d = (long)kernel((const struct timespec *)d, &space); /* FUTEX_CLOCK_REALTIME */
  return real(number, a, b, c, d, e, f);
}
"""


def compiler() -> str | None:
    """A C compiler; None without one."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def make_clock(file: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a job whose clock follows `set_clock(file, seconds)`; the library is built beside the file.

    Raises:
        ValueError: there is no C compiler, or it fails; a path that LD_PRELOAD cannot have.
    """
    found, built = compiler(), file.with_suffix(".so")
    if re.search(r"[\s:]", str(built.resolve())):  # they end a path in LD_PRELOAD, and the clock would stand
        raise ValueError(
            f"chaos: clock needs a folder without spaces and colons in its path; got {str(file.resolve().parent)!r}. "
            "Pass another folder (--folder), or leave clock out of kinds."
        )
    if found is None:
        raise ValueError("chaos: clock needs a C compiler; none was found. Install gcc, or leave clock out of kinds.")
    words = [found, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(built), "-ldl"]
    done = subprocess.run(words, input=_SOURCE, text=True, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(
            f"chaos: clock needs a C compiler; {found} ended with {done.returncode}: {done.stderr.strip()[:200]}. "
            "Mend it, or leave clock out of kinds."
        )
    set_clock(file, 0)
    before = environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{built.resolve()}:{before}" if before else str(built.resolve()), _FILE: str(file.resolve())}


def set_clock(file: Path, seconds: int) -> None:
    """Sets the clock of the job, this many seconds from the true time."""
    with open(file, "r+b" if file.exists() else "wb") as now:  # the same file, which the processes have mapped
        now.write(seconds.to_bytes(_BYTES, "little", signed=True))
