// Bytes that tell where they belong: each 8-byte word is a hash of its own position, so a block that is missing,
// stale or in the wrong place shows in any word of it. No storage can compress or deduplicate them.
#pragma once

#include <cstdint>

namespace native {

inline std::uint64_t pattern_word(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// Writes the pattern's bytes [offset, offset + nbytes), offset a multiple of 8.
void fill_pattern(char* data, std::uint64_t nbytes, std::uint64_t seed, std::uint64_t offset);

// The same from offset 0 by several threads, which gives fresh memory its pages on the way.
void fill_pattern_parallel(char* data, std::uint64_t nbytes, std::uint64_t seed, std::uint64_t threads);

// The n-th of `count` places, spread over [0, nbytes): the first, the last and some that no block size lines up with.
std::uint64_t sample_place(std::uint64_t n, std::uint64_t count, std::uint64_t nbytes, std::uint64_t length);

}  // namespace native
