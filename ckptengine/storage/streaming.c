/* How does memory get copied past the caches?
 *
 * A plain store reads the line of the target first, from memory, and pushes something else out of the caches. For a
 * target that nobody reads soon, such as a snapshot of gigabytes, both are for nothing: two thirds of the traffic
 * do the same work. libc knows this, too, but only begins at some part of the last level's size, 240 MiB on one
 * machine, which no tensor reaches.
 *
 * SSE2 is in every x86-64 processor; AVX2 and AVX-512 were not faster by more than 3 %, as memory is the limit.
 * Called through ctypes, which needs none of Python's headers and gives the GIL away. */

#if !defined(__x86_64__)
#error "streaming.c has non-temporal stores for x86-64 only"
#endif

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
  LINE = 64,
  STEP = 4 * LINE,
  /* One small page: the processor's own prefetching ends at each page's end. Past the end of the source a prefetch does
   * nothing, or brings in a line for nothing; it never faults. */
  AHEAD = 4096,
  /* Shorter copies have few whole lines. */
  SHORT = 2048,
};

struct move {
  uint64_t to, from, nbytes;
};

/* The CRC-32 of this file as it was compiled: whoever has a newer source sees that this is not made of it. */
uint32_t ckptengine_streaming_source(void) { return CKPTENGINE_SOURCE; }

static void stream(char *target, const char *source, size_t nbytes) {
  /* A non-temporal store takes an aligned address, and pays only where it fills whole lines. */
  size_t head = -(uintptr_t)target & (LINE - 1);
  if (head > nbytes) head = nbytes;
  memcpy(target, source, head);
  target += head, source += head, nbytes -= head;
  for (; nbytes >= STEP; target += STEP, source += STEP, nbytes -= STEP) {
    for (int at = 0; at < STEP; at += LINE) _mm_prefetch((const char *)((uintptr_t)source + AHEAD + at), _MM_HINT_NTA);
    for (int at = 0; at < STEP; at += 16)
      _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
  }
  memcpy(target, source, nbytes);
}

/* Copies `nbytes` bytes from `from` to `to`, which do not overlap and may have any alignment. */
void ckptengine_stream(void *to, const void *from, size_t nbytes) {
  stream(to, from, nbytes);
  /* Non-temporal stores may be seen later than the stores that follow them. Without this, the writer process could see
   * the mark that says "it is there", which is an ordinary store, before it sees the bytes. */
  _mm_sfence();
}

/* The same for `count` copies, none of which overlaps another's target. The short ones among them are as fast by plain
 * stores, and all of them together wait once for their stores. */
void ckptengine_stream_all(const struct move *moves, size_t count) {
  for (size_t at = 0; at < count; at++) {
    char *target = (char *)(uintptr_t)moves[at].to;
    const char *source = (const char *)(uintptr_t)moves[at].from;
    if (moves[at].nbytes < SHORT)
      memcpy(target, source, moves[at].nbytes);
    else
      stream(target, source, moves[at].nbytes);
  }
  _mm_sfence();
}
