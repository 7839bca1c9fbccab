// xxh3-128 for one instruction set: built once for each, with the flags of that set.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstring>

#define NATIVE_BENCH_JOIN(a, b) a##b
#define NATIVE_BENCH_NAME(isa) NATIVE_BENCH_JOIN(xxh3_128_, isa)

void NATIVE_BENCH_NAME(NATIVE_BENCH_ISA)(const void* data, std::size_t nbytes, unsigned char digest[16]) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, nbytes));
  std::memcpy(digest, canonical.digest, sizeof canonical.digest);
}
